"""One contract for every technique: parallel training equals training in one process.

ROWS is the table: technique, model, plan, options, and tolerances. `measure_gaps` trains both
sides of a row (`sides`), the plain model and the parallel one, for some steps of AdamW, and returns
their differences: losses, gradients, norms, final weights and the outputs of these. The same rows
run on CPU ranks (test_contract), on pretended GPUs (rehearsal.drives.contract) and on real ones
(test_gpu).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from devices import get_random_state, to_device
from libraries import DdpSide, DeepSpeedSide, FsdpSide
from sides import (
    ContextSide,
    DataSide,
    ExpertSide,
    MasterWeightsSide,
    MeshSide,
    Part,
    PipelineSide,
    Side,
    TensorInCopiesSide,
    TensorSide,
    ToyModel,
    ZeroSide,
    make_optimizer,
)

from shardlab import ranks
from shardlab.gpt.model import GPT, IGNORED, Config
from shardlab.layout import AXES, Layout
from shardlab.measure import link

SIDES: dict[str, type[Side]] = {
    "one process": Side,
    "masters": MasterWeightsSide,
    "data": DataSide,
    "DDP": DdpSide,
    "zero": ZeroSide,
    "FSDP2": FsdpSide,
    "DeepSpeed": DeepSpeedSide,
    "pipeline": PipelineSide,
    "tensor": TensorSide,
    "tensor in copies": TensorInCopiesSide,
    "context": ContextSide,
    "experts": ExpertSide,
    "mesh": MeshSide,
}


class Tolerances(NamedTuple):
    """Largest allowed differences, and their reason."""

    losses: float
    gradients: float
    norms: float
    weights: float
    outputs: float
    why: str


def make_tol(limit: float, why: str, **others: float) -> Tolerances:
    """Return one limit for all quantities, except for `others`."""
    return Tolerances(limit, limit, limit, limit, limit, why)._replace(**others)


EXACT = make_tol(0.0, "the same products of the same numbers, added up in the same order")
FLOAT64 = make_tol(
    1e-11,
    "float64 rounds at 1e-16; sums of a few dozen terms of size 1 in another order, and five AdamW "
    "steps of 1e-2, which divide by gradients of 1e-4 and more: a wrong formula shows at 1e-3",
)
CUT64 = make_tol(1e-10, FLOAT64.why + "; matrices and sequences that are cut have longer sums")
FLOAT32 = make_tol(
    1e-5,
    "float32 rounds at 6e-8, and gradients are of size 1. AdamW divides by the size of a gradient, "
    "so that where it is all but zero, a step of 1e-2 may change by a part",
    losses=1e-4,
    norms=1e-3,
    weights=2e-2,
    outputs=2e-1,
)
ON_GPU = "on a GPU attention's backward adds up in no fixed order, and kernels in orders of theirs"


@dataclass(frozen=True)
class Row:
    technique: str
    case: str
    config: Config | None  # None: the model is the Toy
    layout: Layout
    tol: Tolerances
    sizes: tuple[int, ...]  # number of sequences of each copy
    options: dict[str, Any] = field(default_factory=dict)  # of the technique's own function
    steps: int = 3  # the third goes on from moments of two, as all later ones do
    lr: float = 1e-2
    dtype: torch.dtype = torch.float64
    clip: tuple[float, ...] = ()  # clipping limits, cycled over the steps
    branches: Callable[[int, int], str] | None = None  # branch of the Toy, by copy and micro-batch
    set_to_none: bool = True
    group: str = "world"  # "pairs": two groups of two ranks, in odd order; "slow": over a slow link
    frozen: tuple[str, ...] = ()  # modules that are not trained
    reference: str = "one process"
    balanced: bool = False  # with a balancing loss, and router biases
    ignored: bool = False  # some targets are ignored
    gpus: bool = False  # runs on GPUs too, pretended and real
    weekly: str = ""  # "cpu", "gpus" (pretended) or both: runs there only with --weekly

    @property
    def ranks(self) -> int:
        return self.layout.world_size * (2 if self.group == "pairs" else 1)

    @property
    def name(self) -> str:
        words = [f"{self.technique}: {self.case}", str(self.layout)]
        words += [f"{name}={value}" for name, value in self.options.items()]
        words += [str(self.dtype).removeprefix("torch.")]
        said = {
            "sequence parallel": self.layout.sequence_parallel,
            f"in {self.group}": self.group != "world",
            "zeros for None": not self.set_to_none,
            "clipped": self.clip,
            "targets ignored": self.ignored,
            f"as {self.reference}": self.reference != "one process",
            f"weekly on {self.weekly}": self.weekly,
        }
        return ", ".join(words + [word for word, true in said.items() if true])

    def make_optimizer(self, model: Any) -> torch.optim.Optimizer:
        return make_optimizer(model, self.lr)

    def get_tolerances(self, device: str) -> Tolerances:
        if device == "cpu":
            return self.tol
        there = CUT64 if self.dtype == torch.float64 else FLOAT32
        limits = (max(pair) for pair in zip(self.tol[:-1], there[:-1], strict=True))
        return Tolerances(*limits, why=ON_GPU)

    def build_plain_model(self, config: Config | None) -> torch.nn.Module:
        return ToyModel() if config is None else GPT(config)

    def build_model(self, config: Config | None) -> torch.nn.Module:
        torch.manual_seed(0)
        model = self.build_plain_model(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 and config is not None:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return to_device(model).to(self.dtype)

    def make_batch(self, step: int) -> list[list[Part]]:
        generator = torch.Generator().manual_seed(step)
        vocab, total = (self.config.vocab if self.config else 17), sum(self.sizes)
        shape = (2, total, self.config.seq) if self.config else (2, total)
        both = torch.randint(vocab, shape, generator=generator)
        if self.ignored:
            both[1, ::2, 3:], both[1, -1] = IGNORED, IGNORED
        both = to_device(both)
        found = []
        for number, (x, y) in enumerate(zip(*(b.split(self.sizes) for b in both), strict=True)):
            parts = zip(*(z.tensor_split(self.layout.microbatches) for z in (x, y)), strict=True)
            uses = self.branches or (lambda *_: None)
            more = ((uses(number, m),) for m in itertools.count())
            found.append(
                [(*part, m if m != (None,) else ()) for part, m in zip(parts, more, strict=False)]
            )
        return found


def make_groups(row: Row) -> dict[str, dist.ProcessGroup]:
    layout, world = row.layout, dist.group.WORLD
    wide = [axis for axis in AXES if getattr(layout, axis) > 1]
    found = {}
    alone = dist.new_subgroups(1)[0] if len(wide) != 0 else world
    for axis in AXES:
        if getattr(layout, axis) == 1:
            found[axis] = alone
        elif len(wide) == 1 and row.group == "pairs":
            halves = [dist.new_group(pair) for pair in ([0, 2], [3, 1])]
            found[axis] = halves[dist.get_rank() % 2]
        elif len(wide) == 1:
            found[axis] = link.create_slow_group(1e-4, 1e9) if row.group == "slow" else world
        else:
            found[axis] = dist.new_subgroups_by_enumeration(layout.list_groups(axis))[0]
    return found


def max_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    worst = 0.0
    for name, tensor in one.items():
        wanted = other[name]
        assert (tensor is None) == (wanted is None), name
        if tensor is not None and tensor.numel():
            assert tensor.shape == wanted.shape, name
            gap = (tensor.double() - wanted.double()).abs().max().item()
            assert math.isfinite(gap), name
            worst = max(worst, gap)
    return worst


Recorder = Callable[[], AbstractContextManager[list[str]]]


def measure_gaps(row: Row, waits: Recorder = lambda: nullcontext([])) -> dict[str, float]:
    """Return how far the two sides of a row differ on this rank after its steps.

    waits: collects the places where the host waits for a GPU; only the first step, which creates
    connections, may have such places.
    """
    config = row.config
    plain, own = row.build_model(config), make_groups(row)
    theirs = SIDES[row.reference](row, copy.deepcopy(plain), own)
    mine = SIDES[row.technique](row, plain, own)
    worst = dict.fromkeys(Tolerances._fields[:-1], 0.0)
    for step in range(row.steps):
        found, states = [], []
        for side in (theirs, mine):
            side.optimizer.zero_grad(set_to_none=row.set_to_none)
            torch.manual_seed(step)
            batch = row.make_batch(step)
            with waits() as waited:
                found.append(side.step(batch))
            if side is mine and step and config and row.group != "slow":
                # The Toy's ranks exchange which parameters they used, a slow link waits for bytes.
                assert not waited, f"the host waits at {waited}"
            states.append(get_random_state())
        assert torch.equal(*states), "as much is drawn as by one process"
        differences = compare_step(row, theirs, mine, *found, step)
        worst = {name: max(worst[name], differences.get(name, 0.0)) for name in worst}
        for side in (theirs, mine):
            side.optimizer.step()
    at_end = compare_final_state(row, theirs, mine)
    return {name: max(worst[name], at_end.get(name, 0.0)) for name in worst}


def compare_step(row: Row, theirs: Any, mine: Any, wanted: Any, found: Any, step: int) -> Any:
    if None in found:
        found[None] = mine.join_loss(found[None])
    both = found.keys() & wanted.keys()
    assert both or not found
    differences = {"losses": max_difference({k: found[k].cpu() for k in both},
                                   {k: wanted[k].cpu() for k in both})}  # fmt: skip
    whole = theirs.get_gradients()
    gradients = mine.get_gradients() if whole is not None else None
    if gradients:
        parts = {name: g if g is None else mine.take_part(name, g) for name, g in whole.items()}
        differences["gradients"] = max_difference(gradients, parts)
    if row.clip:
        limit = row.clip[step % len(row.clip)]
        norm = mine.clip_gradients(limit)
        assert norm > min(row.clip), "so that the limits are limits"
        differences["norms"] = abs(norm.item() - theirs.clip_gradients(limit).item())
    return differences


def compare_final_state(row: Row, theirs: Any, mine: Any) -> dict[str, float]:
    """Compare the weights and their outputs; check that loading the weights restores them."""
    found, wanted, differences = mine.get_weights(), theirs.get_weights(), {}
    if found is not None:
        assert sorted(found) == sorted(theirs.plain.state_dict())
        kept = {name: tensor for name, tensor in found.items() if name != "seen"}
        differences["weights"] = max_difference(kept, wanted)
        mine.load_weights(found)
        again = mine.get_weights()
        assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
    if row.config and mine.has_output and theirs.has_output:
        part = row.make_batch(row.steps)[mine.copy][0]
        for side in (theirs, mine):
            side.model.eval()
        with torch.no_grad():
            one, other = ({"": side.compute_output(part)} for side in (mine, theirs))
            differences["outputs"] = max_difference(one, other)
    return differences


def check_gaps(row: Row, found: dict[str, dict[str, float]], device: str) -> None:
    near = row.get_tolerances(device)
    far = {name: gap for name, gap in found[row.name].items() if not gap <= getattr(near, name)}
    assert not far, f"{row.name}: {far} where {near._asdict()} is allowed"


def measure_rows(
    rows: list[Row], device: str, waits: Recorder = lambda: nullcontext([])
) -> dict[str, Any]:
    """Run rows with equal numbers of ranks in one run; return the worst rank's gaps by row name.

    The first row that fails ends the run and is named.
    """

    def measure_all() -> dict[str, dict[str, float]]:
        return {row.name: measure_named(row) for row in rows}

    def measure_named(row: Row) -> dict[str, float]:
        try:
            return measure_gaps(row, waits)
        except Exception as error:
            error.args = (f"in the row {row.name!r}: {error}",)
            raise

    for row in rows:
        SIDES[row.reference].import_library()
    found = ranks.run(measure_all, rows[0].ranks, device=device, timeout=300, show=False)
    return {
        row.name: {name: max(one[row.name][name] for one in found) for name in found[0][row.name]}
        for row in rows
    }
