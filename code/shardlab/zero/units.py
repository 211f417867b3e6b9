"""Which parts of a model are gathered together, and the gathering and freeing of one part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .flat import Flat, all_gather
from .gradients import Gradients


class Unit:
    """Parameters that are whole for as long as they are used, and otherwise only a shard.

    The memory of the flat tensor is given back and taken again behind the tensor's back
    (`resize_`): what autograd has saved for backward points into it, and holds what was gathered
    last. While it is free, each parameter has no elements, so that nobody reads what is not there.
    """

    def __init__(self, flats: Sequence[Flat], ordered: bool):
        self.flats = flats
        self.gradients = [Gradients(f, keep=False, ordered=ordered) for f in flats if f.trainable]
        self.size = sum(sum(g.flat.sizes) for g in self.gradients)  # elements that get gradients
        self.arrived = 0  # elements whose gradients have come
        self.uses = 0  # forwards whose backward is not through
        self.left = False  # the gradients are sent
        self.works: list[dist.Work] = []
        self.state = "whole"
        for flat in flats:
            flat.serve(torch.empty(flat.size, dtype=flat.dtype, device=flat.device))
        self.free()

    def launch(self) -> None:
        """Start to gather, unless it is gathered already."""
        if self.state != "free":
            return
        self.state = "coming"
        with torch.no_grad():
            for flat in self.flats:
                flat.full.untyped_storage().resize_(flat.size * flat.full.element_size())
                flat.full[flat.own] = flat.shard  # in the dtype of computing
                self.works.append(all_gather(flat.full, flat.own, flat.group))

    def wait(self) -> None:
        """Have the parameters whole."""
        self.launch()
        if self.state == "coming":
            for work in self.works:
                work.wait()
            self.works = []
            for flat in self.flats:
                flat.show()
            self.state = "whole"

    def free(self) -> None:
        """Give the memory back; what is under way is waited for."""
        for work in self.works:
            work.wait()
        self.works = []
        if self.state != "free":
            for flat in self.flats:
                flat.hide()
                flat.full.untyped_storage().resize_(0)
        self.state = "free"


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
                raise ValueError(f"units: {kind} in unit {number} is no part of the module")
            for below in part.modules():
                if id(below) in seen:
                    where = f"{inside[id(below)]} is in unit {seen[id(below)]}"
                    raise ValueError(f"units: {where} and in unit {number}; allowed is one of them")
                seen[id(below)] = number
    return chosen


def owners(
    module: nn.Module, units: Sequence[Sequence[nn.Module]]
) -> list[dict[str, nn.Parameter]]:
    """The parameters of each unit, by name, and at the end those of the rest.

    A parameter that two units share, or a unit and the rest, belongs to the rest.
    """
    unit_of = {id(m): n for n, unit in enumerate(units) for part in unit for m in part.modules()}
    users: dict[int, set[int]] = {}
    for below in module.modules():
        for parameter in below.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(unit_of.get(id(below), len(units)))
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(len(units) + 1)]
    for name, parameter in module.named_parameters():
        using = users[id(parameter)]
        found[using.pop() if len(using) == 1 else len(units)][name] = parameter
    return found
