"""Recording of a program's outputs, gradients and updates, step by step, with hooks.

A program only has to call `watch(model, optimizer)`: the optimizer's own hooks separate the steps.
Each tensor goes to a sink at once, which keeps, writes or compares it. Nothing here depends on
other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardlab.common import gpu
from shardlab.common.arguments import check_all, check_kind

from .rounding import Rounding, neighbours

# Names of wrappers that libraries insert into a module's name.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Phases in the order of a step.
PHASES = "weights", "samples", "forward", "backward", "gradient", "update"
BEFORE = -1  # the step of weights before the first one
ENGINES = "deepspeed"  # package of engines whose optimizer steps inside the engine's own step
SAMPLES = 256  # numbers that are kept of a gradient from each backward pass of a step


class Key(NamedTuple):
    """A tensor's key: its step, its phase, and the name of its module or parameter."""

    step: int
    phase: str  # one of PHASES
    name: str


@dataclass
class Part:
    """One rank's tensor from one call."""

    value: Tensor  # detached; a sink that keeps the value copies it
    call: int = 0  # number of the module's call in this step
    start: tuple[int, ...] | None = None  # a DTensor's offset in the whole
    local: Tensor | None = None  # samples of a gradient before it is averaged: see `sampled`
    drew: bool = False  # random numbers were drawn since the previous output
    unread: bool = False  # a gradient of a weight that this rank's optimizer does not have
    unclipped: bool = False  # a gradient that is clipped later, inside the optimizer's step
    options: dict[str, float] = field(default_factory=dict)  # an update's: see `_made_by`
    optimizer: str = ""  # class of the optimizer that made an update


class Sink:
    """A receiver of tensors, in the order in which they come."""

    def __init__(self) -> None:
        self.steps = 0  # completed steps
        self.watched = self.optimized = False  # True once watch was called, and with an optimizer
        self.fewer = ""  # description of a shortened model: see `first_layers`

    def see(self, key: Key, part: Part) -> None:
        """Receive a tensor, and copy it if it is kept."""

    def tied(self, name: str, first: str) -> None:
        """Receive a second name of a tied parameter."""

    def forget(self, key: Key) -> bool:
        """Drop an update that fits nowhere, since it may come late; True if one was dropped."""
        return False


def author_names(name: str) -> str:
    """Return a module's name without the wrappers that libraries insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def sampled(x: Tensor) -> Tensor:
    """Return some numbers of `x`: the same ones for each tensor of its size."""
    x = x.detach().flatten()
    return x[:: max(1, x.numel() // SAMPLES) | 1]  # odd: not one column


def is_watched(x: Any) -> bool:
    """Return True for a tensor of real numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


class Watch:
    """The `watch` that a program receives: `watch(model, optimizer)`.

    seed: of noise, which moves every output, gradient and first weight by one unit in the last
    place, and rounds sums and casts differently (see `Rounding`), until `close`. begins: steps
    before this resumed program. every: report weights before each step, not before the first alone.
    """

    def __init__(self, sink: Sink, seed: int | None = None, begins: int = 0, every: bool = False):
        self.sink, self.step, self.every = sink, begins, every
        self.noise = None if seed is None else torch.Generator().manual_seed(seed)
        self.rounding = None if self.noise is None else Rounding(self.noise)
        self.calls: Counter[Key] = Counter()
        self.before: dict[str, Tensor] = {}
        self.made: dict[int, tuple[str, dict[str, float]]] = {}  # see `_made_by`
        self.late = False  # weights may still change, when other ranks' updates are gathered
        self.locals: dict[str, list[Tensor]] = defaultdict(list)  # samples of each backward
        self.dice: tuple[Any, ...] = ()  # random number generators' states at the last output

    def __call__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        rename: Callable[[str], str] = author_names,
    ) -> Any:
        """Watch a model, or this rank's parts of one, and its optimizer; return the model.

        optimizer: several, if each step takes one of each; None for DeepSpeed's engine, which has
        its own. rename: from a name here to that of the plain model's module or parameter.

        Raises ValueError for other objects, and for a second call.
        """
        self.models = list(model) if isinstance(model, (list, tuple)) else [model]
        several = isinstance(optimizer, (list, tuple))
        optimizers = list(optimizer) if several else [] if optimizer is None else [optimizer]
        self.optimizers = optimizers
        check_all(nn.Module, model=self.models)
        for one in optimizers:
            check_kind(torch.optim.Optimizer, optimizer=one)
        if self.sink.watched:
            raise ValueError("watch: a second call; needed is one, with a list of several models")
        _overlook_rehearsals()
        self.rename = rename
        self.sink.watched, self.sink.fewer = True, getattr(model, "fewer", "")
        if self.noise is not None:
            with torch.no_grad():
                for p in {id(p): p for _, p in self._parameters()}.values():
                    p.copy_(neighbours(p, self.noise))
        for name, p in self._once(tell=True):
            self.sink.see(Key(self.step or BEFORE, "weights", name), _part(_readable(p)))
            if p.requires_grad and p.is_leaf:
                p.register_hook(self._own_gradient(name))
        self._keep_weights()
        if self.rounding is not None:
            self.rounding.__enter__()
        for one in self.models:
            one.register_forward_pre_hook(self._enter, prepend=True)  # before FSDP2 gathers
            for name, module in one.named_modules():
                if rename(name) or len(self.models) == 1:  # a part of a model is not the model
                    self._hook(rename(name), module)
        engine = type(model).__module__.startswith(ENGINES)
        self.sink.optimized = engine or bool(optimizers)
        if engine:
            self._inside_engine(model)
        else:
            self._around(optimizers)
        return model

    def close(self) -> None:
        """Take the last step's late weights, and end the noise in sums and casts."""
        self._take_late()
        if self.sink.watched and self.rounding is not None:
            self.rounding.__exit__(None, None, None)

    def samples(self, ids: Sequence[int] | Tensor) -> None:
        """Report the samples of this rank's next step; several calls add up.

        Call it before the step, in both programs. All ranks together must have the plain program's
        samples, each once; ranks that share samples (tensor parallelism) must have the same.
        """
        key = Key(self.step, "samples", "")
        value = torch.as_tensor(ids, dtype=torch.int64).cpu()
        self.sink.see(key, Part(value, call=self.calls[key]))
        self.calls[key] += 1

    # Outputs, and the gradients of outputs

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        self.dice = _dice()
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._take_late()

    def _hook(self, name: str, module: nn.Module) -> None:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            dice = _dice()
            drew, self.dice = dice != self.dice, dice
            # Ignore recomputation in backward, evaluation, and a library's shape inference.
            if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled() or _quiet:
                return None
            if moved := self.noise is not None and is_watched(output):
                y = output.detach()
                output = output + (neighbours(y, self.noise) - y)
            for number, x in enumerate(x for x in tree_leaves(output) if is_watched(x)):
                key = Key(self.step, "forward", name + (f"[{number}]" if number else ""))
                part = _part(x)
                part.call, part.drew = self.calls[key], drew
                self.calls[key] += 1
                self.sink.see(key, part)
                if x.requires_grad:
                    x.register_hook(self._backward(key._replace(phase="backward"), part.call))
            return output if moved else None

        module.register_forward_hook(after)

    def _backward(self, key: Key, call: int) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            part = _part(gradient)
            part.call = call
            self.sink.see(key, part)
            return None if self.noise is None else neighbours(gradient, self.noise)

        return hook

    # Weights, their gradients, and their updates

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for one in self.models:
            for name, p in one.named_parameters(remove_duplicate=False):
                yield self.rename(name), p

    def _once(self, tell: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter by its first name."""
        first: dict[int, str] = {}
        for name, p in self._parameters():
            if first.setdefault(id(p), name) == name:
                yield name, p
            elif tell:
                self.sink.tied(name, first[id(p)])

    def _own_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None or isinstance(gradient, DTensor) or _quiet:  # None: not yet there
                return
            self.locals[name].append(sampled(gradient).cpu().clone())

        return hook

    def _keep_weights(self) -> None:
        self.before = {name: _part(_readable(p)).value.clone() for name, p in self._once()}
        for name, value in self.before.items() if self.every and self.step else ():
            self.sink.see(Key(self.step, "weights", name), Part(value))

    def _gradients(self, unclipped: bool = False) -> None:
        held = {id(p) for one in self.optimizers for g in one.param_groups for p in g["params"]}
        each_once = [*self._once()]
        some = any(id(p) in held for _, p in each_once)  # none if the optimizer has own copies
        for name, p in each_once:
            gradient, unread = _gradient(p), some and p.requires_grad and id(p) not in held
            if gradient is not None or unread:
                part = _part(p if gradient is None else gradient)
                part.unread = unread
                each = self.locals.get(name)
                part.local, part.unclipped = torch.stack(each) if each else None, unclipped
                self.sink.see(Key(self.step, "gradient", name), part)
        self.locals.clear()

    def _updates(self) -> None:
        self.made = self._made_by()
        for name, p in self._once():
            self.sink.see(Key(self.step, "update", name), self._moved(name, p))
        self.step += 1
        self.sink.steps = self.step

    def _moved(self, name: str, p: nn.Parameter) -> Part:
        """Return the difference of this rank's weights from those before the step."""
        part = _part(_readable(p))
        wide = torch.promote_types(part.value.dtype, torch.float32)
        part.value = part.value.to(wide) - self.before[name].to(wide)
        part.optimizer, part.options = self.made.get(id(p), ("", {}))
        return part

    def _take_late(self) -> None:
        """Look again at updates that fitted nowhere when the step ended.

        In ZeRO by hand a rank's optimizer steps its own weights, and the others come afterwards.
        """
        if not self.late:
            return
        self.late, keys = False, set()
        for name, p in self._once():
            key = Key(self.step - 1, "update", name)
            if key in keys or self.sink.forget(key):
                keys.add(key)
                self.sink.see(key, self._moved(name, p))
        self._keep_weights()

    def _made_by(self) -> dict[int, tuple[str, dict[str, float]]]:
        """Return each parameter's optimizer class and options (numbers, step count), by its id."""
        made = {}
        for one in self.optimizers:
            for group in one.param_groups:
                for p in group["params"]:
                    steps = one.state.get(p, {}).get("step")
                    found = group if steps is None else group | {"step": float(steps)}
                    numbers = {k: v for k, v in found.items() if type(v) in (int, float)}
                    made.setdefault(id(p), (type(one).__name__, numbers))
        return made

    def _around(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Record gradients before the first optimizer steps, and updates after the last one."""
        waiting: list[torch.optim.Optimizer] = []

        def before(*_: Any) -> None:
            if not waiting:
                self._take_late()
                waiting.extend(optimizers)
                self._gradients()

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            waiting[:] = [one for one in waiting if one is not optimizer]
            if not waiting:
                self._updates()
                self.late = True

        for one in optimizers:
            one.register_step_pre_hook(before)
            one.register_step_post_hook(after)

    def _inside_engine(self, engine: Any) -> None:
        """Wrap DeepSpeed's `step`, which clips inside, and steps at the last micro-batch only."""
        step = engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            at_end = engine.is_gradient_accumulation_boundary()
            if at_end:
                self._gradients(bool(engine.gradient_clipping()))
            result = step(*args, **kwargs)
            if at_end:
                self._updates()
                self._keep_weights()
            return result

        engine.step = watched


def _part(x: Tensor) -> Part:
    """Return this rank's own numbers of a tensor, with a DTensor's offset in the whole."""
    x, start = x.detach(), None
    if isinstance(x, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not any(p.is_partial() for p in x.placements):
            place = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
            start = tuple(place[1])
        x = x.to_local()
        x = x.wait() if hasattr(x, "wait") else x
    return Part(x.cpu(), start=start)


def _readable(p: Tensor) -> Tensor:
    """Return a parameter as this rank can read it; DeepSpeed's ZeRO-3 has to gather it."""
    if hasattr(p, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([p]):
            return p.detach().clone()
    return p


def _gradient(p: Tensor) -> Tensor | None:
    """Return the gradient that the optimizer will see, a DTensor in its weight's placements."""
    if p.grad is None and (hasattr(p, "_hp_mapping") or hasattr(p, "ds_id")):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(p)
    if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        return p.grad.redistribute(placements=p.placements)
    return p.grad


def _dice() -> tuple[Any, ...]:
    """Return hashes of the states of this process's random number generators."""
    there = gpu.module().default_generators if gpu.module().is_initialized() else ()
    each = (torch.random.default_generator, *there)
    return tuple(hash(one.get_state().numpy().tobytes()) for one in each)


_quiet: list[bool] = []  # not empty while a library infers shapes


def _overlook_rehearsals() -> None:
    """Ignore the shape inference of torch's pipelines, which sends a made-up micro-batch first."""
    from torch.distributed.pipelining import PipelineStage

    rehearse = getattr(PipelineStage, "_forward_metadata_inference", None)
    if rehearse is None or rehearse.__name__ == "overlooked":
        return

    def overlooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        _quiet.append(True)
        try:
            return rehearse(self, *args, **kwargs)
        finally:
            _quiet.pop()

    PipelineStage._forward_metadata_inference = overlooked
