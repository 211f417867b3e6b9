"""Wrong answers that readers give, one or more for each exercise.

    exercise: (answer, words of the verdict)

`Swap("old", "new")` is the lesson's own solution with a part of its text replaced: the right code
is in the lesson, and only the mistake is here. The solutions themselves, and the forms without an
answer, are read from the lessons.
"""

from __future__ import annotations

from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardcourse.exercises import parity as parity_exercises
from shardlab import ranks
from shardlab.layout import Layout


def send_first_around(tensor, group):
    """Pass tensors around the ring, and send before receiving on all ranks."""
    largest = tensor.clone()
    for _ in range(dist.get_world_size(group) - 1):
        tensor.copy_(send_first_on_all(tensor, group))
        torch.maximum(largest, tensor, out=largest)
    tensor.copy_(largest)


def drop_zero_gradients(module, group):
    """Average gradients, and drop those that are zero, as if nobody had used their parameters."""
    for p in module.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=group)
            p.grad = p.grad if p.grad.any() else None


def keep_all_keys(q, k, v, group):
    """Attend in a ring whose ranks first receive all keys and values."""
    N, rank, s = dist.get_world_size(group), dist.get_rank(group), q.shape[2]
    every = {rank: torch.stack((k, v))}
    for turn in range(N - 1):
        kv, coming = every[(rank - turn) % N], torch.empty_like(every[rank])
        ranks.exchange(kv, (rank + 1) % N, coming, (rank - 1) % N, group).wait()
        every[(rank - turn - 1) % N] = coming
    k, v = torch.cat([every[r] for r in range(N)], 3)
    hidden = torch.ones(N * s, N * s).triu(1).bool()[rank * s : (rank + 1) * s]
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def start_with_first(size, total, first):
    """Return the ranks' rows with rank `first` in front of the others."""
    n = total // size
    rows = torch.arange(total).view(-1, n, 2)
    return [rows[:, r].flatten() for r in (first, *(r for r in range(n) if r != first))]


def train_all_rows(watch):
    """Train on the whole batch on every rank, without communication."""
    parity_exercises.train_one_process(watch)


class Swap:
    """A solution in which each `old` is replaced by its `new`."""

    def __init__(self, *texts: str):
        self.pairs = list(zip(texts[::2], texts[1::2], strict=True))


def do_nothing(*_: Any) -> None:
    """A function that does and returns nothing."""


def send_first_on_all(tensor, group):
    """Send before receiving on all ranks, which works with gloo alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    sent = ranks.isend(tensor, (rank + 1) % size, group)
    ranks.irecv(received, (rank - 1) % size, group).wait()
    sent.wait()
    return received


def read_corners(saved, offset, size):
    first = slice(0, 1), slice(0, 1)
    return [(file, first, first) for file, *_ in saved]


FORMULA = "size * latency * bandwidth * (1 - fraction) / fraction"
C = 4 * 4096 * 11008
REDUCE = "dist.all_reduce(c_MN, group=group)"
PASSING = "passing = ranks.exchange(kv, (rank + 1) % N, coming, (rank - 1) % N, group)"
ONE_BY_ONE = (
    "sent = ranks.isend(kv, (rank + 1) % N, group)\n"
    "            ranks.irecv(coming, (rank - 1) % N, group).wait(), sent.wait()"
)
WIRE = 2 * 4096 * 8 * 7168 * 2
SBH = 2048 * 12_288
H, WIDE = 4096, 16384
FOUR = {"A": "decay", "B": "share", "C": "clip", "D": "counts"}
WORDS = {"norm": "RR", "norm's gradient": "PP", "up": "RV", "up's gradient": "PV", "tokens": "VR"}
PLAN = {
    "copy_to forgotten": "types",
    "loss divided by N twice, before backward": "loss",
    "a rank's tokens begin at position 0": "loss",
    "gradients of norms not summed, sequence cut": "types",
    "each epoch in the same order": None,
    "gradients averaged over tp in place of dp": "types",
}
SCRIPT = Path(__file__).resolve().parents[1] / "code/shardlab/train"
LACKS = {"A": "sampler", "B": "set_epoch", "C": "all_reduce", "D": "wrapper"}


SETTINGS = {  # which lack gradient_clipping
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 125_000},
    "zero_allow_untested_optimizer": True,
}
AHEAD = "ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages"
LAST = "F.mse_loss(out, y) / m"
USERS = "            parameter.grad /= used\n"
EVEN = "[len(costs) // parts + (i < len(costs) % parts) for i in range(parts)]"
SKIP = 'name != "head.weight" and (name in cut or first)'
LINK = 4 * 2 * 7 * 2 * 989e12 / (6 * 12 * 8192)
DAYS = 6 * 8e9 * 15e12 / (512 * 989e12 * 0.4) / 86400


def make_layout(**changes):
    return Layout(**{"tp": 8, "pp": 8, "microbatches": 256, "sequence_parallel": True} | changes)


ONCE = "once = 2 * params * (d - 1) // d"
TO_TENSOR = "    dist.all_reduce(loss, group=tensor_group)\n"
TO_DATA = "    dist.all_reduce(loss, group=data_group)\n"


WRONG_ANSWERS: dict[str, tuple[Any, str]] = {
    # zero
    "zero_bytes": (13e9 * 16, "stage 0"),
    "my_shard_bounds": (Swap("-(-elements // size)", "elements // size"), "belong to no rank"),
    "my_mixed_step": (Swap("master -= lr", "master = master - lr"), "`master = …` binds the name"),
    "my_global_norm": (
        Swap("dist.all_reduce", "square.sqrt_()\n    dist.all_reduce", "square.sqrt()", "square"),
        "sum of the ranks' norms",
    ),
    "my_stage": (Swap("held + activations", "held"), "leaves out the activations"),
    # data_parallel
    "ddp_bytes": (217e6, "four bytes"),
    "overlap_floor": (0.10, "before forward"),
    "my_exact_average": (
        Swap("dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
        "the sum over the ranks, 2 times",
    ),
    "my_joined_loss": (lambda s, n, g: s / n, "average of the ranks' own means"),
    "my_accumulate": (Swap("with model.no_sync():", "if True:"), "messages for"),
    "my_micro_batches": (Swap(" - backward)", ")"), "Nothing overlaps here"),
    # collectives
    "ring_bytes": (60, "average over the ranks"),
    "all_reduce_max": (
        Swap("torch.stack(everyones)", "torch.stack([0 * tensor, *everyones])"),
        "began as zeros",
    ),
    "shift": (send_first_on_all, "With nccl it hangs, on 2 ranks"),
    "broadcast_large": (
        Swap("collectives.all_gather(pieces, pieces[rank], group)", "..."),
        "is off by",
    ),
    "my_bucket_bytes": (Swap(FORMULA, FORMULA[7:]), "it has to be N times as large"),
    # gemm
    "gemm_bytes": (0.75 * C, "a reduce-scatter"),
    "gemm_pays": (4000, "a multiply-add as one"),
    "my_backward_of_columns": (
        Swap("dist.all_reduce(grad_MK, group=group)", "..."),
        "has its own part",
    ),
    "my_inner": (
        Swap(REDUCE, "c_MN += bias_N\n    " + REDUCE, " + bias_N", ""),
        "The bias is in it 2 times",
    ),
    "my_two_products": (
        Swap("dist.all_reduce(z_MN, group=group)", "..."),
        "cut in its inner dimension",
    ),
    "my_ring_product": (Swap("(rank - step)", "(rank + step)"), "those of rank (r + i)"),
    "my_way": (Swap("M * k + k * N + M * N", "M * k + k * N + m * N"), "as large as all of C"),
    # context_parallel
    "my_zigzag": (lambda s, r, n: range(r * s // n, (r + 1) * s // n), "the contiguous cut"),
    "my_pass": (
        Swap("(rank + 1)", "(rank+1)", "(rank - 1)", "(rank + 1)", "(rank+1)", "(rank - 1)"),
        "the other way",
    ),
    "my_decode": (
        Swap("(log_sum - largest).exp()", "torch.ones_like(log_sum)"),
        "mean of the ranks' outputs",
    ),
    "my_ring": (Swap(PASSING, ONE_BY_ONE, "passing.wait()", "..."), "Let even ranks send first"),
    "my_context": (Swap("states + kept", "states / N + kept"), "divides no states"),
    # experts
    "experts_tokens": (300 * 256, "eight experts"),
    "experts_wire": (WIRE, "do not leave the rank"),
    "my_admit": (
        Swap(
            "for c in range(chosen_TC.shape[1]):\n        for t in range(chosen_TC.shape[0]):",
            "for t in range(chosen_TC.shape[0]):\n        for c in range(chosen_TC.shape[1]):",
        ),
        "token by token",
    ),
    "my_exchange": (do_nothing, "returned None"),
    "my_average": (Swap("own /= data", "own /= copies"), "the tokens came from four ranks"),
    "my_balancing": (Swap("dist.all_reduce(load_E, group=group)", "..."), "each rank's own tokens"),
    "my_expert_ranks": (Swap(" >= rows", " >= 0"), "Right is"),
    # sequence_parallel
    "sequence_bytes": (SBH * 13, "tensor parallelism alone"),
    "my_summands": (Swap(" or name.endswith(late)", ""), "behind the reduce-scatter are missing"),
    "my_column": (
        Swap("dist.all_reduce(dx_BSH, group=ctx.group)", "..."),
        "this rank's part alone",
    ),
    # tensor_parallel
    "tp_bytes": (16 * (2 * H * WIDE + WIDE + H), "one process holds"),
    "tp_other_order": (4.5, "SwiGLU has two"),
    "my_ffn_shards": (Swap("up_FH[own]", "up_FH[:, own]"), "Weights of nn.Linear are [out, in]"),
    "my_gated_ffn": (
        Swap("(y_BSH, group) + bias_H", "(y_BSH + bias_H, group)"),
        "was added 2 times",
    ),
    "my_kv_heads": (
        Swap(
            "return held(rank),",
            "return range(kv_heads // size * rank, kv_heads // size * (rank + 1)),",
        ),
        "Right is",
    ),
    "my_greedy": (
        Swap("    number_BS[own", "    return number_BS\n    number_BS[own"),
        "own likeliest entry",
    ),
    "my_degree": (Swap("return None", "return 0"), "Right is None"),
    # parity
    "times_allowed": (1.9e-3 / 2.1e-7, "twelve times the noise is still allowed"),
    "four_reports": ({**FOUR, "A": "seed"}, "before the first step"),
    "my_cut": (Swap("pairs[:, (first + r) % n]", "pairs[:, r]"), "Begin with it"),
    "my_program": (Swap("dist.all_reduce(p.grad)", "..."), "gradient of 4.bias"),
    "own_parity": (True, "is what parity.check returns"),
    # tensor_types
    "type_words": ({**WORDS, "norm": "RI"}, "a rank's norm sees its own tokens alone"),
    "my_operator": (
        Swap("return total.", "return (total / ctx.group.size())."),
        "addends have to be added up",
    ),
    "my_sum": (
        Swap("len(found) == 1", "len(found) == 1 and types[0] != 'P'"),
        "Right is 'P'",
    ),
    "my_network": (
        Swap("copy_to(scale, group)", "scale"),
        "gradient of scale differs from one process's",
    ),
    "type_plan": ({**PLAN, "copy_to forgotten": "gradients"}, "something cheaper finds it"),
    # train
    "my_ddp_script": ("none.py", "must be a script"),
    "my_fsdp_script": (SCRIPT / "core.py", "15 of 17 steps are done. Step 16, FSDP2"),
    "validation_filled_up": (5.5, "That is the right mean"),
    "my_mean": (Swap("[total, count]", "[total / max(count, 1), 1.0]"), "mean of the ranks' means"),
    "my_rest": (Swap("done * batch :", ":"), "read before the stop"),
    "states_of_a_job": ({"ddp": 20.8, "fsdp2": 20.8}, "FSDP2 divides"),
    "missing_lines": (
        LACKS | {"A": "wrapper", "D": "sampler"},
        "up to which step are the weights right",
    ),
    # trainers
    "lightning_steps": (256, "per rank"),
    "my_decision": (
        Swap("dist.all_reduce(bad, dist.ReduceOp.MAX, group)", "..."),
        "their scales differ",
    ),
    "skipped_steps": (16, "a hysteresis of 2"),
    # checkpoint
    "checkpoint_bytes": (16 * 8.03e9, "Gradients are computed anew"),
    "checkpoint_interval": ((90 * 180_000) ** 0.5, "A factor is missing under the root"),
    "my_write": (
        Swap("    os.replace", "    path.unlink(missing_ok=True)\n    os.replace"),
        "no file at all",
    ),
    "my_windows": (Swap("samples + ", ""), "beginning of the data again"),
    "my_pieces": (read_corners, "Right is"),
    "my_save_interval": (Swap(", size / write)", ", 0)"), "there is a shortest interval, too"),
    # cluster
    "cluster_ranks": ((8, 2, 3), "count from 0"),
    "cluster_batch": ({3, 8, 9, 12}, "Line 12 is right"),
    "my_ranks": (Swap('int(slurm["SLURM_PROCID"])', 'slurm["SLURM_PROCID"]'), "gives {'RANK': '0'"),
    "hang_uneven": (
        {"rank": 2, "collective": "barrier", "line": 17},
        "where the missing rank waits",
    ),
    "hang_order": ({"rank 0": "loss", "rank 1": "loss"}, "has finished all of its calls"),
    "hang_tensor": (
        {"runs": "tensor", "rank": 1, "collective": "all_gather", "line": 28},
        "what the script claims",
    ),
    "cluster_culprit": (Swap("if all(", "if any("), "All links of rank 4 are slow"),
    "cluster_rounds": (
        lambda n: [[pair] for pair in combinations(range(n), 2)],
        "4 ranks need 3 rounds",
    ),
    # elastic
    "my_first_ranks": (
        Swap("sum(sizes[:node])", "sum(sizes[: node + 1])"),
        "Ranks 0 to 3 are on the first",
    ),
    "my_silent": (Swap("last[agent][0] != beat", "True"), "though the host has read it again"),
    "my_cause": (Swap("one[2] in (0, 4, 6, 7, 8, 11)", "False"), "killed with SIGKILL"),
    # deepspeed_engine
    "deepspeed_accumulation": (2, "only the copies count"),
    "deepspeed_cost": (2.5 * 50 / 3600, "All eight GPUs"),
    "deepspeed_log": (("tensor", 2048, 21.7), "would cut the matrices"),
    "my_accumulation": (Swap("if rest or not steps", "if False"), "Right is 'a ValueError'"),
    "deepspeed_config": (SETTINGS, "is not set"),
    "my_choice": (Swap("0.7 * gpu", "gpu"), "70 % of a GPU"),
    # pipeline
    "pipeline_bubble": (32 / 39, "in which a stage works"),
    "my_interleaved": (Swap(AHEAD, "ahead = stages - 1 - stage"), "Right is"),
    "my_live": (Swap("return most", "return live"), "number of micro-batches at any time"),
    "my_balance": (
        Swap("return best(len(costs), parts)[1]", f"return {EVEN}"),
        "balances the number of layers",
    ),
    "my_1f1b": (Swap(LAST, "F.mse_loss(out, y)"), "sum of 8 means is 8 times"),
    "my_deadlock": (
        Swap("if need[0] >= 0 and", 'if need[0] >= 0 and action[0] == "F" and'),
        "name all waiting stages",
    ),
    "my_microbatches": (Swap("batch % m == 0 and ", ""), "divides the batch"),
    # memory
    "state_gigabytes": (3, "the weights in bfloat16 alone"),
    "largest_model": (5.0, "activations need their 20 GB"),
    "my_states_bytes": (
        Swap("gradient + master", "gradient"),
        "float32 copy of the weights counted?",
    ),
    "my_largest_batch": (
        Swap("return batch", "return max(batch, 1)"),
        "Right is 0",
    ),
    "my_evaluate": (Swap("with torch.no_grad()", "if True"), "autograd still saves activations"),
    "my_backward": (Swap(" / 4", ""), "about 4 times as long"),
    "my_micro_batch": (
        Swap("microbatches=batch // size", "microbatches=1"),
        "are there from the start",
    ),
    # mesh
    "my_groups": (Swap("return data,", "return data[::-1],"), "Right is"),
    "mesh_budget": ("--tp 2", "There are 6 ranks left"),
    "my_norm": (Swap(SKIP, "True"), "and the tied weight are counted"),
    "my_mesh": (Swap("> limit", "> 1e99"), "a rank exceeds the limit"),
    # strategy
    "strategy_wire": (LINK / 2, "twice"),
    "strategy_days": (DAYS * 86400, "seconds"),
    "strategy_corner": (Swap("max(operations", "min(operations"), "made these measurements"),
    "strategy_layout": (make_layout(pp=4), "there are 64 GPUs"),
    # model_parallelism
    "zero_states": (112e9, "Which of them does stage 2 divide"),
    "gradient_traffic": (14e9, "How often does each piece"),
    "my_busy_microbatches": (Swap("-percent * (p - 1)", "-100 * (p - 1)"), "the whole step"),
    "gpus_needed": (14, "states alone"),
    "my_zero_traffic": (Swap(ONCE, "once = 2 * params"), "keeps its own share"),
    "my_grid_step": (
        Swap(TO_TENSOR, "", TO_DATA, "", "loss / copies", "loss"),
        "nothing was added up",
    ),
    "my_layout": (Layout(64, microbatches=8), "cut or shard the model"),
}

WORLD = "runs in the default group"
KEEP = "kept = [*kept, (source, piece)] if step else [(source, piece)]"
ADD = "c_mN += a_mK[:, source * k : (source + 1) * k] @ piece  # [m, k] @ [k, N]"
JOINED = "return a_mK @ torch.cat([b for _, b in sorted(kept, key=lambda one: one[0])])"
FSYNC = "        os.fsync(file.fileno())\n"
REPLACE = "    os.replace(beside, path)"
LATE_FSYNC = f"{REPLACE}\n    with open(path, 'rb') as file:\n{FSYNC[:-1]}"
MEDIAN = "rates[len(rates) // 2] / 3"
SIGNALS = "(0, 4, 6, 7, 8, 11)"
OUT = "sum(map(sum, out.values()))"
HELD = "held = (mesh.predict_state_bytes(config, layout, r) for r in range(ranks))"

# Further wrong answers, which a check must not accept. The first ones leave the group out.
MORE_WRONG_ANSWERS: list[tuple[str, Any, str]] = [
    ("my_mixed_step", Swap("weights, own, group", "weights, own, dist.group.WORLD"), WORLD),
    ("my_global_norm", Swap("group=group", ""), WORLD),
    ("my_exact_average", Swap("group=group", ""), WORLD),
    ("my_joined_loss", Swap("group=group", ""), WORLD),
    ("all_reduce_max", Swap("tensor, group)\n", "tensor, dist.group.WORLD)\n"), WORLD),
    ("shift", Swap(", group).wait()", ").wait()"), WORLD),
    ("broadcast_large", Swap("pieces[rank], group", "pieces[rank], dist.group.WORLD"), WORLD),
    ("my_backward_of_columns", Swap("group=group", ""), WORLD),
    ("my_inner", Swap("group=group", ""), WORLD),
    ("my_two_products", Swap("group=group", ""), WORLD),
    ("my_ring_product", Swap("before, group)", "before)"), WORLD),
    ("my_grid_step", Swap("loss, group=tensor_group", "loss", TO_DATA, ""), WORLD),
    ("my_mean", Swap("group=group", ""), WORLD),
    ("my_decision", Swap("dist.ReduceOp.MAX, group", "dist.ReduceOp.MAX"), WORLD),
    ("my_gated_ffn", Swap("copy_to(x_BSH, group)", "copy_to(x_BSH, dist.group.WORLD)"), WORLD),
    ("my_greedy", Swap("MAX, group=group", "MAX"), WORLD),
    ("my_operator", Swap("total, group=ctx.group", "total"), WORLD),
    ("my_column", Swap("dx_BSH, group=ctx.group", "dx_BSH"), WORLD),
    ("my_pass", Swap("% N, group)", "% N)"), WORLD),
    ("my_decode", Swap("MAX, group=group", "MAX"), WORLD),
    ("my_ring", Swap("(rank - 1) % N, group)", "(rank - 1) % N)"), WORLD),
    ("my_exchange", Swap("split(sent)), group)", "split(sent)), dist.group.WORLD)"), WORLD),
    ("my_balancing", Swap("load_E, group=group", "load_E"), WORLD),
    # Numbers that are rounded, and well-known mistakes that had no hint
    ("zero_states", 20.1e9, "is it rounded?"),
    ("zero_states", 20.1, "Wrong by a factor of 10^9: the unit is bytes. It is 0.12 % off"),
    ("my_busy_microbatches", lambda p, percent: p, "just over a half"),
    ("my_busy_microbatches", lambda p, q: ceil((p - 1) / (1 - q / 100)) or 1, "with floats"),
    ("my_joined_loss", lambda loss_sum, samples, group: 2.5, "a float: backward needs a loss"),
    ("my_joined_loss", Swap("get_world_size(group)", "get_world_size()"), "all processes"),
    (
        "my_exact_average",
        Swap(
            "dist.ReduceOp.AVG", "dist.ReduceOp.SUM", "group=group)\n\n", f"group=group)\n{USERS}"
        ),
        "the number of ranks that used the layer",
    ),
    # Answers that compute the right values in a wrong way
    ("my_exact_average", drop_zero_gradients, "zeros have to stay zeros"),
    (
        "my_accumulate",
        lambda model, loss_of, each: (sum(map(loss_of, each)) / len(each)).backward(),
        "the activations of 6 samples were held at once",
    ),
    (
        "my_accumulate",
        lambda model, loss_of, each: loss_of(torch.cat(each)).backward(),
        "6 samples",
    ),
    ("all_reduce_max", send_first_around, "With nccl it hangs"),
    ("my_ring_product", Swap(ADD, KEEP, "return c_mN", JOINED), "keeps every piece"),
    ("my_ring", keep_all_keys, "keeps every piece"),
    ("my_admit", Swap("chosen_TC.clone()", "chosen_TC"), "return a copy"),
    ("my_program", train_all_rows, "this rank's share of the batch"),
    ("my_write", Swap("        file.flush()\n", ""), "loss of power"),
    ("my_write", Swap(FSYNC, "", REPLACE, LATE_FSYNC), "when is it too late?"),
    # Answers that are right in most cases
    ("my_cut", start_with_first, "in this order"),
    ("my_cut", Swap("(first + r)", "(first - r)"), "in this order"),
    ("my_largest_batch", Swap("<= limit", "< limit"), "Right is 9"),
    ("my_way", Swap("+ M * n", ""), "Right is"),
    ("my_way", Swap("m * K + K * N + m * N", "m * K + K * N"), "Right is"),
    ("my_way", Swap("-(-size // ranks_)", "size // ranks_"), "Right is"),
    ("my_context", Swap("> memory_", ">= memory_"), "Right is"),
    ("my_degree", Swap(', device="gpu"', ""), "The peak is that of a GPU"),
    ("my_degree", Swap(", config.ffn_width", ""), "must divide ffn_width=6150"),
    ("my_expert_ranks", Swap("> limit", ">= limit"), "Right is 2"),
    ("my_expert_ranks", Swap(">= rows", "> rows"), "Right is 1"),
    ("my_expert_ranks", Swap("(config, size)", "(config, 1) / size"), "Right is"),
    ("mesh_budget", "--dp 4 --zero 3 --tp 2 --batch 16", "Leave the model and the batch"),
    ("my_mesh", Swap("batch % d or ", ""), "d does not divide the batch"),
    ("my_mesh", Swap(HELD, "held = [mesh.predict_state_bytes(config, layout, 0)]"), "exceeds"),
    ("my_mesh", Swap(OUT, "max(map(max, out.values()))"), "leaves the nodes"),
    ("my_mesh", Swap("batch=batch // d", "batch=batch"), "leaves the nodes"),
    ("my_accumulation", Swap("return steps", "return float(steps)"), "Right is 16, an int"),
    ("my_choice", Swap("<= 0.7 * gpu", "< 0.7 * gpu"), "Right is"),
    ("my_choice", Swap("0.7 * gpu", "0.8 * gpu"), "Right is"),
    ("my_ranks", Swap("% 10000", "% 10"), "MASTER_PORT should be"),
    ("cluster_culprit", Swap(MEDIAN, MEDIAN[:-4]), "more than a third"),
    ("cluster_culprit", Swap(MEDIAN, "sum(rates) / len(rates)"), "more than a third"),
    ("my_cause", Swap(SIGNALS, "(0, 6, 11)"), "4, 7 and 8 are errors"),
    ("my_cause", Swap(f"one[2] in {SIGNALS}", "one[2] != 9"), "came from outside"),
]
