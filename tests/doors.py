"""A right call of every public function and class of the techniques: the table of test_refusals.

A row is a function and its arguments, made anew for each try, for much changes what it is given.
A new function gets a row, and each of its arguments a check, or it is named here with the reason:

OURS    what the packages make themselves and hand out, and what is called in every layer, for every
        message or by a function that has checked: no check of its own
INNER   the same for these arguments alone
FINE    values that look wrong, and are allowed; and None, where it is what stands by default
SAID    what the error calls an argument that has another name in a command or in a formula
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlab import (
    buckets,
    checkpoint,
    collectives,
    count,
    data_parallel,
    experts,
    gemm,
    layout,
    link,
    machines,
    memory,
    mesh,
    parity,
    pipeline,
    zero,
)
from shardlab import context_parallel as cp
from shardlab import sequence_parallel as sp
from shardlab import tensor_parallel as tp
from shardlab import tensor_types as tt
from shardlab.model import GPT, Experts, loss
from shardlab.shapes import Config

PLAIN = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32)
SPARSE = Config(vocab=64, seq=16, layers=2, heads=4, hidden=32, experts=4)
PACKAGES = (
    buckets, checkpoint, collectives, count, cp, data_parallel, experts, gemm, layout, link,
    memory, mesh, parity,
    pipeline, sp, tp, tt, zero,
)  # fmt: skip
Row = tuple[Callable[..., Any], Callable[[], dict[str, Any]]]


def called(function: Callable[..., Any]) -> str:
    """Its name, by which rows are found."""
    function = getattr(function, "stands_for", function)
    return f"{function.__module__.removeprefix('shardlab.')}.{function.__qualname__}"


OURS = {
    layout.Entry, layout.Stage, layout.Structure, cp.Block, cp.Gradients, cp.Work,
    mesh.Groups, mesh.Instead, tp.Cut,
    memory.Activations, memory.Estimate, memory.Recipe, memory.States, experts.Parameters,
    experts.Route, experts.Routed,
    zero.Flat, zero.Gradients, zero.ReduceScatter, zero.Reducer, zero.Sharded, zero.Unit,
    zero.all_gather, cp.block_attention, cp.block_gradients, cp.merge, cp.heads_for_tokens,
    tp.ColumnLinear, tp.RowLinear, tp.VocabEmbedding, tp.columns, tp.shard_slice, tp.cut_attention,
    tp.cut_ffn, tp.cut_latent, buckets.deal,
    pipeline.needed, pipeline.sent, pipeline.other_end, tt.moved,
    tt.combined, tt.type_of, count.bytes_of, pipeline.Action, pipeline.Part, pipeline.Schedule,
    pipeline.Span,
    pipeline.Timeline, gemm.Cost, gemm.Grid, gemm.OverBudget, gemm.Panel, gemm.Seconds, gemm.Shard,
    buckets.Backward, buckets.in_backward, count.Held, count.Saved, count.Sent, count.machine,
    count.rates, count.saved, count.sent, link.SlowGroup, link.Helper, link.Moment,
    link.Wire,
    tt.Mismatch, tt.Verdict, checkpoint.CheckpointError, checkpoint.Training,
    checkpoint.named_tensors, zero.saved.warm, parity.Finding, parity.Key, parity.Report,
    parity.Watch, parity.Mistake, parity.mistakes,
}  # fmt: skip
INNER = {
    **dict.fromkeys((cp.ring_attention, cp.all_to_all_attention), "causal trace"),
    cp.blocks: "causal",
    **dict.fromkeys((tp.copy_to, tp.reduce_from, tp.reduce_from_), "x"),
    **dict.fromkeys((tp.gather_last, tp.split_last), "x"),
    buckets.clip_by_joint_norm: "owner groups parts",
    **dict.fromkeys(
        (buckets.copy_from_rank_0, buckets.average_gradients), "tensors parameters joined"
    ),
    buckets.add_up: "gradients joined scale",
    **dict.fromkeys(
        (experts.exchange, experts.route), "x_RH chosen_TC sent received group experts"
    ),
    **dict.fromkeys((zero.Zero1, zero.Zero2, zero.Zero3), "late reshard prefetch"),
    machines.Machine: "name",
    checkpoint.Checkpoints.save: "wait",
}
INNER = {called(function): names.split() for function, names in INNER.items()}
RELU = nn.ReLU  # without parameters: a model in which there is nothing to be found
FINE = {
    (memory.format_bytes, "size"): (-1.0,),  # a difference
    (cp.tokens_that_fit, "budget"): (1.5,),
    (cp.tokens_table, "budget"): (1.5,),
    (cp.split, "dim"): (-1,),
    (cp.join, "dim"): (-1,),
    (cp.gather, "dim"): (-1,),
    (collectives.CostModel.seconds, "nbytes"): (1.5,),
    (gemm.check_budget, "needed"): (1.5,),
    (gemm.check_budget, "budget"): (1.5,),
    (link.ring_seconds, "size"): (1.5,),
    (tp.on_wire, "payload"): (1.5,),
    (count.wire_bytes, "interface"): ("x",),
    (pipeline.compute_again, "blocks"): ([],),  # of a stage with the embedding alone
    (tp.cuts, "model"): (RELU,),
    (tp.initialize, "device"): ("x",),  # torch says what devices there are
    (sp.slice_dropouts, "model"): (RELU,),
    (experts.own_parameters, "model"): (RELU,),
    (experts.watch, "model"): (RELU,),
    (pipeline.defer, "module"): (RELU,),
    (count.states, "module"): (RELU,),
    (tt.declare_parameters, "module"): (RELU,),
    (zero.Zero3, "units"): ([],),
    (checkpoint.Checkpoints, "folder"): ("x",),
    (checkpoint.export, "path"): ("x",),
    (checkpoint.export, "model"): (RELU,),
    (checkpoint.save_hub, "folder"): ("x",),
    (checkpoint.hand_over, "source"): (None,),  # on ranks that have none
    (checkpoint.hand_over, "target"): (None, RELU),
}
FINE = {(called(function), name): values for (function, name), values in FINE.items()}
SAID = {"name": "schedule", "text": "layout", "rule": "stages", "model": "module",
        "x_BaSD": "full", "tokens_BS": "full"}  # fmt: skip


def one_step(watch: Any, _: Any = None, behind: int = 0, steps: int = 1) -> None:
    """A program that trains: some steps, after some that nobody watches."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(behind + steps):
        if step == behind:
            watch(model, optimizer)
        optimizer.zero_grad()
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()


def numbers() -> Iterator[Row]:
    """Predictors and what else computes with numbers alone: no rank is needed."""
    attention = {"batch": 2, "seq": 16, "heads": 4, "kv_heads": 2, "head_size": 8, "ranks": 2}
    grouped = {name: attention[name] for name in ("batch", "seq", "kv_heads", "head_size", "ranks")}
    cut = layout.Layout(dp=2, tp=2, zero=1, sequence_parallel=True, microbatches=2)
    one = pipeline.schedule("1f1b", 2, 4)
    product = {"way": "rows", "M": 8, "N": 8, "K": 8, "ranks": 2, "itemsize": 4}
    machine = gemm.Machine(1e12, 1e-6, 1e9)
    recipe = {"precision": "bf16", "optimizer": "adamw"}
    held = {"config": PLAIN, "layout": cut, "stage": 0}
    step = {"config": PLAIN, "layout": cut, "seq": 16, "precision": "bf16", "attention": "fused"}
    step |= {"device": "cpu", "stage": 0}
    korthikanti = {"s": 16, "b": 2, "h": 32, "a": 4, "t": 2}
    times = {"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}
    table: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (Config, {f: getattr(SPARSE, f) for f in vars(SPARSE)} | {"kv_heads": 2, "ffn": 64}
         | {"expert_ffn": 32, "capacity": 1.5, "head": 8, "window": 4, "full_every": 2}),
        (Config, {"hidden": 32, "heads": 4, "bias": False, "latent": 16, "query_latent": 16,
                  "rotary": 4, "value": 8}),
        (machines.Machine, vars(machines.MACHINES["b200"]) | {"name": "B200"}),
        (cp.attention_memory, {"way": "ring", **attention, "itemsize": 4}),
        (cp.ring_sent, {**grouped, "itemsize": 4}),
        (cp.ulysses_sent, {**attention, "itemsize": 4}),
        (cp.score_pairs, {"layout": "zigzag", "seq": 16, "ranks": 2, "rank": 1, "causal": True}),
        (cp.score_turns, {"layout": "zigzag", "seq": 16, "ranks": 2, "causal": True}),
        (cp.pieces, {"layout": "zigzag", "ranks": 2, "rank": 1}),
        (cp.positions, {"layout": "zigzag", "seq": 16, "ranks": 2, "rank": 1}),
        (cp.blocks, {"layout": "zigzag", "ranks": 2, "rank": 1, "source": 0, "causal": True,
                     "local_seq": 8}),
        (cp.grain, {"layout": cut}),
        (cp.context_moments, {"config": PLAIN, "layout": cut, "seq": 16, "way": "ring",
                              "precision": "bf16", "device": "gpu", "attention": "fused"}),
        (cp.tokens_that_fit, {"config": PLAIN, "budget": 10**7, "layout": cut, "way": "ring"}),
        (cp.tokens_table, {"config": PLAIN, "budget": 10**7, "cps": [1, 2],
                           "cases": {"alone": cut}}),
        (layout.Layout, {"dp": 4, "tp": 2, "pp": 2, "zero": 3, "micro_batch": 2,
                         "microbatches": 4, "recompute": "norms+ffn", "sequence_parallel": True,
                         "cp": 2, "ep": 2, "chunks": 2, "schedule": "interleaved", "replicas": 2,
                         "offload": "parameters", "stages": "equal",
                         "order": ("dp", "pp", "tp", "cp")}),
        (layout.computed_again, {"recompute": "norms+ffn"}),
        (layout.orders, {"layout": cut}),
        (layout.read, {"text": "d 2 · t 2, ZeRO-1"}),
        (layout.written, {"layout": cut}),
        (cut.check, {"ranks": 4}),
        (cut.place, {"rank": 1}),
        (cut.rank, {"dp": 1, "pp": 0, "cp": 0, "tp": 1}),
        (cut.groups, {"axis": "dp"}),
        (cut.leaving, {"node": 2, "sent": lambda rank: {"dp": 8.0}}),
        (mesh.check_cuts, {"config": PLAIN, "layout": cut, "seq": 16}),
        (mesh.left_out, {"config": PLAIN, "layout": cut}),
        (mesh.predicted_pieces, {"config": PLAIN, "layout": cut, "rank": 1}),
        (mesh.predicted_sent, {"config": PLAIN, "layout": cut, "rank": 1, "seq": 16, "batch": 2}),
        (mesh.predicted_states, {"config": PLAIN, "layout": cut, "rank": 1}),
        (tp.degrees, {"config": PLAIN}),
        (tp.on_wire, {"payload": 64, "t": 2}),
        (tp.predicted_calls, {"config": PLAIN, "t": 2}),
        (tp.predicted_sent, {"config": PLAIN, "t": 2, "batch": 2, "seq": 16, "itemsize": 4}),
        (tp.predicted_states, {"config": PLAIN, "t": 2, "itemsize": 4, "bytes_per_state": 8}),
        (sp.edges_sent, {"config": PLAIN, "batch": 2, "seq": 16, "ranks": 2, "itemsize": 4,
                         "along_sequence": True, "keep": False}),
        (data_parallel.step_seconds, {"forward": 1.0, "backward": 2.0, "sizes": [4, 8],
                                      "wire": lambda size: 0.1, "overlap": True}),
        (experts.held, {"config": SPARSE, "ranks": 2}),
        (experts.latent_parameters, {"shape": experts.DEEPSEEK_V3}),
        (experts.padded, {"config": SPARSE, "tokens": 16, "fullest": 9}),
        (experts.parameters, {"config": SPARSE}),
        (experts.predicted_calls, {"config": SPARSE}),
        (experts.predicted_sent, {"config": SPARSE, "tokens": 16, "itemsize": 4, "dropped": 2}),
        (experts.wait, {"load_E": [0.1, 0.2, 0.3, 0.4], "ranks": 2}),
        (layout.ledger, {"config": PLAIN}),
        (layout.structure, {"config": PLAIN}),
        (layout.stages, {"config": PLAIN, "pp": 2, "rule": "equal", "schedule": "interleaved",
                         "chunks": 2}),
        (memory.activations, step),
        (memory.estimate, {**step, "optimizer": "adamw", "bucket": 2**20, "prefetch": 1}),
        (memory.estimate_structure, {"config": layout.structure(PLAIN), "optimizer": "adamw",
                                     "bucket": 2**20, **{k: v for k, v in step.items()
                                                         if k not in ("config", "device")}}),
        (memory.attention_term, {"a": 4, "s": 16, "h": 32}),
        (memory.selective_saving, {"a": 4, "s": 16, "h": 32}),
        (memory.bytes_per_parameter, {**recipe, "layout": cut}),
        (memory.states, {"params": 7.5e9, **recipe, "layout": cut}),
        (memory.largest, {"memory": 80e9, **recipe, "layout": cut}),
        (memory.deepspeed_zero2, {"params": 7.5e9, "gpus_per_node": 8, "nodes": 2,
                                  "offload": True, "version": "0.19"}),
        (memory.deepspeed_zero3, {"params": 7.5e9, "largest_layer": 1e8, "gpus_per_node": 8,
                                  "nodes": 2, "offload_optimizer": True,
                                  "offload_parameters": True, "zero_init": True}),
        (memory.format_bytes, {"size": 8e9, "unit": "GB", "digits": 2}),
        (memory.fsdp2_shard, held),
        (memory.in_experts, {**held, "config": SPARSE}),
        (memory.in_flight, {"layout": cut, "stage": 0}),
        (memory.in_flight_layers, {"layers": 8, "p": 2, "chunks": 2}),
        (memory.korthikanti_layer, {**korthikanti, "sequence_parallel": True,
                                    "recompute": "none"}),
        (memory.largest_parameter, held),
        (memory.megatron_bytes, {"precision": "fp16", "d": 2, "distributed": True}),
        (memory.parameter_count, {"config": PLAIN}),
        (memory.parameters, held),
        (memory.shapes, held),
        (memory.stage_output_saved, {"s": 16, "b": 2, "h": 32, "p": 2}),
        (pipeline.schedule, {"name": "interleaved", "stages": 2, "microbatches": 4, "chunks": 2}),
        (pipeline.interleaved, {"stages": 2, "microbatches": 4, "chunks": 2}),
        *((f, {"stages": 2, "microbatches": 4})
          for f in (pipeline.naive, pipeline.gpipe, pipeline.one_f_one_b, pipeline.zb_h1,
                    pipeline.zb_h2, pipeline.zb_v)),
        (pipeline.loop, {"stages": 2, "chunks": 2}),
        (pipeline.vee, {"stages": 2}),
        (pipeline.balance, {"costs": [1.0, 2.0, 3.0], "parts": 2}),
        (_text, {"placement": [[0], [1]]}),
        (pipeline.live, {"schedule": one}),
        (pipeline.with_messages, {"schedule": one, "early": True}),
        (pipeline.validate, {"schedule": one, "blocking": False}),
        (pipeline.simulate, {"schedule": one, **times, "hop": 0.1}),
        (pipeline.text, {"timeline": pipeline.simulate(one), "width": 80, "color": False}),
        (pipeline.draw, {"timelines": pipeline.simulate(one), "titles": ["a"], "width": 6.4,
                         "end": 9.0, "legend": True}),
        (pipeline.Sleeping, {**times, "size": 1}),
        (collectives.bytes_sent, {"name": "broadcast", "nbytes": 64, "itemsize": 4, "size": 4,
                                  "rank": 1, "root": 0}),
        (collectives.critical_path, {"name": "broadcast", "size": 4}),
        (collectives.CostModel, {"latency": 1e-6, "bandwidth": 1e9}),
        (collectives.CostModel.fit, {"sizes": [8, 800], "seconds": [1.0, 2.0]}),
        (collectives.CostModel(1e-6, 1e9).seconds, {"name": "broadcast", "nbytes": 64, "size": 4}),
        (collectives.CostModel(1e-6, 1e9).crossover, {"size": 4}),
        (gemm.check_budget, {"needed": 4, "budget": 8}),
        (gemm.near_square, {"ranks": 6}),
        (gemm.panels, {"inner": 8, "rows": 2, "columns": 2, "width": 2}),
        (gemm.shard_slice, {"size": 8, "ranks": 2, "rank": 1}),
        (gemm.shard_sizes, {"size": 8, "ranks": 2}),
        (gemm.predict, {**product, "full": True, "rank": 1}),
        (gemm.predict, {**product, "way": "summa", "ranks": 4, "full": False, "rank": 1,
                        "shape": (2, 2), "width": 2}),
        (gemm.seconds, {**product, "machine": machine, "full": True}),
        (gemm.seconds, {**product, "way": "summa", "ranks": 4, "machine": machine,
                        "full": False, "shape": (2, 2), "width": 2}),
        (gemm.pays_from, {"way": "rows", "ranks": 2, "machine": machine, "itemsize": 4,
                          "full": True, "limit": 2**20}),
        (gemm.Machine, {"flops": 1e12, "latency": 1e-6, "bandwidth": 1e9}),
        (gemm.shard_throughput, {"M": 4, "N": 4, "K": 4, "degrees": (1, 2), "cut": "columns",
                                 "dtype": torch.float32, "device": torch.device("cpu"),
                                 "repeats": 1}),
        (link.ring_seconds, {"operation": "all_reduce", "size": 64, "ranks": 4, "latency": 1e-6,
                             "bandwidth": 1e9}),
        (count.Rates, {"flops": 1e12, "bytes": 1e11}),
        (count.Rates(1e12, 1e11).reachable, {"intensity": 4.0}),
        (count.Sent().leaving, {"ranks": 2, "others": 1.0}),
        (count.pretended_step, {"config": PLAIN, "world_size": 2, "batch": 1, "seq": 16,
                                "recompute": "full", "reshard": True, "timeout": 60.0}),
        (count.wire_bytes, {"interface": "lo"}),
        (checkpoint.predicted_hand_over, {"before": [[("w", ((0, 2),))]],
                                          "after": [[("w", ((0, 2),))]], "itemsize": 4}),
        (checkpoint.best_interval, {"save": 10.0, "mtbf": 1e4}),
        (checkpoint.lost_fraction, {"interval": 600.0, "save": 10.0, "mtbf": 1e4, "restart": 60.0}),
        (checkpoint.simulated_lost_fraction, {"interval": 600.0, "save": 10.0, "mtbf": 1e4,
                                           "restart": 60.0, "failures": 10, "seed": 0}),
        (parity.check, {"plain": one_step, "parallel": one_step, "ranks": 1, "draws": 1,
                        "timeout": 60.0}),
        (parity.check_resume, {"through": partial(one_step, steps=2), "before": one_step,
                               "after": partial(one_step, behind=1), "ranks": 1, "draws": 1,
                               "timeout": 60.0}),
        (parity.first_layers, {"model": nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU()])),
                               "layers": 1}),
        (tt.check, {"step": lambda tp: None, "timeout": 60.0, "tp": 2}),
    ]  # fmt: skip
    for function, right in table:
        yield function, lambda right=right: dict(right)


def _text(**given: Any) -> pipeline.Schedule:
    return pipeline.from_text("F0 B0", "F0 B0", **given)


_text.stands_for = pipeline.from_text


def gpt(config: Config = PLAIN) -> GPT:
    """A small model."""
    return GPT(config)


def trained(model: nn.Module) -> nn.Module:
    """The same with gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def objects(folder: str) -> Iterator[Row]:
    """What takes models, tensors, groups and optimizers: to be called by the one rank of a run."""
    group = dist.group.WORLD
    assert group is not None
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    x, y = torch.ones(2, 4, 8, 8), torch.ones(4, 4)

    def routed() -> list[Any]:
        model = gpt(SPARSE)
        with experts.watch(model) as said:
            model(tokens)
        return said

    def cut() -> GPT:
        return trained(tp.parallelize(gpt(), group))

    def along() -> GPT:
        return trained(tp.parallelize(gpt(), group, sp.ALONG_SEQUENCE))

    def dealt() -> GPT:
        return trained(experts.parallelize(gpt(SPARSE), group))

    def sharded(stage: int = 2) -> zero.Sharded:
        return trained(zero.shard(nn.Linear(3, 3), group, stage))

    def job(sequence: bool = False) -> mesh.Parallel:
        alone = layout.Layout(sequence_parallel=sequence, microbatches=2)
        return mesh.Parallel(gpt(), mesh.join(alone, group), alone)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters())

    def sends() -> count.Sent:
        with count.sent() as found:
            pass
        return found

    def training() -> checkpoint.Training:
        model = nn.Linear(3, 3)
        return checkpoint.Training(model, adamw(model))

    one = pipeline.schedule("1f1b", 1, 2)
    grid = gemm.grid(group, 1, 1)
    groups = mesh.join(layout.Layout(), group)
    qkv = {"q_BAsD": x, "k_BKsD": x, "v_BKsD": x, "group": group, "causal": True}
    zeros = {"compute_dtype": torch.bfloat16, "reduction": "auto"}
    sizes = {"bucket_bytes": 2**20, "first_bytes": 2**20}
    device = torch.device("cpu")
    linear = nn.Linear
    edges = tp.REPLICATED

    yield cp.all_to_all_attention, lambda: qkv | {"layout": "contiguous"}
    yield cp.ring_attention, lambda: qkv | {"layout": "zigzag", "trace": []}
    yield cp.average, lambda: {"value": torch.ones(()), "group": group}
    yield cp.average_gradients, lambda: {"model": trained(linear(3, 3)), "group": group}
    yield cp.distribute, lambda: {
        "model": gpt(), "group": group, "attention": "ring", "layout": "zigzag",
    }  # fmt: skip
    yield cp.gather, lambda: {"shard": x, "group": group, "layout": "zigzag", "dim": 1}
    yield cp.tokens_for_heads, lambda: {"x_BaSD": x, "group": group, "layout": "contiguous"}
    yield cp.join, lambda: {"parts": [x], "layout": "zigzag", "dim": 1}
    yield cp.shard, lambda: {"tokens_BS": tokens, "group": group, "layout": "zigzag"}
    yield cp.split, lambda: {"full": x, "ranks": 2, "rank": 1, "layout": "zigzag", "dim": 1}

    yield mesh.Parallel, lambda: {
        "model": gpt(), "groups": groups, "layout": layout.Layout(zero=1), "seed": 0,
    }  # fmt: skip
    yield mesh.PlacedDropout, lambda: {"blocks": {"0": linear(3, 3)}, "seed": 0}
    yield mesh.counted, lambda: {"sent": sends(), "job": job()}
    yield (
        mesh.groups_of,
        lambda: {
            "device_mesh": dist.device_mesh.init_device_mesh(
                "cpu", (1, 1, 1), mesh_dim_names=("dp", "pp", "tp")
            )
        },
    )
    yield mesh.held, lambda: (lambda made: {"job": made, "optimizer": adamw(made)})(job())
    yield mesh.join, lambda: {"layout": layout.Layout(), "world": group}
    yield mesh.local, lambda: {"job": job(), "of": lambda piece: piece}
    yield mesh.full_tensors, lambda: {"job": job(), "of": lambda piece: piece}

    yield tp.Edges, lambda: dict(vars(edges))
    yield tp.Entrance, lambda: {"layers": [linear(3, 3)], "group": group, "edges": edges}
    yield tp.parallelize, lambda: {
        "model": gpt(), "group": group, "edges": edges, "dropout": "equal",
    }  # fmt: skip
    yield tp.clip_grad_norm_, lambda: {"model": cut(), "limit": 1.0}
    yield tp.cuts, lambda: {"model": cut()}
    yield tp.parts, lambda: {"model": cut()}
    yield tp.words, lambda: {"model": cut()}
    yield tp.full_state_dict, lambda: {"model": cut(), "to": 0}
    yield tp.load_full_state_dict, lambda: {"model": cut(), "state": gpt().state_dict()}
    yield tp.initialize, lambda: {"model": cut(), "device": "cpu", "dtype": torch.float32}
    yield tp.loss, lambda: {
        "logits_BSv": torch.ones(2, 16, 64), "targets_BS": tokens, "group": group,
        "reduction": "mean",
    }  # fmt: skip
    for edge in (tp.copy_to, tp.reduce_from, tp.reduce_from_, tp.gather_last, tp.split_last):
        yield edge, lambda: {"x": y, "group": group}

    yield sp.AlongSequence, lambda: {"keep": False}
    yield sp.TokenDropout, lambda: {"p": 0.1, "group": group}
    yield sp.seen_partly, lambda: {"model": along()}
    yield sp.slice_dropouts, lambda: {"model": along(), "group": group}
    yield sp.sum_gradients, lambda: {"model": along(), "group": group}

    yield data_parallel.average_gradients, lambda: {
        "module": trained(linear(3, 3)), "group": group,
    }  # fmt: skip
    yield data_parallel.assign_buckets, lambda: {
        "parameters": list(linear(3, 3).parameters()), **sizes,
    }  # fmt: skip
    yield data_parallel.Bucket, lambda: {
        "parameters": list(linear(3, 3).parameters()), "group": group,
    }  # fmt: skip
    yield (
        data_parallel.average_in_buckets,
        lambda: {"buckets": [data_parallel.Bucket(list(linear(3, 3).parameters()), group)]},
    )
    yield data_parallel.DataParallel, lambda: {
        "module": linear(3, 3), "group": group, **sizes, "broadcast_buffers": True,
    }  # fmt: skip
    yield data_parallel.joined_mean, lambda: {
        "loss_sum": torch.ones(()), "count": 4, "group": group,
    }  # fmt: skip
    yield data_parallel.drift, lambda: {"module": linear(3, 3), "group": group}

    yield buckets.copy_from_rank_0, lambda: {"tensors": [y], "group": group}
    yield buckets.average_gradients, lambda: {
        "parameters": list(linear(3, 3).parameters()), "group": group, "joined": True,
    }  # fmt: skip
    yield buckets.add_up, lambda: {"gradients": [y], "group": group, "joined": True, "scale": 0.5}
    yield buckets.clip_by_joint_norm, lambda: {
        "owner": linear(3, 3), "limit": 1.0, "groups": [group], "parts": linear(3, 3).parameters(),
    }  # fmt: skip

    yield experts.ExpertParallel, lambda: {"plain": Experts(SPARSE), "group": group}
    yield experts.average_gradients, lambda: {"model": dealt(), "data": group, "copies": group}
    yield experts.balancing_loss, lambda: {"routed": routed(), "group": group}
    yield experts.loads, lambda: {"routed": routed(), "group": group}
    yield experts.update_bias, lambda: {"routed": routed(), "rate": 0.1, "group": group}
    yield experts.clip_grad_norm_, lambda: {"model": dealt(), "limit": 1.0}
    yield experts.exchange, lambda: {"x_RH": y, "sent": [4], "received": [4], "group": group}
    yield experts.full_state_dict, lambda: {"model": dealt()}
    yield experts.load_full_state_dict, lambda: {
        "model": dealt(), "state": gpt(SPARSE).state_dict(),
    }  # fmt: skip
    yield experts.own_parameters, lambda: {"model": dealt()}
    yield experts.parallelize, lambda: {"model": gpt(SPARSE), "group": group}
    yield experts.route, lambda: {"chosen_TC": tokens, "experts": 4, "group": group}
    yield _entered(experts.watch), lambda: {"model": gpt(SPARSE)}

    yield zero.Zero1, lambda: {
        "module": linear(3, 3), "group": group, **sizes, **zeros, "late": True,
    }  # fmt: skip
    yield zero.Zero2, lambda: {
        "module": linear(3, 3), "group": group, **sizes, **zeros, "late": True,
    }  # fmt: skip
    yield zero.Zero3, lambda: {
        "module": linear(3, 3), "group": group, "units": [], "reshard": True, "prefetch": True,
        **zeros,
    }  # fmt: skip
    yield zero.shard, lambda: {"module": linear(3, 3), "group": group, "stage": 1}
    yield zero.predicted_sent, lambda: {"model": sharded(), "backwards": 2}
    yield zero.predicted_states, lambda: {"model": sharded(), "bytes_per_state": 8}
    yield sharded().clip_grad_norm_, lambda: {"limit": 1.0}
    yield sharded().load_full_state_dict, lambda: {"state": linear(3, 3).state_dict()}

    yield pipeline.Pipeline, lambda: {
        "parts": [pipeline.Sleeping(0.0, 0.0, 0.0)], "schedule": one, "group": group,
        "loss": loss, "between": lambda tokens: (tokens.shape, torch.float32), "replicas": group,
        "twin": None, "record": False, "back": group, "check": True,
    }  # fmt: skip
    yield pipeline.asleep, lambda: {
        "schedule": one, "group": group, "forward": 0.01, "backward_input": 0.01,
        "backward_weight": 0.01, "size": 1,
    }  # fmt: skip
    yield pipeline.compute_again, lambda: {"blocks": [linear(3, 3)]}
    yield pipeline.cut, lambda: {"model": gpt(), "layers": 2}
    yield pipeline.defer, lambda: {"module": linear(3, 3)}
    yield pipeline.distribute, lambda: {
        "model": gpt(), "schedule": one, "group": group, "layers": [2], "loss": loss,
        "replicas": group, "recompute": False, "record": False, "back": group, "check": True,
    }  # fmt: skip

    for collective in (collectives.broadcast, collectives.reduce):
        yield collective, lambda: {"tensor": y, "root": 0, "group": group}
    yield collectives.split, lambda: {"tensor": y, "parts": 2}
    yield collectives.reduce_scatter, lambda: {"output": y, "inputs": [y], "group": group}
    yield collectives.all_gather, lambda: {"outputs": [y], "input": y, "group": group}
    yield collectives.all_to_all, lambda: {"outputs": [y], "inputs": [y], "group": group}
    for reduce in collectives.ALL_REDUCE.values():
        yield reduce, lambda: {"tensor": y, "group": group}
    yield collectives.all_reduce, lambda: {"tensor": y, "group": group, "algorithm": "ring"}
    yield collectives.barrier, lambda: {"group": group}

    yield gemm.by_columns, lambda: {"a_MK": y, "b_Kn": y}
    yield gemm.by_rows, lambda: {"a_mK": y, "b_KN": y}
    yield gemm.by_inner, lambda: {"a_Mk": y, "b_kN": y, "group": group, "full": True}
    yield gemm.cut, lambda: {"way": "rows", "a_MK": y, "b_KN": y, "ranks": 2, "rank": 1}
    yield gemm.gather_columns, lambda: {"c_Mn": y, "columns": 4, "group": group}
    yield gemm.gather_rows, lambda: {"c_mN": y, "rows": 4, "group": group}
    yield gemm.grid, lambda: {"group": group, "rows": 1, "columns": 1, "wrap": lambda group: group}
    yield gemm.measure, lambda: {
        "group": group, "device": device, "side": 8, "size": 64, "repeats": 1,
    }  # fmt: skip
    yield gemm.multiply, lambda: {
        "way": "rows", "a_MK": y, "b_KN": y, "group": group, "full": True,
    }  # fmt: skip
    yield gemm.stopwatch, lambda: {
        "call": lambda: None, "group": group, "repeats": 1, "pick": min,
    }  # fmt: skip
    yield gemm.summa, lambda: {"a_mk": y, "b_kn": y, "inner": 4, "grid": grid, "width": 2}

    yield link.slow, lambda: {"latency": 0.0, "bandwidth": 1e9, "group": group}

    yield count.clock, lambda: {"device": device}
    yield _entered(count.held), lambda: {"device": device, "trace": False, "limit": 1e12}
    yield count.states, lambda: (lambda m: {"module": m, "optimizer": adamw(m)})(linear(3, 3))
    yield count.Sent().within, lambda: {"group": group}

    yield tt.believe, lambda: {"x": torch.ones(2), "tp": "R"}
    yield tt.declare, lambda: {"x": torch.ones(2), "tp": "R"}
    yield tt.declare_parameters, lambda: {"module": linear(3, 3), "tp": "R"}
    yield _entered(tt.checking), lambda: {"tp": group}

    yield checkpoint.Checkpoints, lambda: {
        "folder": folder, "group": group, "keep": 2, "timeout": 60.0,
    }  # fmt: skip
    yield checkpoint.complete, lambda: {"root": Path(folder)}
    yield checkpoint.export, lambda: {"model": linear(3, 3), "path": f"{folder}/model.pt",
                                      "group": group}  # fmt: skip
    yield checkpoint.load_hub, lambda: {"model": GPT(PLAIN), "folder": _hub(folder),
                                        "group": group}  # fmt: skip
    yield checkpoint.save_hub, lambda: {
        "model": GPT(PLAIN), "folder": f"{_hub(folder)}-{next(numbered)}", "group": group,
        "like": _hub(folder), "dtype": torch.float32, "shard_bytes": 10**6,
    }  # fmt: skip
    yield checkpoint.config_of, lambda: {"folder": _hub(folder)}
    yield checkpoint.hand_over, lambda: {"source": GPT(PLAIN), "target": GPT(PLAIN),
                                         "group": group}  # fmt: skip
    yield _saved(folder), lambda: {"training": training(), "wait": True}


def _entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """A context manager's call and its beginning, as one function of the same name."""

    def call(**given: Any) -> None:
        with manager(**given):
            pass

    call.stands_for = manager
    return call


numbered = itertools.count()


def _hub(folder: str) -> str:
    """A folder as the hub has it."""
    if not Path(f"{folder}/hub").exists():
        checkpoint.save_hub(GPT(PLAIN), f"{folder}/hub")
    return f"{folder}/hub"


def _saved(folder: str) -> Callable[..., None]:
    def save(**given: Any) -> None:
        with checkpoint.Checkpoints(folder) as checkpoints:
            checkpoints.save(**given)

    save.stands_for = checkpoint.Checkpoints.save
    return save
