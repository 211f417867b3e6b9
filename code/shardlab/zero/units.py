"""Stage 3's units: the modules that are gathered together, and the parameters of each unit."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

UnitSpec = nn.Module | Sequence[nn.Module]


def find_units(module: nn.Module, units: Sequence[UnitSpec] | None) -> list[dict[str, nn.Module]]:
    """Return the modules of each unit by name; by default each of `module.blocks` is a unit.

    Raises ValueError for modules outside `module` and for overlapping units.
    """
    if units is None:
        units = list(getattr(module, "blocks", []))
    chosen = [[unit] if isinstance(unit, nn.Module) else list(unit) for unit in units]
    names = {m: name for name, m in module.named_modules() if name}
    within = [below for unit in chosen for part in unit for below in part.modules()]
    if len(names.keys() & set(within)) < len(within):
        kinds = [[type(part).__name__ for part in unit] for unit in chosen]
        raise ValueError(f"units={kinds}: must be parts of the module, none inside another")
    return [{names[part]: part for part in unit} for unit in chosen]


def assign_parameters(module: nn.Module, units: list[list[nn.Module]]) -> list[list[nn.Parameter]]:
    """Return the parameters of each unit, and last those of the rest of the module.

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
