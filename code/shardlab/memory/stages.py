"""Which layers stand on which stage of a pipeline, and how many micro-batches a stage keeps.

Blocks stand in the order embedding, layers, last norm and head. Rules:

    equal     the same number of layers on each stage, the embedding on the first, the head on the
              last; other numbers are refused
    megatron  embedding and head count as a layer each where the layers alone cannot be divided:
              126 layers on 16 stages are 7, 14 times 8, 7 (Llama 3 405B; arXiv 2407.21783,
              section 3.3.2)
    nanotron  a layer costs its weights, 4h² + 3hF as that library counts them, the head Vh, all
              else nothing; a stage ends with the block at which the running cost passes its share

Or the layers of each stage, as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.arguments import check_count, check_kind, check_one_of, check_whole, given, told
from shardlab.shapes import Config

from .units import ceil_div

SCHEDULES = "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"  # as in `pipeline`
STAGE_RULES = "equal", "megatron", "nanotron"


@dataclass(frozen=True)
class Stage:
    """What stands on one stage."""

    layers: int
    embedding: bool
    head: bool
    dense: int = 0  # of the layers, those without experts in a model that has some


def stages(
    config: Config, pp: int = 1, rule: str | tuple[int, ...] = "equal", schedule: str = "1f1b"
) -> list[Stage]:
    """The `pp` stages of `config`, first to last.

    rule: one of STAGE_RULES, or the layers of each stage. schedule: under "zb-v" the model goes
    there and back, and its end stands on the first stage.

    Raises ValueError where the layers cannot be divided so, and where those given do not add up.
    """
    check_kind(Config, config=config)
    check_rule(pp, rule)
    check_one_of(SCHEDULES, schedule=schedule)
    if rule == "nanotron":
        return _without_experts(config, _by_cost(config, pp))
    if rule == "megatron":
        layers = _with_ends(config.layers, pp)
    elif rule == "equal":
        if config.layers % pp:
            raise ValueError(f"pp={pp}: allowed are divisors of layers={config.layers}")
        layers = [config.layers // pp] * pp
    else:
        layers = list(rule)
        if sum(layers) != config.layers:
            raise ValueError(f"stages={rule}: allowed are those with {config.layers} layers in all")
    last = 0 if schedule == "zb-v" else pp - 1
    found = [Stage(n, k == 0, k == last) for k, n in enumerate(layers)]
    return _without_experts(config, found)


def _without_experts(config: Config, found: list[Stage]) -> list[Stage]:
    """The same stages, and how many of their layers are the model's first, which have none."""
    left, counted = config.dense_layers if config.experts else 0, []
    for stage in found:
        counted.append(replace(stage, dense=min(left, stage.layers)))
        left -= counted[-1].dense
    return counted


def check_rule(pp: int, rule: str | tuple[int, ...]) -> None:
    """Raise ValueError unless `rule` is one of STAGE_RULES or the layers of `pp` stages."""
    check_count(pp=pp)
    if isinstance(rule, str):
        check_one_of(STAGE_RULES, stages=rule)
        return
    counts = isinstance(rule, tuple) and len(rule) == pp
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in rule):
        allowed = f"{', '.join(STAGE_RULES)}, and a tuple of pp={pp} whole numbers"
        raise ValueError(f"stages={told(rule)}: allowed are {allowed}")


def check_schedule(pp: int, schedule: str, chunks: int) -> None:
    """Raise ValueError unless `schedule` is there and takes so many chunks of a stage."""
    check_one_of(SCHEDULES, schedule=schedule)
    check_count(pp=pp, chunks=chunks)
    if schedule == "interleaved" and pp > 1:
        if chunks < 2:
            raise ValueError("chunks=1: allowed with schedule='interleaved' are 2 or more")
    elif chunks != (2 if schedule == "zb-v" and pp > 1 else 1):
        allowed = "is 2" if schedule == "zb-v" and pp > 1 else "is 1"
        given = f"schedule={schedule!r} and pp={pp}"
        raise ValueError(f"chunks={chunks}: allowed with {given} {allowed}")


def in_flight(
    pp: int,
    stage: int = 0,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> float:
    """Micro-batches, each of all layers of `stage`, that are kept at once; None: many, as p.

    1F1B: p - k on stage k. Interleaved, counted in chunks, of which a stage has v: Narayanan et al.
    2021 (arXiv 2104.04473), section 2.2, and Korthikanti et al. 2022, section 4.2.3. Zero-bubble
    (Qi et al. 2023, arXiv 2401.10241): what the weights' passes need stays until they come; for
    "zb-v" it is a bound, which few micro-batches do not reach.
    """
    check_schedule(pp, schedule, chunks)
    check_whole(0, pp - 1, stage=stage)
    check_count(**given(microbatches=microbatches))
    m = pp if microbatches is None else microbatches
    if pp == 1 or schedule == "naive":
        return 1
    if schedule == "interleaved":  # in groups of p micro-batches, or of a few more
        group = ceil_div(m, max(1, m // pp))
        ahead = 2 * (pp - 1 - stage) + (chunks - 1) * group
        return (min(ahead + 1, chunks * m) if microbatches else ahead + 1) / chunks
    most = {"gpipe": m, "zb-h1": pp, "zb-h2": 2 * pp - 1, "zb-v": pp}.get(schedule, pp - stage)
    return most if microbatches is None else min(most, m)


def deferred(pp: int, stage: int, microbatches: int, schedule: str) -> int:
    """Of those `in_flight`, micro-batches whose weights' passes alone are left.

    They no longer need attention's scores: Qi et al. 2023, section 2.3.
    """
    ahead = {"zb-h1": pp - stage, "zb-h2": 2 * (pp - stage) - 1}.get(schedule)
    if pp == 1 or ahead is None:
        return 0
    return int(in_flight(pp, stage, microbatches, schedule)) - min(ahead, microbatches)


def _with_ends(layers: int, p: int) -> list[int]:
    """Equal where it can be; else with a layer's place for each end, as evenly as it goes."""
    if layers % p == 0:
        return [layers // p] * p
    if p > layers + 2:
        raise ValueError(f"pp={p}: allowed are 1 to {layers + 2}, for {layers} layers")
    each, more = divmod(layers + 2, p)
    counts = [each] * p
    for k in range(more):  # the stages behind the first keep fewer micro-batches, and take them
        counts[1 + k if p > more else k] += 1
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _by_cost(config: Config, p: int) -> list[Stage]:
    h, f = config.hidden, config.ffn_width
    layer, head = 4 * h * h + 3 * h * f, config.vocab * h
    total = config.layers * layer + head
    found: list[list[int]] = [[] for _ in range(p)]  # costs of the blocks of each stage
    stage = cost = 0
    for block in [layer] * config.layers + [head]:
        found[stage].append(block)
        cost += block
        if stage < p - 1 and cost * p >= total * (stage + 1):
            stage += 1
    counts = [len(blocks) for blocks in found]
    last = stage if found[stage] else stage - 1  # a head that ends a stage is followed by the loss
    counts[last] -= 1
    return [Stage(n, k == 0, k == last) for k, n in enumerate(counts)]
