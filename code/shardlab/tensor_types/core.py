"""Types of tensors over the ranks of a group, and a checker that follows them through a program.

    word   what the ranks hold               its gradient    what the gradients are
    I      the same, used in the same way    I               the same on all ranks
    R      the same, each for its own work   P               summands that are not summed yet
    V      each its own                      V               each its own
    P      summands of a sum not yet made    R               the sum's gradient, on all ranks

A tensor has one word for each axis of a mesh; together the words are its type. An operator that
communicates has words of its own, "I -> R" for Megatron's f. For other operations a table says
which words may meet and what results (`combined`). So the checker looks at no numbers: it needs no
second rank, and finds the line at which a gradient goes wrong before that line runs.

The words are those of Meta's `spmd_types` (github.com/meta-pytorch/spmd_types): R replicate, I
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
from .declared import DUAL, Type, meshes, parse, type_of
from .messages import Mismatch, located
from .operator import Operator

# The table: the result of an operation that sends nothing, on one axis.


def combined(words: Sequence[str], fixed: Sequence[bool], how: str) -> str:
    """Return the result's word, given the operands'; raise Mismatch if they clash.

    fixed: operands without a gradient, for which I and R are the same. how: how the operation
    treats summands (`functions.manner`).
    """
    free = {w for w, f in zip(words, fixed, strict=True) if not (f and w in "IR")}
    if not free:
        return words[0] if len(set(words)) == 1 else "R"
    if "I" in free and len(free) > 1:
        raise Mismatch.of("I", words)
    if "P" not in free:
        return "I" if free == {"I"} else "V" if "V" in free else "R"
    others = [w for w in words if w != "P"]
    if how == "sum" and not others:
        return "P"
    one = len(words) - len(others) == 1 and free <= {"P", "R"}
    if how == "product" and one or how == "first" and one and words[0] == "P" and len(words) < 3:
        return "P"
    raise Mismatch.of("P", words)


def moved(given: str, src: str, dst: str) -> str:
    """Return the result of an operator "src -> dst" on a tensor; V may stand for P."""
    if given != src and (given, src) != ("V", "P"):
        raise Mismatch.of(f"{src} -> {dst}", [given])
    return dst


# Collectives on plain tensors, invisible to autograd: name -> index of the argument read, index of
# the argument written, words allowed for the first, word of the second.
_RAW: dict[str, tuple[int, int, str, str]] = {
    "all_reduce": (0, 0, "P", "R"),
    "all_gather": (1, 0, "VRI", "R"),
    "all_gather_single": (1, 0, "VRI", "R"),
    "all_gather_into_tensor": (1, 0, "VRI", "R"),
    "reduce_scatter_single": (1, 0, "P", "V"),
    "reduce_scatter_tensor": (1, 0, "P", "V"),
    "all_to_all_single": (1, 0, "VRI", "V"),
    "broadcast": (0, 0, "VRI", "R"),
}


class Follow(TorchFunctionMode):
    """A mode that checks each torch function before it runs, and types its results."""

    def __init__(self, groups: dict[str, dist.ProcessGroup]):
        super().__init__()
        self.groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        self.judged, self.sent, self.backwards = 0, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator, name = _operator(func), getattr(func, "__name__", "")
        if name in functions.ASIDE:
            return func(*args, **kwargs)
        if name == "__get__":
            return self.attribute(func, args)
        if operator and hasattr(operator, "plainly"):  # typed as `plainly` is
            with self, saved_tensors_hooks(lambda x: x, lambda x: x):  # hidden from recomputation
                like = tree_leaves(operator.plainly(*args))
            out = func(*args)
            for x, plain in zip(tree_leaves(out), like, strict=True):
                _give(x, type_of(plain))
            return out
        if name.startswith("_foreach_"):  # on lists of tensors: check element by element
            return self.many(func, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        with located(operator or func, tensors):
            if func in (Tensor.backward, torch.autograd.grad):
                return self.backward(func, tensors[0], args, kwargs)
            made = self.judge(func, name, args, kwargs, tensors)
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not (name in functions.EQUAL and x.requires_grad):
                _give(x, made)
        return out

    def many(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Check a _foreach_ function as the single-tensor function for each element."""
        name, types = func.__name__.removeprefix("_foreach_"), []
        for i in range(len(args[0])):
            mine = [a[i] if isinstance(a, list | tuple) else a for a in args]
            tensors = [x for x in mine if isinstance(x, Tensor)]
            with located(func, tensors):
                types.append(self.judge(func, name, mine, kwargs, tensors))
        out = func(*args, **kwargs)
        for x, made in zip(out or args[0], types, strict=True):
            _give(x, made)
        return out

    def judge(
        self, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]
    ) -> Type | None:
        """Return the type of the result; None if it is unknown."""
        before = [self.known(x) for x in tensors]
        if name in functions.UNKNOWN:
            if functions.in_place(name) and not tensors[0].requires_grad:
                _give(tensors[0], None)
            return None
        if name in functions.EQUAL:
            return dict.fromkeys(self.groups, "R")
        if name == "copy_" and not tensors[0].requires_grad:
            _give(tensors[0], before[-1])
            return before[-1]
        if all(known is None for known in before):
            return None
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            return self.raw(name, args, kwargs)
        if "c10d_functional" in str(func):
            raise Mismatch("a functional collective has no words here")
        if None in before:
            raise Mismatch("has no type", before.index(None))
        fixed = [not (torch.is_grad_enabled() and x.requires_grad) for x in tensors]
        self.judged += 1
        if operator := _operator(func):
            return self.operator(operator, args, before, fixed)
        if name in functions.SHAPE_OF:
            before, fixed = before[:1], fixed[:1]
        made = self.each_axis(before, fixed, functions.manner(name, args, kwargs))
        return self.written(before[0], fixed[0], made) if functions.in_place(name) else made

    def written(self, old: Type, fixed: bool, made: Type) -> Type:
        """Check that a write keeps the type; I and R are one without a gradient."""
        if not all(w == old[a] or fixed and {w, old[a]} <= {"I", "R"} for a, w in made.items()):
            raise Mismatch.of("in place", [f"{axis}:{word}" for axis, word in made.items()])
        return old

    def each_axis(self, before: Any, fixed: Any, how: str, but: str = "") -> Type:
        """Apply `combined` on each axis except `but`."""
        made = {}
        for axis in (axis for axis in self.groups if axis != but):
            with Mismatch.on(axis):
                made[axis] = combined([known[axis] for known in before], fixed, how)
        return made

    def operator(self, operator: type[Operator], args: Any, before: Any, fixed: Any) -> Type:
        """Return an operator's type: its words on its own axis, else the table."""
        if not hasattr(operator, "words"):
            raise Mismatch("an operator without `words`")
        takes, dst = parse(operator.words)
        groups = [group for a in args for group in (a, getattr(a, "group", None))]
        axis = self.axis(next((g for g in groups if isinstance(g, dist.ProcessGroup)), None))
        self.sent += 1
        made = self.each_axis(before, fixed, "sum" if len(takes) == 1 else "other", but=axis)
        with Mismatch.on(axis):
            for src, known, still in zip(takes, before, fixed, strict=True):
                same = still and known[axis] in "IR" and src in "IR"
                moved(src if same else known[axis], src, dst)
        return {known: {**made, axis: dst}[known] for known in self.groups}  # in axis order

    def raw(self, name: str, args: Any, kwargs: Any) -> None:
        """Type the output of a collective on plain tensors (`torch.distributed`)."""
        if name not in _RAW:
            raise Mismatch("a message without words here")
        read, written, allowed, dst = _RAW[name]
        given = [*args, *kwargs.values()]
        group = next((x for x in given if isinstance(x, dist.ProcessGroup)), dist.group.WORLD)
        x = args[read]
        if group.size() == 1 or not isinstance(x, Tensor) or (known := self.known(x)) is None:
            return
        axis, sums = self.axis(group), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        op = next((x for x in given if isinstance(x, dist.ReduceOp.RedOpType)), sums[0])
        self.sent += 1
        if torch.is_grad_enabled() and x.requires_grad:
            if name != "all_reduce" or op != sums[0]:
                raise Mismatch("autograd knows nothing of a collective: the gradient ends here")
            dst = "I"  # autograd skips it: each rank passes its gradient on unchanged
        if name == "all_reduce" and op not in sums:
            allowed = "VRI"  # a maximum or minimum is no sum
        with Mismatch.on(axis):
            if known[axis] not in allowed:
                moved(known[axis], allowed, dst)
        for out in tree_leaves(args[written]):
            _give(out, known | {axis: dst})

    def backward(self, func: Any, loss: Tensor, args: Any, kwargs: Any) -> Any:
        """Run backward from a loss, which must be I or P, and type the gradients."""
        for axis, word in (self.known(loss) or {}).items():
            if word not in "IP":
                with Mismatch.on(axis):
                    raise Mismatch.of("backward", [word])
        self.backwards += 1
        if func is torch.autograd.grad:
            out = func(*args, **kwargs)
            for x, dx in zip(tree_leaves(args[1]), out, strict=True):
                self.dual(x, dx)
            return out
        leaves = list(_leaves(loss))
        for leaf in leaves:
            old = leaf.grad is not None and self.known(leaf.grad)
            wanted = {axis: DUAL[word] for axis, word in self.known(leaf).items()}
            if old and old != wanted:
                right = "zero_grad, or one exchange behind the last backward"
                raise Mismatch(f"it would add {wanted} to a gradient that is {old}", right=right)
        func(*args, **kwargs)
        for leaf in leaves:
            if leaf.grad is not None:
                self.dual(leaf, leaf.grad)
        return None

    def dual(self, x: Tensor, dx: Tensor) -> None:
        """Give `dx` the type that belongs to the gradient of `x`."""
        dx.over_ranks = {axis: DUAL[word] for axis, word in type_of(x).items()}
        dx.called = f"gradient of {getattr(x, 'called', 'a tensor')}"

    def known(self, x: Tensor) -> Type | None:
        """Return the type of `x` on the axes; raise Mismatch if one is missing."""
        known = type_of(x)
        made = x.grad_fn
        if isinstance(made, BackwardCFunction) and not issubclass(made._forward_cls, Operator):
            raise Mismatch("comes from an autograd Function that is no Operator with `words`")
        if known is not None and (missing := self.groups.keys() - known):
            raise Mismatch(f"nobody said what it is on {min(missing)}")
        return known and {axis: known[axis] for axis in self.groups}

    def axis(self, group: dist.ProcessGroup | None) -> str:
        """Return the name of the axis whose group this is; raise Mismatch if none."""
        if group is None:
            raise Mismatch("an operator with `words`, and without a group")
        for axis, known in self.groups.items():
            if known is group or known.group_name == group.group_name:
                return axis
        raise Mismatch(f"its group of {group.size()} ranks is none of the axes")

    def attribute(self, func: Any, args: Any) -> Any:
        """Read a tensor's attribute; views such as `mT` get the tensor's type."""
        out = func(*args)
        if isinstance(out, Tensor) and func.__self__.__name__ in functions.VIEWS:
            _give(out, self.known(args[0]))
        return out


def _operator(func: Any) -> type[Operator] | None:
    """Return the operator whose `apply` is `func`; None if there is none."""
    of = getattr(func, "__self__", None)
    return of if isinstance(of, type) and issubclass(of, Operator) else None


def _give(x: Tensor, made: Type | None) -> None:
    if made is not None:
        x.over_ranks = dict(made)
    elif hasattr(x, "over_ranks") and x.is_leaf and not x.requires_grad:
        del x.over_ranks


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the typed tensors to which backward from `loss` gives a gradient."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and type_of(node.variable) is not None:
            yield node.variable
        todo += [follower for follower, _ in node.next_functions]


@contextmanager
def checking(**groups: dist.ProcessGroup) -> Iterator[Follow]:
    """Check the computation inside; raise Mismatch before the first wrong operation.

    groups: the process group of each axis, by name. Axes of one rank are left out: there all words
    mean the same. Autograd's backward itself is not followed, only the code before and after it.
    """
    mode = Follow(groups)
    meshes.append(tuple(groups))
    try:
        with mode:
            yield mode
    finally:
        meshes.pop()
