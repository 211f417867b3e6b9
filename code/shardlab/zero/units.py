"""Which parts of a model stage 3 gathers together, and which parameters belong to each part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Choice = nn.Module | Sequence[nn.Module]


def modules_of(module: nn.Module, units: Sequence[Choice] | None) -> list[list[nn.Module]]:
    """The modules of each unit; by default each of `module.blocks` is one, if there are any.

    Raises ValueError for what is not inside `module`, and where units overlap.
    """
    if units is None:
        units = list(getattr(module, "blocks", []))
    try:
        chosen = [[unit] if isinstance(unit, nn.Module) else list(unit) for unit in units]
    except TypeError:
        allowed = "allowed are modules and lists of modules, in a list"
        raise ValueError(f"units={units!r}: {allowed}") from None
    inside = {id(m): name for name, m in module.named_modules() if name}
    seen: dict[int, int] = {}
    for number, unit in enumerate(chosen):
        for part in unit:
            kind = type(part).__name__
            if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
                what = "modules that are called themselves, such as those in it"
                raise ValueError(
                    f"units: {kind} in unit {number} is never called; allowed are {what}"
                )
            if id(part) not in inside:
                what = f"{kind} in unit {number} is no part of the module"
                raise ValueError(f"units: {what}; allowed are those inside it")
            for below in part.modules():
                if id(below) in seen:
                    where = f"{inside[id(below)]} is in unit {seen[id(below)]}"
                    raise ValueError(f"units: {where} and in unit {number}; allowed is one of them")
                seen[id(below)] = number
    return chosen


def names_of(module: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[list[str]]:
    """What the modules of each unit are called in `module`."""
    names = {id(m): name for name, m in module.named_modules()} if units else {}
    return [[names[id(part)] for part in unit] for unit in units]


def owners(module: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[list[nn.Parameter]]:
    """The parameters of each unit, and at the end those of the rest.

    A parameter that two units share, or a unit and the rest, belongs to the rest.
    """
    unit_of = {id(m): n for n, unit in enumerate(units) for part in unit for m in part.modules()}
    users: dict[nn.Parameter, set[int]] = {}
    for below in module.modules():
        for parameter in below.parameters(recurse=False):
            users.setdefault(parameter, set()).add(unit_of.get(id(below), len(units)))
    found: list[list[nn.Parameter]] = [[] for _ in range(len(units) + 1)]
    for parameter in module.parameters():
        using = users[parameter]
        found[using.pop() if len(using) == 1 else len(units)].append(parameter)
    return found
