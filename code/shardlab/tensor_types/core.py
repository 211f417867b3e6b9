"""Types of tensors over the ranks of a group, and a checker that follows them through a program.

    type   what the ranks hold               its gradient    what the gradients are
    I      the same, used in the same way    I               the same on all ranks
    R      the same, each for its own work   P               summands that are not summed yet
    V      each its own                      V               each its own
    P      summands of a sum not yet made    R               the sum's gradient, on all ranks

A tensor has one type on each axis of a mesh. An operator that communicates has a signature, such as
"I -> R" for Megatron's f. For other operations a table says which types may be combined, and what
results (`combine_types`). So the checker looks at no numbers: it needs no second rank, and finds
the line at which a gradient goes wrong before that line runs.

The types are those of Meta's `spmd_types` (github.com/meta-pytorch/spmd_types): R replicate, I
invariant, V varying, P partial. DTensor has R, V (as Shard) and P, but no I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from . import functions
from .declarations import GRADIENT_TYPES, AxisTypes, active_meshes, get_types, parse_signature
from .messages import TypeMismatch, locate_errors
from .operator import Operator

# The table: the result of an operation that sends nothing, on one axis.


def combine_types(types: Sequence[str], fixed: Sequence[bool], kind: str) -> str:
    """Return the result's type, given the operands'; raise TypeMismatch if they do not match.

    fixed: operands without a gradient, for which I and R are the same. kind: how the operation
    treats summands (`functions.classify_function`).
    """
    free = {w for w, f in zip(types, fixed, strict=True) if not (f and w in "IR")}
    if not free:
        return types[0] if len(set(types)) == 1 else "R"
    if "I" in free and len(free) > 1:
        raise TypeMismatch.for_case("I", types)
    if "P" not in free:
        return "I" if free == {"I"} else "V" if "V" in free else "R"
    others = [w for w in types if w != "P"]
    if kind == "sum" and not others:
        return "P"
    one = len(types) - len(others) == 1 and free <= {"P", "R"}
    if kind == "product" and one or kind == "first" and one and types[0] == "P" and len(types) < 3:
        return "P"
    raise TypeMismatch.for_case("P", types)


def convert_type(given: str, src: str, dst: str) -> str:
    """Return the result of an operator "src -> dst" on a tensor; V may stand for P."""
    if given != src and (given, src) != ("V", "P"):
        raise TypeMismatch.for_case(f"{src} -> {dst}", [given])
    return dst


# Collectives on plain tensors, invisible to autograd: name -> index of the argument read, index of
# the argument written, types allowed for the first, type of the second.
_COLLECTIVES: dict[str, tuple[int, int, str, str]] = {
    "all_reduce": (0, 0, "P", "R"),
    "all_gather": (1, 0, "VRI", "R"),
    "all_gather_single": (1, 0, "VRI", "R"),
    "all_gather_into_tensor": (1, 0, "VRI", "R"),
    "reduce_scatter_single": (1, 0, "P", "V"),
    "reduce_scatter_tensor": (1, 0, "P", "V"),
    "all_to_all_single": (1, 0, "VRI", "V"),
    "broadcast": (0, 0, "VRI", "R"),
}


class TypeChecker(TorchFunctionMode):
    """A mode that checks each torch function before it runs, and types its results."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]):
        super().__init__()
        self.groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        self.num_checked, self.num_communicating, self.num_backwards = 0, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator, name = _find_operator(func), getattr(func, "__name__", "")
        if name in functions.NOT_CHECKED:
            return func(*args, **kwargs)
        if name == "__get__":
            return self.read_attribute(func, args)
        if operator and hasattr(operator, "forward_unfused"):  # typed as `forward_unfused` is
            with self, saved_tensors_hooks(lambda x: x, lambda x: x):  # hidden from recomputation
                like = tree_leaves(operator.forward_unfused(*args))
            out = func(*args)
            for x, plain in zip(tree_leaves(out), like, strict=True):
                _set_types(x, get_types(plain))
            return out
        if name.startswith("_foreach_"):  # on lists of tensors: check element by element
            return self.check_foreach(func, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with locate_errors(operator or func, tensors):
            if func in (Tensor.backward, torch.autograd.grad):
                return self.check_backward(func, tensors[0], args, kwargs)
            made = self.infer_types(func, name, args, kwargs, tensors)
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not (name in functions.REPLICATED and x.requires_grad):
                _set_types(x, made)
        return out

    def check_foreach(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Check a _foreach_ function as the single-tensor function for each element."""
        name, types = func.__name__.removeprefix("_foreach_"), []
        for i in range(len(args[0])):
            mine = [a[i] if isinstance(a, list | tuple) else a for a in args]
            tensors = [x for x in mine if isinstance(x, Tensor)]
            with locate_errors(func, tensors):
                types.append(self.infer_types(func, name, mine, kwargs, tensors))
        out = func(*args, **kwargs)
        for x, made in zip(out or args[0], types, strict=True):
            _set_types(x, made)
        return out

    def infer_types(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> AxisTypes | None:
        """Return the types of the result; None if they are unknown."""
        before = [self.require_types(x) for x in tensors]
        if name in functions.UNTYPED:
            if functions.is_in_place(name) and not tensors[0].requires_grad:
                _set_types(tensors[0], None)
            return None
        if name in functions.REPLICATED:
            return dict.fromkeys(self.groups, "R")
        if name == "copy_" and not tensors[0].requires_grad:
            _set_types(tensors[0], before[-1])
            return before[-1]
        if all(known is None for known in before):
            return None
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            return self.check_collective(name, args, kwargs)
        if "c10d_functional" in str(func):
            raise TypeMismatch("functional collectives are not supported")
        if None in before:
            raise TypeMismatch("has no declared type", before.index(None))
        fixed = [not (torch.is_grad_enabled() and x.requires_grad) for x in tensors]
        self.num_checked += 1
        if operator := _find_operator(func):
            return self.check_operator(operator, args, before, fixed)
        if name in functions.SHAPE_OF_SECOND:
            before, fixed = before[:1], fixed[:1]
        made = self.combine_axes(before, fixed, functions.classify_function(name, args, kwargs))
        return self.check_write(before[0], fixed[0], made) if functions.is_in_place(name) else made

    def check_write(self, old: AxisTypes, fixed: bool, made: AxisTypes) -> AxisTypes:
        """Check that a write keeps the type; I and R are one without a gradient."""
        if not all(w == old[a] or fixed and {w, old[a]} <= {"I", "R"} for a, w in made.items()):
            raise TypeMismatch.for_case("in place", [f"{axis}:{t}" for axis, t in made.items()])
        return old

    def combine_axes(self, before: Any, fixed: Any, kind: str, skip: str = "") -> AxisTypes:
        """Apply `combine_types` on each axis except `skip`."""
        made = {}
        for axis in (axis for axis in self.groups if axis != skip):
            with TypeMismatch.add_axis(axis):
                made[axis] = combine_types([types[axis] for types in before], fixed, kind)
        return made

    def check_operator(self, operator: Any, args: Any, before: Any, fixed: Any) -> AxisTypes:
        """Return an operator's types: from its signature on its own axis, else from the table."""
        if not hasattr(operator, "signature"):
            raise TypeMismatch("this Operator has no `signature`")
        sources, dst = parse_signature(operator.signature)
        groups = [group for a in args for group in (a, getattr(a, "group", None))]
        axis = self.find_axis(next((g for g in groups if isinstance(g, dist.ProcessGroup)), None))
        self.num_communicating += 1
        made = self.combine_axes(before, fixed, "sum" if len(sources) == 1 else "other", skip=axis)
        with TypeMismatch.add_axis(axis):
            for src, types, constant in zip(sources, before, fixed, strict=True):
                same = constant and types[axis] in "IR" and src in "IR"
                convert_type(src if same else types[axis], src, dst)
        return {name: {**made, axis: dst}[name] for name in self.groups}  # in axis order

    def check_collective(self, name: str, args: Any, kwargs: Any) -> None:
        """Type the output of a collective on plain tensors (`torch.distributed`)."""
        if name not in _COLLECTIVES:
            raise TypeMismatch(f"{name} is not supported: use one of {', '.join(_COLLECTIVES)}")
        read, written, allowed, dst = _COLLECTIVES[name]
        given = [*args, *kwargs.values()]
        group = next((x for x in given if isinstance(x, dist.ProcessGroup)), dist.group.WORLD)
        x = args[read]
        if group.size() == 1 or not isinstance(x, Tensor) or get_types(x) is None:
            return
        known = self.require_types(x)
        axis, sums = self.find_axis(group), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        op = next((x for x in given if isinstance(x, dist.ReduceOp.RedOpType)), sums[0])
        self.num_communicating += 1
        if torch.is_grad_enabled() and x.requires_grad:
            if name != "all_reduce" or op != sums[0]:
                raise TypeMismatch("autograd does not see this collective: the gradient ends here")
            dst = "I"  # autograd skips it: each rank passes its gradient on unchanged
        if name == "all_reduce" and op not in sums:
            allowed = "VRI"  # a maximum or minimum is no sum
        with TypeMismatch.add_axis(axis):
            if known[axis] not in allowed:
                convert_type(known[axis], allowed, dst)
        for out in tree_leaves(args[written]):
            _set_types(out, known | {axis: dst})

    def check_backward(self, func: Any, loss: Tensor, args: Any, kwargs: Any) -> Any:
        """Run backward from a loss, which must be I or P, and type the gradients."""
        for axis, type_ in (self.require_types(loss) or {}).items():
            if type_ not in "IP":
                with TypeMismatch.add_axis(axis):
                    raise TypeMismatch.for_case("backward", [type_])
        self.num_backwards += 1
        if func is torch.autograd.grad:
            out = func(*args, **kwargs)
            for x, dx in zip(tree_leaves(args[1]), out, strict=True):
                self.set_gradient_types(x, dx)
            return out
        leaves = list(_find_typed_leaves(loss))
        for leaf in leaves:
            old = leaf.grad is not None and self.require_types(leaf.grad)
            new = {axis: GRADIENT_TYPES[t] for axis, t in self.require_types(leaf).items()}
            if old and old != new:
                fix = "call zero_grad, or reduce once, after the last backward"
                raise TypeMismatch(f"it would add {new} to a gradient that is {old}", fix=fix)
        func(*args, **kwargs)
        for leaf in leaves:
            if leaf.grad is not None:
                self.set_gradient_types(leaf, leaf.grad)
        return None

    def set_gradient_types(self, x: Tensor, dx: Tensor) -> None:
        """Give `dx` the type that belongs to the gradient of `x`."""
        dx.rank_types = {axis: GRADIENT_TYPES[type_] for axis, type_ in get_types(x).items()}
        dx.tensor_name = f"gradient of {getattr(x, 'tensor_name', 'a tensor')}"

    def require_types(self, x: Tensor) -> AxisTypes | None:
        """Return the types of `x`, None if unknown; raise TypeMismatch if an axis is missing."""
        known = get_types(x)
        made = x.grad_fn if torch.is_grad_enabled() else None  # torch may refuse to read it
        if isinstance(made, BackwardCFunction) and not issubclass(made._forward_cls, Operator):
            raise TypeMismatch("an operand comes from an autograd Function that is no Operator")
        if known is not None and (missing := self.groups.keys() - known):
            raise TypeMismatch(f"an operand has no declared type on axis {min(missing)}")
        return known and {axis: known[axis] for axis in self.groups}

    def find_axis(self, group: dist.ProcessGroup | None) -> str:
        """Return the name of the axis whose group this is; raise TypeMismatch if none."""
        if group is None:
            raise TypeMismatch("this Operator was called without a process group")
        for axis, known in self.groups.items():
            if known is group or known.group_name == group.group_name:
                return axis
        raise TypeMismatch(f"its group of {group.size()} ranks is not an axis of this check")

    def read_attribute(self, func: Any, args: Any) -> Any:
        """Read a tensor's attribute; views such as `mT` get the tensor's type."""
        out = func(*args)
        if isinstance(out, Tensor) and func.__self__.__name__ in functions.VIEWS:
            _set_types(out, self.require_types(args[0]))
        return out


def _find_operator(func: Any) -> type[Operator] | None:
    cls = getattr(func, "__self__", None)
    return cls if isinstance(cls, type) and issubclass(cls, Operator) else None


def _set_types(x: Tensor, made: AxisTypes | None) -> None:
    if made is not None:
        x.rank_types = dict(made)
    elif hasattr(x, "rank_types") and x.is_leaf and not x.requires_grad:
        del x.rank_types


def _find_typed_leaves(loss: Tensor) -> Iterator[Tensor]:
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and get_types(node.variable) is not None:
            yield node.variable
        todo += [follower for follower, _ in node.next_functions]


@contextmanager
def check_types(**groups: dist.ProcessGroup) -> Iterator[TypeChecker]:
    """Check the computation inside; raise Mismatch before the first wrong operation.

    groups: the process group of each axis, by name. Axes of one rank are left out: there all types
    mean the same. Autograd's backward itself is not followed, only the code before and after it.
    """
    mode = TypeChecker(groups)
    active_meshes.append(tuple(groups))
    try:
        with mode:
            yield mode
    finally:
        active_meshes.pop()
