"""Benchmark of our expert parallelism against DeepSpeed's MoE layer.

    python benchmarks/experts.py            # a table; some eight minutes on two cores
    python benchmarks/experts.py --json     # {"rows": [{"case", "against", …}, …]}
    python benchmarks/experts.py --quick    # toy sizes, seconds: only a smoke test

Both layers have the same weights, and every rank gives both the same local tokens. A step is the
forward and backward of one layer, until the slowest rank is done; contenders take turns. DeepSpeed
drops no token here (drop_tokens=False): it pads all experts' rows to the number of the fullest
expert, and sends messages of equal size; ours sends unpadded rows.

case: "even": an untrained router chooses; "uneven": all tokens share a feature whose router weight
grows with the expert's number, so that the last experts get most tokens.

ratio: median step of ours over median step of theirs in each repeat of a few rounds; the median
and the quartiles over the repeats are reported. sent_ratio: bytes handed to all-to-alls by all
ranks in a step, ours over theirs: counted, exact.

floor: the share of the physical floor that ours reaches, floor / median step of ours. Forward is a
chain: a row has to be there before its expert computes it, and back before the layer is done. In
backward the weights' gradients can be computed while a message travels. So no step is shorter than
the busiest rank's products alone, and forward's messages alone, one after the other.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import (
    Step,
    Times,
    make_row,
    make_run_options,
    measure_alternately,
    parse_options,
    print_progress,
    print_rows,
    select_group,
    select_slowest_rank,
)

from shardlab import deepspeed_engine, experts, ranks
from shardlab.gpt.model import Config, Experts
from shardlab.measure import count

OURS, THEIRS = "ours", "deepspeed MoE"
SHAPE = Config(layers=1, heads=8, mlp="swiglu", bias=False, hidden=512, ffn=1024, experts=8)


def build_plain_layer(config: Config, uneven: bool) -> Experts:
    """Return the layer with all experts; uneven: the router favours later experts."""
    torch.manual_seed(0)
    layer = Experts(config)
    if uneven:
        with torch.no_grad():  # every token has the same first feature, see `tokens_of`
            slope_E = torch.linspace(-1, 1, config.experts)
            layer.router.score.weight[:, 0] += slope_E
    return layer.to(ranks.device())


def tokens_of(config: Config, tokens: int) -> torch.Tensor:
    """Return this rank's tokens, [1, T, H]; their first feature is 1."""
    torch.manual_seed(dist.get_rank())
    x_BSH = torch.randn(1, tokens, config.hidden)
    x_BSH[..., 0] = 1.0
    return x_BSH.to(ranks.device()).requires_grad_()


def by_deepspeed(layer: Experts, group: dist.ProcessGroup) -> torch.nn.Module:
    """Return DeepSpeed's layer with this rank's share of `layer`'s weights."""
    deepspeed = deepspeed_engine.import_deepspeed()
    from deepspeed.moe.layer import MoE

    number, rank = len(layer.experts), dist.get_rank(group)
    local_experts = number // group.size()
    with deepspeed_engine.setup.suppress_output():
        deepspeed.init_distributed(dist_backend=dist.get_backend(group))
        theirs = MoE(
            layer.router.score.in_features,
            layer.experts[0],
            number,
            ep_size=group.size(),
            k=2,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        theirs.deepspeed_moe._set_ep_group(group)  # as set_deepspeed_parallelism does, with ours
    inner = theirs.deepspeed_moe
    inner.gate.wg.load_state_dict(layer.router.score.state_dict())
    for own, network in enumerate(inner.experts.deepspeed_experts):
        network.load_state_dict(layer.experts[rank * local_experts + own].state_dict())
    return theirs.to(ranks.device())


def build(name: str, config: Config, uneven: bool, group: dist.ProcessGroup, tokens: int) -> Step:
    """Return a contender's step, forward and backward of a layer of its own."""
    layer, x_BSH = build_plain_layer(config, uneven), tokens_of(config, tokens)
    if name == OURS:
        layer = experts.ExpertParallel(layer, group)
        compute = layer
    else:
        layer = by_deepspeed(layer, group)

        def compute(x_BSH: torch.Tensor) -> torch.Tensor:
            return layer(x_BSH)[0]

    def step() -> torch.Tensor:
        layer.zero_grad()
        x_BSH.grad = None
        y_BSH = compute(x_BSH)
        y_BSH.square().mean().backward()
        return y_BSH.detach()

    return step


def sizes(config: Config, uneven: bool, group: dist.ProcessGroup, tokens: int) -> experts.Route:
    """Return the route of this rank's rows: the numbers of rows to send and to receive."""
    layer, x_BSH = build_plain_layer(config, uneven), tokens_of(config, tokens)
    chosen_TC = layer.router(x_BSH)[1].flatten(0, 1)
    return experts.plan_route(chosen_TC, config.experts, group)


def products(config: Config, way: experts.Route) -> Step:
    """Return a step that only runs this rank's experts on rows that it already holds."""
    networks = list(build_plain_layer(config, False).experts)[: len(way.received[0])]
    rows = [sum(source[e] for source in way.received) for e in range(len(networks))]
    inputs = [
        torch.randn(n, config.hidden, device=ranks.device(), requires_grad=True) for n in rows
    ]

    def step() -> None:
        for network, x_RH in zip(networks, inputs, strict=True):
            network.zero_grad()
            network(x_RH).square().mean().backward()

    return step


def messages(config: Config, way: experts.Route, group: dist.ProcessGroup) -> Step:
    """Return a step with only forward's dispatch and combine, without a layer."""
    received = [sum(source) for source in way.received]
    x_RH = torch.zeros(sum(way.sent), config.hidden, device=ranks.device())

    def step() -> None:
        back_RH = experts.exchange_rows(x_RH, way.sent, received, group)
        experts.exchange_rows(back_RH, received, way.sent, group)

    return step


def measure(config: Config, uneven: bool, tokens: int, slow: bool, rounds: int) -> Times:
    """Return this rank's seconds of `rounds` steps of each contender."""
    group = select_group(slow)
    steps = {name: build(name, config, uneven, group, tokens) for name in (OURS, THEIRS)}
    ours, theirs = (steps[name]() for name in (OURS, THEIRS))
    # float32, values of about 1; the products have different numbers of rows.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    way = sizes(config, uneven, group, tokens)
    steps["products"] = products(config, way)
    steps["messages"] = messages(config, way, group)
    return measure_alternately(steps, rounds, ranks.device(), {})


def count_bytes_sent(config: Config, uneven: bool, tokens: int) -> list[int]:
    """Return the bytes that this rank hands to all-to-alls in a step of each contender."""
    found = []
    for name in (OURS, THEIRS):
        step = build(name, config, uneven, dist.group.WORLD, tokens)
        with count.record_traffic() as seen:
            step()
        found.append(seen.payload["all_to_all_single"])
    return found


def main(arguments: list[str] | None = None) -> None:
    chosen = parse_options(__doc__, arguments)
    if not importlib.util.find_spec("deepspeed"):
        print("DeepSpeed is not installed here: no rows against it", file=sys.stderr)
        print(json.dumps({"rows": []}) if chosen.json else "")
        return
    deepspeed_engine.import_deepspeed()  # once, before ranks are forked
    rows: list[dict[str, Any]] = []
    for kind in chosen.links:
        on = make_run_options(kind)
        for size in chosen.ranks:
            number = -(-SHAPE.experts // size) * size  # every rank has equally many experts
            config, tokens, rounds = replace(SHAPE, experts=number), 1024, 4
            if chosen.quick:
                config, tokens, rounds = replace(config, hidden=64, ffn=64), 64, 1
            for case in ("even", "uneven"):
                print_progress(case, kind, f"{size} ranks")
                how = config, case == "uneven", tokens
                counted = ranks.run(count_bytes_sent, size, *how, **on)
                ours, theirs = (sum(each) for each in zip(*counted, strict=True))
                total = rounds * chosen.repeats
                times = select_slowest_rank(
                    ranks.run(measure, size, *how, kind == "slow", total, **on)
                )
                words = f"{case}: {number} experts, {tokens} tokens a rank, hidden {config.hidden}"
                given = words, THEIRS, size, kind, times, chosen.repeats, floor, (OURS, THEIRS)
                rows.append(make_row(*given, sent_ratio=round(ours / theirs, 4)))
    print_rows(rows, chosen.json)


def floor(middle: dict[str, float]) -> float:
    """Return the seconds of the physical floor; the module's docstring explains it."""
    return middle["products"] + middle["messages"]


if __name__ == "__main__":
    main()
