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
from shardlab.common.arguments import check_list, check_type

from .rounding import RandomRounding, move_by_ulp

# Names of wrappers that libraries insert into a module's name.
WRAPPER_NAMES = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Phases in the order of a step.
PHASES = "weights", "samples", "forward", "backward", "gradient", "update"
INITIAL_STEP = -1  # the step of weights before the first one
ENGINE_PACKAGE = "deepspeed"  # its engines step the optimizer inside their own step
GRADIENT_SAMPLES = 256  # numbers that are kept of a gradient from each backward pass of a step


OptimizerInfo = tuple[str, dict[str, float]]  # class and options


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
    offset: tuple[int, ...] | None = None  # a DTensor's offset in the full tensor
    local_samples: Tensor | None = None  # of a gradient before it is averaged: `sample_values`
    used_rng: bool = False  # random numbers were drawn since the previous output
    outside_optimizer: bool = False  # a gradient whose weight this rank's optimizer does not have
    before_clipping: bool = False  # a gradient that is clipped later, inside the optimizer's step
    optimizer_options: dict[str, float] = field(default_factory=dict)  # of an update
    optimizer_class: str = ""  # of an update


class Sink:
    """A receiver of tensors, in the order in which they come."""

    def __init__(self) -> None:
        self.steps = 0  # completed steps
        self.is_watched = self.has_optimizer = False  # True once watch was called with them
        self.cut_description = ""  # description of a shortened model: see `keep_first_layers`

    def receive_part(self, key: Key, part: Part) -> None:
        """Receive a tensor, and copy it if it is kept."""

    def add_alias(self, name: str, first: str) -> None:
        """Receive a second name of a tied parameter."""

    def drop_misfit(self, key: Key) -> bool:
        """Drop an update that fits nowhere, since it may come late; True if one was dropped."""
        return False


def strip_wrappers(name: str) -> str:
    """Return a module's name without the wrappers that libraries insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def sample_values(x: Tensor) -> Tensor:
    """Return some numbers of `x`: the same ones for each tensor of its size."""
    x = x.detach().flatten()
    return x[:: max(1, x.numel() // GRADIENT_SAMPLES) | 1]  # odd: not one column


def is_float_tensor(x: Any) -> bool:
    """Return True for a tensor of real numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


class Watch:
    """The `watch` that a program receives: `watch(model, optimizer)`.

    seed: of noise, which moves every output, gradient and initial weight by one unit in the last
    place, and rounds sums and casts differently (see `RandomRounding`), until `close`. first_step:
    steps before this resumed program. every_step: report weights before each step, not only the
    first.
    """

    def __init__(
        self, sink: Sink, seed: int | None = None, first_step: int = 0, every_step: bool = False
    ):
        self.sink, self.step, self.every_step = sink, first_step, every_step
        self.noise = None if seed is None else torch.Generator().manual_seed(seed)
        self.rounding = None if self.noise is None else RandomRounding(self.noise)
        self.call_counts: Counter[Key] = Counter()
        self.weights_before: dict[str, Tensor] = {}
        self.optimizer_info: dict[int, OptimizerInfo] = {}  # by id of the parameter
        # True while weights may still change, when other ranks' updates are gathered.
        self.has_late_updates = False
        self.local_gradients: dict[str, list[Tensor]] = defaultdict(list)  # of each backward
        self.rng_hashes: tuple[Any, ...] = ()  # random number generators' states at the last output

    def __call__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        rename: Callable[[str], str] = strip_wrappers,
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
        check_list(nn.Module, model=self.models)
        for each in optimizers:
            check_type(torch.optim.Optimizer, optimizer=each)
        if self.sink.is_watched:
            raise ValueError("watch: called twice; call it once (with a list, for several models)")
        _skip_shape_inference()
        self.rename = rename
        self.sink.is_watched = True
        self.sink.cut_description = getattr(model, "cut_description", "")
        if self.noise is not None:
            with torch.no_grad():
                for p in {id(p): p for _, p in self._named_parameters()}.values():
                    p.copy_(move_by_ulp(p, self.noise))
        for name, p in self._unique_parameters(report_aliases=True):
            key = Key(self.step or INITIAL_STEP, "weights", name)
            self.sink.receive_part(key, _make_part(_gather_parameter(p)))
            if p.requires_grad and p.is_leaf:
                p.register_hook(self._make_local_gradient_hook(name))
        self._store_weights()
        if self.rounding is not None:
            self.rounding.__enter__()
        for each in self.models:
            each.register_forward_pre_hook(self._pre_forward, prepend=True)  # before FSDP2 gathers
            for name, module in each.named_modules():
                if rename(name) or len(self.models) == 1:  # a part of a model is not the model
                    self._register_hooks(rename(name), module)
        engine = type(model).__module__.startswith(ENGINE_PACKAGE)
        self.sink.has_optimizer = engine or bool(optimizers)
        if engine:
            self._wrap_engine_step(model)
        else:
            self._hook_optimizers(optimizers)
        return model

    def close(self) -> None:
        """Report the last step's late updates, and end the noise in sums and casts."""
        self._resend_late_updates()
        if self.sink.is_watched and self.rounding is not None:
            self.rounding.__exit__(None, None, None)

    def declare_samples(self, ids: Sequence[int] | Tensor) -> None:
        """Declare the samples of this rank's next step; several calls add up.

        Call it before the step, in both programs. All ranks together must have the plain program's
        samples, each once; ranks that share samples (tensor parallelism) must have the same.
        """
        key = Key(self.step, "samples", "")
        value = torch.as_tensor(ids, dtype=torch.int64).cpu()
        self.sink.receive_part(key, Part(value, call=self.call_counts[key]))
        self.call_counts[key] += 1

    # Outputs, and the gradients of outputs

    def _pre_forward(self, _module: nn.Module, _args: Any) -> None:
        self.rng_hashes = _hash_rng_states()
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._resend_late_updates()

    def _register_hooks(self, name: str, module: nn.Module) -> None:
        def post_forward(_module: nn.Module, _args: Any, output: Any) -> Any:
            hashes = _hash_rng_states()
            used_rng, self.rng_hashes = hashes != self.rng_hashes, hashes
            # Ignore recomputation in backward, evaluation, and a library's shape inference.
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward or not torch.is_grad_enabled() or _shape_inference:
                return None
            if moved := self.noise is not None and is_float_tensor(output):
                y = output.detach()
                output = output + (move_by_ulp(y, self.noise) - y)
            for number, x in enumerate(x for x in tree_leaves(output) if is_float_tensor(x)):
                key = Key(self.step, "forward", name + (f"[{number}]" if number else ""))
                part = _make_part(x)
                part.call, part.used_rng = self.call_counts[key], used_rng
                self.call_counts[key] += 1
                self.sink.receive_part(key, part)
                if x.requires_grad:
                    key = key._replace(phase="backward")
                    x.register_hook(self._make_gradient_hook(key, part.call))
            return output if moved else None

        module.register_forward_hook(post_forward)

    def _make_gradient_hook(self, key: Key, call: int) -> Callable[[Tensor], Tensor | None]:
        def on_gradient(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            part = _make_part(gradient)
            part.call = call
            self.sink.receive_part(key, part)
            return None if self.noise is None else move_by_ulp(gradient, self.noise)

        return on_gradient

    # Weights, their gradients, and their updates

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self.models:
            for name, p in model.named_parameters(remove_duplicate=False):
                yield self.rename(name), p

    def _unique_parameters(
        self, report_aliases: bool = False
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter by its first name."""
        first: dict[int, str] = {}
        for name, p in self._named_parameters():
            if first.setdefault(id(p), name) == name:
                yield name, p
            elif report_aliases:
                self.sink.add_alias(name, first[id(p)])

    def _make_local_gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor | None) -> None:  # None: not yet there
            if gradient is None or isinstance(gradient, DTensor) or _shape_inference:
                return
            self.local_gradients[name].append(sample_values(gradient).cpu().clone())

        return on_gradient

    def _store_weights(self) -> None:
        weights = ((name, _gather_parameter(p)) for name, p in self._unique_parameters())
        self.weights_before = {name: _make_part(p).value.clone() for name, p in weights}
        for name, value in self.weights_before.items() if self.every_step and self.step else ():
            self.sink.receive_part(Key(self.step, "weights", name), Part(value))

    def _send_gradients(self, before_clipping: bool = False) -> None:
        groups = (group for each in self.optimizers for group in each.param_groups)
        optimized = {id(p) for group in groups for p in group["params"]}
        parameters = [*self._unique_parameters()]
        # No parameter is in the optimizer if it has copies of its own.
        has_some = any(id(p) in optimized for _, p in parameters)
        for name, p in parameters:
            gradient = _read_gradient(p)
            outside_optimizer = has_some and p.requires_grad and id(p) not in optimized
            if gradient is not None or outside_optimizer:
                part = _make_part(p if gradient is None else gradient)
                part.outside_optimizer, part.before_clipping = outside_optimizer, before_clipping
                samples = self.local_gradients.get(name)
                part.local_samples = torch.stack(samples) if samples else None
                self.sink.receive_part(Key(self.step, "gradient", name), part)
        self.local_gradients.clear()

    def _send_updates(self) -> None:
        self.optimizer_info = self._describe_optimizers()
        for name, p in self._unique_parameters():
            self.sink.receive_part(Key(self.step, "update", name), self._compute_update(name, p))
        self.step += 1
        self.sink.steps = self.step

    def _compute_update(self, name: str, p: nn.Parameter) -> Part:
        """Return the difference of this rank's weights from those before the step."""
        part = _make_part(_gather_parameter(p))
        dtype = torch.promote_types(part.value.dtype, torch.float32)
        part.value = part.value.to(dtype) - self.weights_before[name].to(dtype)
        part.optimizer_class, part.optimizer_options = self.optimizer_info.get(id(p), ("", {}))
        return part

    def _resend_late_updates(self) -> None:
        """Report updates again that fitted nowhere when the step ended.

        In ZeRO by hand a rank's optimizer steps its own weights, and the others come afterwards.
        """
        if not self.has_late_updates:
            return
        self.has_late_updates, keys = False, set()
        for name, p in self._unique_parameters():
            key = Key(self.step - 1, "update", name)
            if key in keys or self.sink.drop_misfit(key):
                keys.add(key)
                self.sink.receive_part(key, self._compute_update(name, p))
        self._store_weights()

    def _describe_optimizers(self) -> dict[int, OptimizerInfo]:
        """Return each parameter's optimizer class and options (numbers, step count), by its id."""
        info = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    steps = optimizer.state.get(p, {}).get("step")
                    options = group if steps is None else group | {"step": float(steps)}
                    numbers = {k: v for k, v in options.items() if type(v) in (int, float)}
                    info.setdefault(id(p), (type(optimizer).__name__, numbers))
        return info

    def _hook_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Record gradients before the first optimizer steps, and updates after the last one."""
        waiting: list[torch.optim.Optimizer] = []

        def pre_step(*_: Any) -> None:
            if not waiting:
                self._resend_late_updates()
                waiting.extend(optimizers)
                self._send_gradients()

        def post_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            waiting[:] = [each for each in waiting if each is not optimizer]
            if not waiting:
                self._send_updates()
                self.has_late_updates = True

        for optimizer in optimizers:
            optimizer.register_step_pre_hook(pre_step)
            optimizer.register_step_post_hook(post_step)

    def _wrap_engine_step(self, engine: Any) -> None:
        """Wrap DeepSpeed's `step`, which clips inside, and steps at the last micro-batch only."""
        step = engine.step

        def step_and_send(*args: Any, **kwargs: Any) -> Any:
            at_end = engine.is_gradient_accumulation_boundary()
            if at_end:
                self._send_gradients(bool(engine.gradient_clipping()))
            result = step(*args, **kwargs)
            if at_end:
                self._send_updates()
                self._store_weights()
            return result

        engine.step = step_and_send


def _make_part(x: Tensor) -> Part:
    """Return this rank's own numbers of a tensor, with a DTensor's offset in the full tensor."""
    x, offset = x.detach(), None
    if isinstance(x, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not any(p.is_partial() for p in x.placements):
            place = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
            offset = tuple(place[1])
        x = x.to_local()
        x = x.wait() if hasattr(x, "wait") else x
    return Part(x.cpu(), offset=offset)


def _gather_parameter(p: Tensor) -> Tensor:
    """Return a parameter as this rank can read it; DeepSpeed's ZeRO-3 has to gather it."""
    if hasattr(p, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([p]):
            return p.detach().clone()
    return p


def _read_gradient(p: Tensor) -> Tensor | None:
    """Return the gradient that the optimizer will see, a DTensor in its weight's placements."""
    if p.grad is None and (hasattr(p, "_hp_mapping") or hasattr(p, "ds_id")):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(p)
    if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
        return p.grad.redistribute(placements=p.placements)
    return p.grad


def _hash_rng_states() -> tuple[Any, ...]:
    on_gpu = (
        gpu.get_device_module().default_generators
        if gpu.get_device_module().is_initialized()
        else ()
    )
    generators = (torch.random.default_generator, *on_gpu)
    return tuple(hash(each.get_state().numpy().tobytes()) for each in generators)


_shape_inference: list[bool] = []  # not empty while a library infers shapes


def _skip_shape_inference() -> None:
    """Ignore the shape inference of torch's pipelines, which sends a made-up micro-batch first."""
    from torch.distributed.pipelining import PipelineStage

    infer_shapes = getattr(PipelineStage, "_forward_metadata_inference", None)
    if infer_shapes is None or infer_shapes.__name__ == "skipped_inference":
        return

    def skipped_inference(self: Any, *args: Any, **kwargs: Any) -> Any:
        _shape_inference.append(True)
        try:
            return infer_shapes(self, *args, **kwargs)
        finally:
            _shape_inference.pop()

    PipelineStage._forward_metadata_inference = skipped_inference
