"""The assignment of layers to the stages of a pipeline.

The model's blocks are, in order, embedding, layers, last norm and head. Rules:

    equal     the same number of layers on each stage, the embedding on the first, the head on the
              last; other numbers are refused
    megatron  embedding and head count as a layer each where the layers alone cannot be divided:
              126 layers on 16 stages are 7, 14 times 8, 7 (Llama 3 405B; arXiv 2407.21783,
              section 3.3.2); of eight chunks the first has the embedding alone
    nanotron  a layer costs its weights, 4h² + 3hF as that library counts them, the head Vh, all
              else nothing; a stage ends with the block at which the running cost passes its share

Or an explicit number of layers per stage. If a stage has several chunks of the model, its layers
are split over them as evenly as possible, and the model passes through all first chunks, then all
second ones, and so on ("zb-v": there and back).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.common.arguments import check_one_of, is_integer, shorten_repr
from shardlab.common.shapes import Config

from .parameters import ParamInfo, iter_layer_params, list_outer_params
from .structure import Structure, get_structure

SCHEDULES = "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"  # as in `pipeline`
STAGE_RULES = "equal", "megatron", "nanotron"


@dataclass(frozen=True)
class Stage:
    """The part of the model on one stage."""

    chunks: tuple[range, ...]  # the numbers of each chunk's layers in the model
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> int:
        """The number of layers."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def layer_indices(self) -> list[int]:
        """The layers' numbers in the model, in its order."""
        return sorted(layer for chunk in self.chunks for layer in chunk)


def build_stages(
    config: Config | Structure,
    pp: int = 1,
    rule: str | tuple[int, ...] = "equal",
    schedule: str = "1f1b",
    chunks: int = 1,
) -> list[Stage]:
    """Return the `pp` stages of `config`, first to last; arguments as a `Layout` has checked them.

    rule: one of STAGE_RULES, or the layers of each stage. schedule: under "zb-v" the model goes
    there and back, so its end is on the first stage. chunks: per stage.

    Raises ValueError if the rule cannot divide the layers, or the given numbers do not add up.
    """
    model = get_structure(config)
    last = pp - 1
    if rule == "nanotron":
        layers, last = _split_by_cost(model, pp)
    elif rule == "megatron":
        layers = _split_with_ends(model.layers, pp)
    elif rule == "equal":
        if model.layers % pp:
            raise ValueError(f"pp={pp}: must divide layers={model.layers}")
        layers = [model.layers // pp] * pp
    else:
        layers = list(rule)
        if sum(layers) != model.layers:
            raise ValueError(f"stages={rule}: must add up to the model's {model.layers} layers")
    if schedule == "zb-v" and pp > 1:
        last = 0
    ends = rule == "megatron" and model.layers % pp > 0 and schedule != "zb-v"
    dealt = _assign_chunks(layers, chunks, order_stages(pp, schedule, chunks), ends)
    return [Stage(mine, k == 0, k == last) for k, mine in enumerate(dealt)]


def list_stage_params(
    config: Config, stage: Stage, ep: int = 1, ep_rank: int = 0
) -> list[ParamInfo]:
    """Return the parameters of which a rank of `stage` holds a part, in the model's order.

    ep_rank: the rank's number among the `ep` ranks that share the experts. A tied head is included
    only where it is a copy: on another stage than the embedding.
    """
    each = config.experts // ep
    first, *last = list_outer_params(config)
    found = [first] if stage.has_embedding else []
    for layer in stage.layer_indices:
        found += iter_layer_params(config, layer, range(ep_rank * each, (ep_rank + 1) * each))
    if stage.has_head:
        found += last[:-1] if config.tied and stage.has_embedding else last
    return found


def order_stages(pp: int, schedule: str = "1f1b", chunks: int = 1) -> list[int]:
    """Return the stage of each part of the model, in its order: round-robin, or as a V."""
    there = list(range(pp))
    return there + there[::-1] if schedule == "zb-v" and pp > 1 else there * chunks


def _assign_chunks(
    layers: list[int], chunks: int, order: list[int], ends: bool = False
) -> list[tuple[range, ...]]:
    """Return the layers of each chunk of each stage, along the model's route `order`.

    ends: embedding and head take the place of a layer each.
    """
    places = list(layers)
    if ends and min(layers[order[0]], layers[order[-1]]) + 1 >= chunks:
        places[order[0]] += 1
        places[order[-1]] += 1
    found: list[tuple[range, ...]] = [()] * len(layers)
    begin = 0
    for number, stage in enumerate(order):
        each, more = divmod(places[stage], chunks)
        end = begin + each + (len(found[stage]) < more)
        if places[stage] > layers[stage]:
            end -= (number == 0) + (number == len(order) - 1)
        found[stage] = (*found[stage], range(begin, end))
        begin = end
    return found


def check_stage_rule(pp: int, rule: str | tuple[int, ...]) -> None:
    """Raise ValueError unless `rule` is one of STAGE_RULES or the layers of `pp` stages."""
    if isinstance(rule, str):
        check_one_of(STAGE_RULES, stages=rule)
        return
    counts = isinstance(rule, tuple) and len(rule) == pp
    if not counts or not all(map(is_integer, rule)):
        choices = f"{', '.join(STAGE_RULES)}, or a tuple of pp={pp} whole numbers"
        raise ValueError(f"stages={shorten_repr(rule)}: must be {choices}")


def check_schedule(pp: int, schedule: str, chunks: int) -> None:
    """Raise ValueError unless `schedule` exists and allows that many chunks per stage."""
    check_one_of(SCHEDULES, schedule=schedule)
    least = {"interleaved": 2, "zb-v": 2}.get(schedule, 1) if pp > 1 else 1
    more = schedule == "interleaved" and pp > 1
    if chunks < least or (chunks > least and not more):
        needed = "2 or more" if more else f"{least}"
        given = f"schedule={schedule!r} and pp={pp}"
        raise ValueError(f"chunks={chunks}: must be {needed} with {given}")


def _split_with_ends(layers: int, p: int) -> list[int]:
    """Return equal numbers of layers, or if impossible count each end as a layer, evenly."""
    if layers % p == 0:
        return [layers // p] * p
    if p > layers + 2:
        raise ValueError(f"pp={p}: must be at most {layers + 2} for {layers} layers")
    each, more = divmod(layers + 2, p)
    counts = [each] * p
    for k in range(more):  # stages after the first keep fewer micro-batches
        counts[1 + k if p > more else k] += 1
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _split_by_cost(model: Structure, p: int) -> tuple[list[int], int]:
    h, f = model.hidden, model.kinds[0].active_width
    layer, head = 4 * h * h + 3 * h * f, model.vocab * h
    total = model.layers * layer + head
    found: list[list[int]] = [[] for _ in range(p)]  # costs of each stage's blocks
    stage = cost = 0
    for block in [layer] * model.layers + [head]:
        found[stage].append(block)
        cost += block
        if stage < p - 1 and cost * p >= total * (stage + 1):
            stage += 1
    counts = [len(blocks) for blocks in found]
    last = stage if found[stage] else stage - 1  # the loss follows a head that ends a stage
    counts[last] -= 1
    return counts, last
