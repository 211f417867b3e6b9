"""Declared types: a word for each axis of the mesh, which a tensor carries as an attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from .messages import Mismatch, located

Type = dict[str, str]  # axis -> word
Some = TypeVar("Some", bound=Tensor)
WORDS = ("I", "R", "V", "P")
DUAL = {"I": "I", "R": "P", "V": "V", "P": "R"}  # a tensor's word -> its gradient's word
meshes: list[tuple[str, ...]] = []  # axes of the active checks, innermost last


def type_of(x: Tensor) -> Type | None:
    """Return the words of `x` by axis; None if its type is unknown."""
    return getattr(x, "over_ranks", None)


def declare(x: Some, **words: str) -> Some:
    """Declare the type of `x` on each axis, or check it against the known type; return `x`.

    V may be declared P, because a local loss is a summand of the joint loss. A leaf without
    gradient that is the same on all ranks may be declared I, R or V. Raises ValueError for an
    unknown word or axis, and Mismatch if the known type contradicts.
    """
    _check_words(words)
    known = type_of(x) or {}
    for axis, word in words.items():
        have = known.get(axis, word)
        free = x.is_leaf and not x.requires_grad and have in "IR" and word != "P"
        if have != word and (have, word) != ("V", "P") and not free:
            with located(declare, [x]), Mismatch.on(axis):
                raise Mismatch(f"it is {have}, and is said to be {word}")
    x.over_ranks = {**known, **words}
    return x


def declare_parameters(module: nn.Module, **words: str | Mapping[str, str]) -> None:
    """Declare the type of each parameter: one word for all, or one by name. Buffers become R.

    Messages then name the parameters. Raises ValueError for missing or unknown names.
    """
    for x in module.buffers():
        declare(x, **dict.fromkeys(words, "R"))
    named = dict(module.named_parameters())
    for axis, said in words.items():
        by_name = dict.fromkeys(named, said) if isinstance(said, str) else dict(said)
        if odd := by_name.keys() ^ named.keys():
            raise ValueError(f"{axis}: {min(odd)!r} is a name too many, or missing; "
                             "allowed are those of named_parameters()")  # fmt: skip
        for name, parameter in named.items():
            parameter.called = name
            declare(parameter, **{axis: by_name[name]})


def believe(x: Some, **words: str) -> Some:
    """Overwrite the type of `x`, for example after hooks that changed a gradient unseen."""
    _check_words(words)
    x.over_ranks = {**(type_of(x) or {}), **words}
    return x


def _check_words(words: Mapping[str, str]) -> None:
    axes = meshes[-1] if meshes else words
    for axis, word in words.items():
        if axis not in axes:
            raise ValueError(f"axis={axis!r}: allowed are {', '.join(map(repr, axes))}")
        if word not in WORDS:
            raise ValueError(f"{axis}={word!r}: allowed are {', '.join(map(repr, WORDS))}")


def parse(words: str) -> tuple[list[str], str]:
    """Parse "V, R -> I" to ["V", "R"], "I". Raises ValueError for anything else."""
    left, _, dst = (part.strip() for part in str(words).partition("->"))
    takes = [word.strip() for word in left.split(",")]
    if not {*takes, dst} <= set(WORDS):
        example = "one of I, R, V, P for each tensor that goes in, and one: 'I -> R'"
        raise ValueError(f"words={words!r}: allowed is {example}")
    return takes, dst
