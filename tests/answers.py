"""Wrong answers that readers give, one or two for each exercise.

    exercise: [(answer, words of the verdict), …]

`Swap("old", "new")` is the lesson's own solution with a piece of its
text replaced: what is right stands in the lesson, and the mistake stands here. The solutions
themselves, and the forms without an answer, are read from the lessons.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import collectives, memory, ranks
from shardlab.layout import Layout
from shardtools import parity


class Swap:
    """A solution in which each `old` is replaced by its `new`."""

    def __init__(self, *texts: str):
        self.pairs = list(zip(texts[::2], texts[1::2], strict=True))


def nothing(*_: Any) -> None:
    """A function that does and returns nothing."""


ZERO = {
    "zero_bytes": [
        (13e9 * 16, "stage 0"),
        (13e9 * (4 + 12 / 32), "stage 1"),
    ],
    "my_shard_bounds": [
        (Swap("-(-elements // size)", "elements // size"), "belong to nobody"),
        (Swap("min(rank * shard, elements)", "rank * shard"), "behind the end"),
    ],
    "my_mixed_step": [
        (Swap("master -= lr", "master = master - lr"), "`master = …` gives the name"),
        (Swap(" / dist.get_world_size(group))", ")"), "summed over 2 ranks, not averaged"),
    ],
    "my_global_norm": [
        (Swap("dist.all_reduce(square, group=group)", "..."), "own pieces"),
        (Swap("dist.all_reduce", "square.sqrt_()\n    dist.all_reduce", "square.sqrt()", "square"),
         "sum of the ranks' norms"),
    ],
    "my_stage": [
        (Swap("held + activations", "held"), "leaves out the activations"),
        (Swap("held + activations", "held + activations / ranks_"), "No stage divides activations"),
    ],
}  # fmt: skip

DATA_PARALLEL = {
    "ddp_bytes": [
        (217e6, "four bytes"),
        (434e6, "have to come back"),
    ],
    "overlap_floor": [
        (0.19, "without any overlap"),
        (0.10, "before forward"),
    ],
    "my_exact_average": [
        (Swap("        if used:", "        if True:"), "no rank used has a gradient of zeros"),
        (Swap("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"), "the sum over the ranks, 2 times"),
    ],
    "my_joined_loss": [
        (lambda s, n, g: s / n, "average of the ranks' own means"),
        (Swap("loss_sum * dist.get_world_size(group)", "loss_sum"), "3 times too small"),
    ],
    "my_accumulate": [
        (Swap("with model.no_sync():", "if True:"), "messages for"),
        (Swap("    (loss_of(last)", "    with model.no_sync():\n        (loss_of(last)"),
         "outside no_sync()"),
    ],
    "my_micro_batches": [
        (Swap(" - backward)", ")"), "let nothing overlap"),
        (Swap(" - backward)", ")", "waiting >", "max(0, waiting - m * backward) >"), "hides any"),
    ],
}  # fmt: skip


def all_send_first(tensor, group):
    """With gloo it works."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    sent = ranks.isend(tensor, (rank + 1) % size, group)
    ranks.irecv(received, (rank - 1) % size, group).wait()
    sent.wait()
    return received


FORMULA = "size * latency * bandwidth * (1 - fraction) / fraction"
COLLECTIVES = {
    "ring_bytes": [
        (60, "average over the ranks"),
        (28, "reduce-scatter alone"),
    ],
    "all_reduce_max": [
        (Swap("torch.stack(everyones)", "torch.stack([0 * tensor, *everyones])"), "began as zeros"),
        (Swap("tensor.copy_(", "return ("), "belongs into `tensor` itself"),
    ],
    "shift": [
        (all_send_first, "With nccl it hangs, on 2 ranks"),
        (lambda t, g: t, "It is the rank's own tensor"),
    ],
    "broadcast_large": [
        (Swap("collectives.all_gather(pieces, pieces[rank], group)", "..."), "is off by"),
        (collectives.broadcast, "Send pieces"),
    ],
    "my_bucket_bytes": [
        (Swap(FORMULA, FORMULA[7:]), "it has to be N times as large"),
        (Swap("(1 - fraction) / fraction", "1 / fraction"), "The share is of all the time"),
    ],
}  # fmt: skip

C = 4 * 4096 * 11008
REDUCE = "dist.all_reduce(c_MN, group=group)"
GEMM = {
    "gemm_bytes": [
        (0.75 * C, "a reduce-scatter"),
        (3 * C, "naive way"),
    ],
    "gemm_pays": [
        (4000, "a multiply-add as one"),
        (1750, "Both sides lose an eighth"),
    ],
    "my_backward_of_columns": [
        (Swap("dist.all_reduce(grad_MK, group=group)", "..."), "has its own part"),
        (Swap("return grad_MK,", "return grad_MK / group.size(),"), "the mean of the ranks' parts"),
    ],
    "my_inner": [
        (Swap(REDUCE, "c_MN += bias_N\n    " + REDUCE, " + bias_N", ""),
         "The bias is in it 2 times"),
        (Swap("c_MN + bias_N", "c_MN"), "The bias is missing"),
    ],
    "my_two_products": [
        (Swap("dist.all_reduce(z_MN, group=group)", "..."), "cut in its inner dimension"),
        (Swap("F.gelu(x_MK @ v_Kf)", "x_MK @ v_Kf"), "GELU is missing"),
    ],
    "my_ring_product": [
        (Swap("range(size)", "range(1)"), "own piece of B"),
        (Swap("(rank - step)", "(rank + step)"), "those of rank (r + i)"),
    ],
    "my_way": [
        (Swap("M * k + k * N + M * N", "M * k + k * N + m * N"), "as large as all of C"),
        (lambda *_: "rows", "The fullest rank has"),
    ],
}  # fmt: skip


PASSING = "passing = ranks.exchange(kv, (rank + 1) % N, coming, (rank - 1) % N, group)"
ONE_BY_ONE = (
    "sent = ranks.isend(kv, (rank + 1) % N, group)\n"
    "            ranks.irecv(coming, (rank - 1) % N, group).wait(), sent.wait()"
)
CONTEXT_PARALLEL = {
    "my_zigzag": [
        (lambda s, r, n: range(r * s // n, (r + 1) * s // n), "the contiguous cut"),
        (lambda s, r, n: range(r, s, n), "the striped cut"),
    ],
    "my_pass": [
        (Swap("(rank + 1)", "(rank+1)", "(rank - 1)", "(rank + 1)", "(rank+1)", "(rank - 1)"),
         "the other way"),
        (lambda t, group: t, "its own tensor"),
    ],
    "my_decode": [
        (Swap("dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "largest *= 0"),
         "finite"),
        (Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)"),
         "mean of the ranks' outputs"),
    ],
    "my_ring": [
        (Swap(PASSING, ONE_BY_ONE, "passing.wait()", "..."), "Let even ranks send first"),
        (Swap("if source <= rank", "if True", "if source == rank", "if False"), "without a mask"),
    ],
    "my_context": [
        (Swap("states + kept", "states / N + kept"), "divides no states"),
        (Swap("if divides and", "if"), "divide both numbers of heads"),
    ],
}  # fmt: skip

WIRE = 2 * 4096 * 8 * 7168 * 2
EXPERTS = {
    "experts_tokens": [
        (300 * 256, "eight experts"),
        (2400, "How many experts share them?"),
    ],
    "experts_wire": [
        (WIRE, "does not leave it"),
        (WIRE * 63 / 128, "has to come back"),
    ],
    "my_admit": [
        (Swap("for c in range(chosen_TC.shape[1]):\n        for t in range(chosen_TC.shape[0]):",
              "for t in range(chosen_TC.shape[0]):\n        for c in range(chosen_TC.shape[1]):"),
         "token by token"),
        (Swap("== places", "== places + 1"), "it has 3 places"),
    ],
    "my_exchange": [
        (lambda x, *_: x, "rows"),
        (nothing, "returned None"),
    ],
    "my_average": [
        (Swap("own /= data", "own /= copies"), "four ranks brought tokens"),
        (Swap("(own, group=copies)", "(own, group=data)"), "different experts"),
    ],
    "my_balancing": [
        (Swap("dist.all_reduce(load_E, group=group)", "..."), "each rank's own tokens"),
        (Swap("scores_TE.mean(0)", "scores_TE.detach().mean(0)"), "no gradient"),
    ],
    "my_expert_ranks": [
        (Swap(" >= rows", " >= 0"), "gets 32 rows"),
        (lambda *_: 8, "Right is 4"),
    ],
}  # fmt: skip

SBH = 2048 * 12_288
AGAIN = "Column.gather(x_BsH, ctx.group)"
SEQUENCE_PARALLEL = {
    "sequence_bytes": [
        (SBH * 13, "tensor parallelism alone"),
        (SBH * 34, "whole layer"),
    ],
    "my_summands": [
        (Swap(" or name.endswith(late)", ""), "behind the reduce-scatter"),
        (Swap('"norm." in name or ', ""), "A norm is"),
    ],
    "my_column": [
        (Swap("dist.all_reduce(dx_BSH, group=ctx.group)", "..."), "this rank's part alone"),
        (Swap(f"x_BSH = {AGAIN}\n        dw_HF = x_BSH",
              "dy_BSF = dy_BSF.chunk(t, 1)[rank]\n        dw_HF = x_BsH"),
         "this rank's tokens alone"),
    ],
}  # fmt: skip

H, WIDE = 4096, 16384
ENTER, LEAVE = (
    "    x_BSH = tp.copy_to(x_BSH, group)\n",
    "    return tp.reduce_from(y_BSH, group) + bias_H\n",
)
TENSOR_PARALLEL = {
    "tp_bytes": [
        (16 * (2 * H * WIDE + WIDE + H), "one process holds"),
        (16 * (2 * H * WIDE + WIDE + H) / 4, "one of the biases is not divided"),
    ],
    "tp_other_order": [
        (4.5, "SwiGLU has two"),
        (8, "have of Y in the end"),
    ],
    "my_ffn_shards": [
        (Swap("up_FH[own]", "up_FH[:, own]"), "Weights of nn.Linear are [out, in]"),
        (Swap("slice(rank * shard, (rank + 1) * shard)", "slice(0, shard)"), "the same piece"),
    ],
    "my_gated_ffn": [
        (Swap("(y_BSH, group) + bias_H", "(y_BSH + bias_H, group)"), "was added 2 times"),
        (Swap(" + bias_H", ""), "bias was not added"),
    ],
    "my_kv_heads": [
        (Swap("return held(rank),",
              "return range(kv_heads // size * rank, kv_heads // size * (rank + 1)),"),
         "some have to hold the same one"),
        (Swap("return held(rank),", "return [rank] if size > kv_heads else held(rank),"),
         "Neighbours"),
    ],
    "my_greedy": [
        (Swap("    number_BS[own", "    return number_BS\n    number_BS[own"),
         "own likeliest entry"),
        (Swap(" + dist.get_rank(group) * v", ""), "begin at r v"),
    ],
    "my_degree": [
        (Swap("return None", "return 0"), "None fits, thus None"),
        (Swap("config.ffn_width, config.vocab", "config.ffn_width"), "It does not divide vocab"),
    ],
}  # fmt: skip

FOUR = {"A": "decay", "B": "share", "C": "clip", "D": "counts"}
PARITY = {
    "times_allowed": [
        (1.9e-3 / 2.1e-7, "twelve times the noise is still allowed"),
        (1.9e-3 / 2.1e-7 / 3, "the largest counts"),
    ],
    "four_reports": [
        ({**FOUR, "A": "seed"}, "before the first step"),
        ({**FOUR, "A": "clip", "C": "decay"}, "not alike"),
    ],
    "my_cut": [
        (lambda size, total, first: [], "it proposes nothing"),
        (Swap("pairs[:, (first + r) % n]", "pairs[:, r]"), "Begin with it"),
    ],
    "my_program": [
        (Swap("total / count", "total / (y != -100).sum() / size"), "over a rank's own count"),
        (Swap("dist.all_reduce(p.grad)", "..."), "gradient of 4.bias"),
    ],
    "own_parity": [
        (True, "is what parity.check returns"),
        (parity.Report(1, compared=50), "That was one rank"),
    ],
}


WORDS = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}
PLAN = {
    "copy_to forgotten": "types",
    "loss divided by N twice, before backward": "loss",
    "a rank's tokens begin at position 0": "loss",
    "gradients of norms not summed, sequence cut": "types",
    "each epoch in the same order": None,
    "gradients averaged over tp in place of dp": "types",
}
TENSOR_TYPES = {
    "type_words": [
        ({**WORDS, "norm": "RI"}, "a rank's norm sees its own tokens alone"),
        ({**WORDS, "norm": "VR"}, "V on dp it is not"),
    ],
    "my_operator": [
        (Swap("torch.cat(parts,", "torch.cat(parts[::-1],"), "the value changes"),
        (Swap("return total.", "return (total / ctx.group.size())."),
         "addends have to be added up"),
    ],
    "my_sum": [
        (Swap("len(found) == 1", "len(found) == 1 and words[0] != 'P'"), "Addends of two sums"),
        (Swap('"V" if found', "None if found"), "the rank's own"),
    ],
    "my_network": [
        (Swap("copy_to(scale, group)", "scale"), "gradient of scale is not one process's"),
        (Swap("copy_to(x, group)", "x"), "linear(x tp:I, gate tp:V)"),
    ],
    "type_plan": [
        ({**PLAN, "copy_to forgotten": "gradients"}, "something cheaper does"),
        ({**PLAN, "copy_to forgotten": "loss"}, "x is I and meets"),
    ],
}  # fmt: skip

SCRIPT = Path(__file__).resolve().parents[1] / "code/shardlab/train"
LACKS = {"A": "sampler", "B": "set_epoch", "C": "all_reduce", "D": "wrapper"}
TRAIN = {
    "my_ddp_script": [
        (3, "the path of your script"),
        ("none.py", "allowed are scripts"),
    ],
    "my_fsdp_script": [
        (SCRIPT / "core.py", "Of 17 steps 15 are made. Step 16, FSDP2"),
    ],
    "validation_filled_up": [
        (5.5, "That is the right mean"),
        (4.5, "repeats two instead"),
    ],
    "my_mean": [
        (Swap("[total, count]", "[total / max(count, 1), 1.0]"), "mean of the ranks' means"),
        (Swap("(both[0] / both[1])", "both[0]"), "sum of all losses"),
    ],
    "my_rest": [
        (Swap("done * batch :", ":"), "read again"),
        (Swap(": full]", ":]"), "is to be dropped"),
    ],
    "states_of_a_job": [
        ({"ddp": 20.8, "fsdp2": 20.8}, "FSDP2 divides"),
        ({"ddp": 5.2, "fsdp2": 2.6}, "the weights alone"),
    ],
    "missing_lines": [
        (LACKS | {"A": "wrapper", "D": "sampler"}, "up to which step are the weights right"),
        ({"A": "sampler"}, "a dictionary with"),
    ],
}  # fmt: skip

TRAINERS = {
    "lightning_steps": [
        (256, "a rank's"),
        (1024, "shares out"),
    ],
    "my_decision": [
        (Swap("dist.all_reduce(bad, dist.ReduceOp.MAX, group)", "..."), "their scales differ"),
        (Swap("ReduceOp.MAX", "ReduceOp.MIN"), "all ranks make the step"),
    ],
    "skipped_steps": [
        (16, "a hysteresis of 2"),
        (15, "both overflow"),
    ],
}  # fmt: skip


def pieces(theirs_from="theirs", directions=2, empty=False):
    """An answer to `my_pieces`, right unless told otherwise."""

    def answer(saved, offset, size):
        plan = []
        for file, corner, extent in saved:
            both = list(zip(offset, size, corner, extent, strict=True))
            cuts = [(max(a, b), min(a + n, b + m)) for a, n, b, m in both]
            for i in range(directions, 2):  # forgotten: takes all that there is
                cuts[i] = (offset[i], offset[i] + size[i])
            if all(low < high for low, high in cuts) or empty:
                start = {"theirs": corner, "whole": (0, 0), "mine": offset}[theirs_from]
                cut = [
                    tuple(slice(a - c, max(a, b) - c) for (a, b), c in zip(cuts, at, strict=True))
                    for at in (start, offset)
                ]
                plan.append((file, *cut))
        return plan

    return answer


CHECKPOINT = {
    "checkpoint_bytes": [
        (16 * 8.03e9, "Gradients are computed anew"),
        (4 * 8.03e9, "Those are the weights alone"),
    ],
    "checkpoint_interval": [
        ((90 * 180_000) ** 0.5, "A factor is missing under the root"),
        ((2 * 90 * 50) ** 0.5, "In seconds, please"),
    ],
    "my_write": [
        (Swap('f"{path}.new"', "path"), "leaves a file of 0 bytes, neither the old content nor"),
        (Swap("    os.replace", "    path.unlink(missing_ok=True)\n    os.replace"),
         "no file at all"),
    ],
    "my_windows": [
        (Swap("samples + ", ""), "beginning of the data again"),
        (Swap("batch // size", "batch"), "instead of 2: the batch is that of"),
    ],
    "my_pieces": [
        (pieces(empty=True), "nothing in 2.pt is of use: leave it out"),
        (pieces("whole"), "is nothing of 1.pt, whose box begins at (2, 0)"),
    ],
    "my_save_interval": [
        (Swap(", size / write)", ", 0)"), "there is a shortest interval, too"),
        (Swap("size / ranks_ / copy", "size / copy"), "Each rank copies its own share"),
    ],
}  # fmt: skip

UNEVEN = {"rank": 2, "collective": "all_reduce", "line": 17}
ORDER = {"rank 0": "norm", "rank 1": "loss"}
TENSOR = {"runs": "zero3", "rank": 1, "collective": "all_gather", "line": 27}
CLUSTER = {
    "cluster_ranks": [
        ((8, 2, 3), "count from 0"),
        ((9, 1, 2), "two ranks, not four"),
    ],
    "cluster_batch": [
        ({3, 8, 9, 12}, "Line 12 is right"),
        ({8, 9, 11}, "3 of four. How many launchers"),
    ],
    "my_ranks": [
        (Swap('int(slurm["SLURM_PROCID"])', 'slurm["SLURM_PROCID"]'), "variables are text"),
        (Swap("local % gpus if gpus else None", "local"), "sees 0 GPUs: device is None"),
    ],
    "hang_uneven": [
        (UNEVEN | {"collective": "barrier"}, "where the missing rank waits"),
        (UNEVEN | {"line": 25}, "calls a function"),
    ],
    "hang_order": [
        (ORDER | {"rank 0": "loss"}, "has finished all of its calls"),
        (ORDER | {"rank 1": "norm"}, "has not called anything"),
    ],
    "hang_tensor": [
        (TENSOR | {"runs": "tensor"}, "That is what it says"),
        (TENSOR | {"runs": "ddp"}, "gathers nothing"),
    ],
    "cluster_culprit": [
        (Swap("if all(", "if any("), "All links of rank 4 are slow"),
        (Swap("return rank", "return rank or None"), "0 is a rank, too"),
    ],
    "cluster_rounds": [
        (lambda n: [[pair] for pair in combinations(range(n), 2)], "4 ranks need 3 rounds"),
        (lambda n: [[(a, a ^ d) for a in range(n)] for d in range(1, n)], "be in it once"),
    ],
}  # fmt: skip

ELASTIC = {
    "my_first_ranks": [
        (Swap("sum(sizes[:node])", "sum(sizes[: node + 1])"), "Ranks 0 to 3 are on the first"),
        (Swap("sum(sizes[:node])", "node * sizes[0]"), "4 and 5 on the second"),
    ],
    "my_silent": [
        (Swap("last[agent][0] != beat", "True"), "though the host has read it again"),
        (Swap("> patience", ">= patience"), "2 s are not more than 2 s"),
    ],
    "my_cause": [
        (Swap("one[2] in (0, 4, 6, 7, 8, 11)", "False"), "killed with SIGKILL"),
        (Swap("(0, 4, 6, 7, 8, 11)", "(0, 6)"), "SIGSEGV is rank 1's own"),
    ],
}  # fmt: skip

SECTION: dict[str, Any] = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 125_000}
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": SECTION,
    "zero_allow_untested_optimizer": True,
}


def settings(without="", **changes):
    changed = SETTINGS | changes
    return {name: value for name, value in changed.items() if name != without}


DEEPSPEED_ENGINE = {
    "deepspeed_accumulation": [
        (2, "only the copies count"),
        (4, "pipeline stages"),
    ],
    "deepspeed_cost": [
        (2.5 * 50 / 3600, "All eight GPUs"),
        (8 * 2.5 * 50, "for an hour"),
    ],
    "deepspeed_log": [
        ("data", "Give three things"),
        (("data", 2048, ...), "still missing"),
    ],
    "my_accumulation": [
        (Swap("if rest or not steps", "if False"), "raise ValueError rather than"),
        (Swap("return steps", "return float(steps)"), "DeepSpeed wants an int"),
    ],
    "deepspeed_config": [
        (settings("gradient_clipping"), "when it is not told"),
        (settings(zero_optimization={"stage": 1}), "stage is 1 instead of 2"),
    ],
    "my_choice": [
        (Swap("0.7 * gpu", "gpu"), "more than 70 % of it"),
        (Swap("gpus * states.host", "states.host"), "share its memory"),
    ],
}  # fmt: skip


AHEAD = "ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages"
LAST = "F.mse_loss(out, y) / m"
EVEN = "[len(costs) // parts + (i < len(costs) % parts) for i in range(parts)]"
PIPELINE = {
    "pipeline_bubble": [
        (32 / 39, "in which a stage works"),
        (7 / 32, "idle time beside working time"),
    ],
    "my_interleaved": [
        (Swap(AHEAD, "ahead = stages - 1 - stage"), "1F1B's number"),
        (Swap(AHEAD, "ahead = microbatches * chunks"), "All forwards come"),
    ],
    "my_live": [
        (Swap("return most", "return live"), "most at any time"),
        (Swap('"W": -1', '"W": 0'), "What ends them then?"),
    ],
    "my_balance": [
        (Swap("return best(len(costs), parts)[1]", f"return {EVEN}"), "Layers are counted here"),
        (lambda costs, parts: [1] * parts, "8 layers in all"),
    ],
    "my_1f1b": [
        (Swap(LAST, "F.mse_loss(out, y)"), "sum of 8 means is 8 times"),
        (Swap("out.backward(dy)", "out.backward(dy if dy is None else torch.ones_like(dy))"),
         "went backward from ones"),
    ],
    "my_deadlock": [
        (Swap("moved = True\n", "moved = False\n"), "goes on once another"),
        (Swap("if need[0] >= 0 and", 'if need[0] >= 0 and action[0] == "F" and'),
         "name all that stand"),
    ],
    "my_microbatches": [
        (Swap("batch % m == 0 and ", ""), "divides the batch"),
        (Swap("range(1, batch + 1)", "range(batch, 0, -1)"), "smallest m"),
    ],
}  # fmt: skip


STEP = "(loss(model(x), y) / 4)"
MEMORY = {
    "state_gigabytes": [
        (3, "the weights in bfloat16 alone"),
        (6, "The optimizer keeps three float32 numbers"),
    ],
    "largest_model": [
        (5.0, "activations need their 20 GB"),
        (30, "can be loaded, not trained"),
    ],
    "my_states_bytes": [
        (Swap("gradient + master", "gradient"), "have its float32 copy of the weights?"),
        (Swap('0 if precision == "fp32" else 4', "4"), "In float32 the weights need no second"),
    ],
    "my_largest_batch": [
        (Swap("return batch", "return max(batch, 1)"), "Not even the states fit there: the answer"),
        (lambda config, limit: limit / memory.activations(config).total, "a whole number"),
    ],
    "my_evaluate": [
        (Swap("with torch.no_grad()", "if True", ".item()", ""), "kB more are held"),
        (Swap("with torch.no_grad()", "if True"), "autograd still saves activations"),
    ],
    "my_backward": [
        (Swap(" / 4", ""), "about 4 times as long"),
        (Swap(STEP, f"model.zero_grad()\n        {STEP}"), "The gradient is off by up to"),
    ],
    "my_micro_batch": [
        (Swap("microbatches=batch // size", "microbatches=1"), "are there from the start"),
        (Swap(" if batch % size == 0", "", "batch // size", "-(-batch // size)"),
         "Pieces of 5 do not share out 12 evenly"),
    ],
}  # fmt: skip

SKIP = 'name != "head.weight" and (name in cut or first)'
MESH = {
    "my_groups": [
        (Swap("return data,", "return data[::-1],"), "they should ascend"),
        (Swap("rank % t, rank // t % p, rank // (p * t)",
              "rank // (d * p), rank // d % p, rank % d", "part + t * stage + p * t * i",
              "i + d * stage + d * p * part", "part + t * i + p * t * copy",
              "copy + d * i + d * p * part", "i + t * stage + p * t * copy",
              "copy + d * stage + d * p * i"), "it is innermost"),
    ],
    "mesh_budget": [
        ("--tp 2", "There are 6 ranks left"),
        ("--dp 8 --zero 1", "In ZeRO's stage 1 copies hold something whole"),
    ],
    "my_norm": [
        (Swap("dist.all_reduce(square, group=groups.tp)", "...",
              "dist.all_reduce(square, group=groups.pp)", "..."), "add them up over both groups"),
        (Swap(SKIP, "True"), "and the twin as well"),
    ],
    "my_mesh": [
        (Swap('float("inf")', "-1", "< least", "> least"), "are enough"),
        (Swap("> limit", "> 1e99"), "A rank holds too much"),
    ],
}  # fmt: skip

LINK = 4 * 2 * 7 * 2 * 989e12 / (6 * 12 * 8192)
DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400


def stages(**changes):
    return Layout(**{"tp": 8, "pp": 8, "microbatches": 256, "sequence_parallel": True} | changes)


STRATEGY = {
    "strategy_wire": [
        (LINK / 2, "twice"),
        (LINK / 8, "the all-reduces are not"),
    ],
    "strategy_days": [
        (DAYS * 86400, "seconds"),
        (DAYS / 3, "forward alone"),
    ],
    "strategy_corner": [
        (Swap("rate = max(operations / seconds for operations, seconds in layers)",
              "rate = sum(o / s for o, s in layers) / len(layers)"), "small layers"),
        (Swap("return launch, rate", "return rate, launch"), "other order"),
    ],
    "strategy_layout": [
        (stages(pp=4), "there are 64 GPUs"),
        (Layout(64, microbatches=4), "are model states"),
    ],
}  # fmt: skip


ONCE = "once = 2 * params * (d - 1) // d"
TO_TENSOR = "    dist.all_reduce(loss, group=tensor_group)\n"
TO_DATA = "    dist.all_reduce(loss, group=data_group)\n"
FEEDBACK = "loss / copies, gradient_fH / copies"
MODEL_PARALLELISM = {
    "zero_states": [
        (112e9, "Which of them does stage 2 divide"),
        (7e9, "which is stage 3"),
    ],
    "gradient_traffic": [
        (14e9, "How often does each piece"),
        (28e9, "(N−1)/N"),
    ],
    "my_busy_microbatches": [
        (Swap("-percent * (p - 1)", "-100 * (p - 1)"), "the whole step"),
        (Swap("-(-percent * (p - 1) // (100 - percent))", "percent * (p - 1) // (100 - percent)"),
         "are busy for 66.67 %"),
    ],
    "gpus_needed": [
        (14, "states alone"),
        (16, "the other 10"),
    ],
    "my_zero_traffic": [
        (Swap("[2 * once, 2", "[2"), "0 to 3"),
        (Swap(ONCE, "once = 2 * params"), "keeps its own share"),
    ],
    "my_grid_step": [
        (Swap(FEEDBACK, "loss"), "it should return the loss and the gradient"),
        (Swap(TO_TENSOR, "", TO_DATA, "", "loss / copies", "loss"), "nothing was added up"),
    ],
    "my_layout": [
        (Layout(64, microbatches=8), "cut the model into more parts"),
        (Layout(64, zero=3, microbatches=8), "the rest are activations"),
    ],
}  # fmt: skip

ROWS: dict[str, list[tuple[Any, str | None]]] = {
    **CHECKPOINT,
    **CLUSTER,
    **ELASTIC,
    **COLLECTIVES,
    **CONTEXT_PARALLEL,
    **DATA_PARALLEL,
    **DEEPSPEED_ENGINE,
    **EXPERTS,
    **GEMM,
    **MEMORY,
    **MESH,
    **MODEL_PARALLELISM,
    **PARITY,
    **PIPELINE,
    **SEQUENCE_PARALLEL,
    **STRATEGY,
    **TENSOR_PARALLEL,
    **TENSOR_TYPES,
    **TRAIN,
    **TRAINERS,
    **ZERO,
}
