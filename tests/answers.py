"""A wrong answer that readers give, for each exercise.

    exercise: (answer, words of the verdict)

`Swap("old", "new")` is the lesson's own solution with a part of its text replaced: the right code
is in the lesson, and only the mistake is here. The solutions themselves, and the forms without an
answer, are read from the lessons.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab import ranks
from shardlab.layout import Layout


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
