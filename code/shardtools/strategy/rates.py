"""Rates: numbers that no source code tells, each with unit, origin and uncertainty.

A rate is fitted to measured steps (`fit`), measured on this machine, or guessed: a data sheet's
number times the share that jobs commonly reach. Shares are relative to the data sheet, so that a
rate from one machine says something about another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardlab.common.files import read_json
from shardlab.common.machines import Machine


@dataclass(frozen=True)
class Rate:
    """One rate. `spread`: its relative uncertainty, as a factor less one (0.1 is a tenth)."""

    value: float
    unit: str
    spread: float
    origin: str


class Values:
    """Values of the rates, as attributes for formulas: one for each of `_GUESSES`."""

    def __init__(self, **values: float) -> None:
        self.__dict__ = {**_WITHOUT, **values}


@dataclass(frozen=True)
class Rates(Mapping[str, float]):
    """The rates of one profile by name; `rates["launch"]` is a value without its origin."""

    profile: str
    all: dict[str, Rate]
    machine: Machine | None = None  # the machine on which they were measured, if known

    def __getitem__(self, name: str) -> float:
        return self.all[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def values_of(self) -> Values:
        """Return the values, as attributes."""
        return Values(**self)

    def write(self, path: Path) -> None:
        """Write the rates to a JSON file."""
        listed = {name: vars(rate) for name, rate in self.all.items()}
        given: dict[str, Any] = {"profile": self.profile, "rates": listed}
        if self.machine:
            given["machine"] = vars(self.machine)
        text = json.dumps(given, indent=1)
        path.write_text(text + "\n", "utf-8")


# Each rate's meaning, and guesses by profile: value and spread. A profile without a guess takes
# that of the profile it is like (`_LIKE`), or else the course's. First rates of time, then of
# memory, then rates of today's engines alone.
# fmt: off
_GUESSES = {
    "products": ("share of the data sheet's operations that matrix products reach",
        {"course": (0.6, 0.2), "megatron": (0.77, 0.04), "nanotron": (0.5, 0.3),
         "engines": (0.72, 0.2)}),
    "attention": ("the same for fused attention",
        {"course": (0.4, 0.3), "megatron": (0.45, 0.3), "engines": (0.4, 0.3)}),
    "memory": ("share of the data sheet's memory bandwidth", {"course": (0.75, 0.1)}),
    "elementwise": ("bytes for each token and width, in a layer's forward pass",
        {"course": (20.0, 0.3), "megatron": (20.0, 0.2), "nanotron": (30.0, 0.5),
         "engines": (40.0, 0.5)}),
    "scores": ("passes over plain attention's scores in a layer's forward pass",
        {"course": (6.0, 0.3)}),
    "launch": ("seconds in which a CPU launches a layer, forward and backward",
        {"course": (0.002, 0.5), "megatron": (0.001, 0.5), "nanotron": (0.0036, 0.3),
         "engines": (0.0006, 0.7)}),
    "crossing": ("seconds more, for each further tensor rank, where a pipeline leaves the node",
        {"course": (1e-06, 0.1), "nanotron": (0.0022, 0.4)}),
    "node": ("share of the data sheet's rate between the GPUs of a node",
        {"course": (0.6, 0.2), "nanotron": (0.7, 0.3), "engines": (0.75, 0.25)}),
    "hidden": ("share of backward's tensor collectives, of those that can be hidden, that is",
        {"course": (0.2, 0.3), "megatron": (0.85, 0.15), "nanotron": (0.5, 0.3),
         "engines": (0.65, 0.3)}),
    "beyond": ("seconds more of a layer for each further node that a tensor group reaches",
        {"course": (0.004, 0.5), "nanotron": (0.004, 0.4)}),
    "network": ("share of the network cards' rate",
        {"course": (0.6, 0.3), "megatron": (0.6, 0.2), "nanotron": (0.6, 0.4)}),
    "message": ("seconds until a message between stages is on its way",
        {"course": (0.0001, 0.5), "megatron": (3e-05, 0.7), "nanotron": (0.0004, 0.5)}),
    "exposed": ("share of unsharded copies' traffic that backward does not hide",
        {"course": (0.25, 0.5), "megatron": (1.0, 0.1), "nanotron": (0.5, 0.3),
         "engines": (0.3, 0.5)}),
    "gathers": ("share of the traffic of ZeRO-2 and 3 that a step's work does not hide, at least",
        {"course": (0.2, 0.5)}),
    # NCCL itself assumes 14 µs: hwLat in its src/graph/tuning.cc, for a ring over the network.
    # nanotron gathers the weights of a layer one by one.
    "hop": ("seconds of a layer's gather or sum for each further node of the copies, under ZeRO",
        {"course": (1.4e-05, 0.5), "nanotron": (0.0001, 0.5)}),
    "uneven": ("times as many rows as the mean of ranks that deal out experts the fullest has",
        {"course": (1.15, 0.15), "engines": (1.0, 0.05)}),
    "step": ("seconds of a step beside all that is counted",
        {"course": (0.01, 1.0), "nanotron": (0.05, 1.0)}),
    # At 96 % nodes sometimes fail (see LIMIT's issue): NCCL and the CUDA context need the rest.
    # nanotron, early in 2025, retried from some 71.5 GiB on.
    "limit": ("share of a GPU's memory beyond which the allocator retries",
        {"course": (0.927, 0.02), "nanotron": (0.9042, 0.02)}),
    "retries": ("times as long as a step takes then",
        {"course": (1.0, 0.5), "nanotron": (7.0, 0.5)}),
    # Rates of memory.
    "kept": ("bytes for each token and width that a layer keeps outside of its cut matrices",
        {"course": (8.0, 0.1), "megatron": (10.0, 0.1), "nanotron": (12.0, 0.15)}),
    "fragments": ("times as much as activations are, with what the allocator loses to fragments",
        {"course": (1.05, 0.05), "nanotron": (1.08, 0.05)}),
    "logit": ("bytes for each logit, kept and to compute the loss with",
        {"course": (12.0, 0.15), "megatron": (10.0, 0.15), "nanotron": (11.0, 0.15)}),
    "late": ("uncut residual streams whose buffers a tensor group's collectives free late",
        {"course": (4.0, 0.5), "nanotron": (45.0, 0.3)}),
    "settled": ("micro-batches after which two thirds of these are there", {"course": (4.0, 0.7)}),
    "gathered": ("times a rank's weights that ZeRO-1's gather takes beside them",
        {"course": (0.1, 0.5), "nanotron": (1.0, 0.5)}),
    # DeepSpeed's buckets: 5e8 gradients of 2 B, twice if communication overlaps.
    "fixed": ("GiB that are reserved whatever the layout",
        {"course": (0.3, 0.7), "megatron": (0.5, 0.7), "deepspeed": (2.2, 0.3)}),
    # Rates of today's engines; other profiles take the neutral values of `_WITHOUT`.
    "fp8": ("times that share, which products of 8 bits reach", {"engines": (1.0, 0.2)}),
    "mxfp8": ("the same with a scale for each block", {"engines": (1.0, 0.2)}),
    "nvfp4": ("the same for products of 4 bits", {"engines": (0.7, 0.3)}),
    "newer": ("times that share, which GPUs with 4-bit products reach", {"engines": (0.9, 0.15)}),
    "older": ("times that share, which GPUs without 8-bit ones reach", {"engines": (1.1, 0.15)}),
    "narrow": ("times the share of attention, with heads of 64 numbers and fewer",
        {"engines": (0.6, 0.3)}),
    "wide": ("times the passes over what a network computes between its products",
        {"engines": (1.5, 0.5)}),
    "casts": ("passes over what goes into and comes out of products, that casts take",
        {"engines": (1.5, 0.7)}),
    "scan": ("times as long as attention takes for so many operations, that state spaces take",
        {"engines": (50.0, 1.0)}),
    "grouped": ("times the rate of products, that those of experts reach", {"engines": (0.6, 0.3)}),
    "rows": ("rows with which an expert's product reaches half of it", {"engines": (300.0, 1.0)}),
    "routes": ("passes over what experts read and say, to put it in order",
        {"engines": (8.0, 0.7)}),
    "deal": ("seconds more in which a CPU launches a layer with experts",
        {"engines": (0.004, 1.0)}),
    "travels": ("share of what goes to experts of other nodes, that nothing hides",
        {"engines": (0.8, 0.3)}),
    "eager": ("times as long as element-wise work takes uncompiled", {"engines": (1.4, 0.2)}),
    "torchtitan": ("times as long as Megatron's step", {"engines": (1.2, 0.15)}),
    "automodel": ("times as long as Megatron's step", {"engines": (1.1, 0.2)}),
    "fsdp": ("times as long as Megatron's step", {"engines": (1.2, 0.15)}),
}
# fmt: on
_LIKE = {**dict.fromkeys(("fsdp2", "torchtitan", "deepspeed"), "course"), "engines": "megatron"}
# Neutral values of rates that a profile lacks: 0 for addends, 1 for factors.
_ADDED = "casts", "rows", "routes", "deal"
_WITHOUT = {
    name: 0.0 if name in _ADDED else 1.0
    for name, (_, values) in _GUESSES.items()
    if "course" not in values
}
_MEASURED = "torchtitan", "fsdp2"  # profiles whose steps were measured with today's engines
_NOT_OF_THEM = (
    "launch", "crossing",  # Megatron's values: it launches less
    "limit", "retries", "kept", "fragments", "logit", "late", "settled", "gathered", "fixed",
)  # fmt: skip
PUBLISHED = Path(__file__).parent / "published"
GUESS = "a guess: what jobs commonly reach"
LIMIT = "seen: H100s go on with 73.3 of 79.1 GiB reserved, pytorch/torchtitan#1789"


def guesses(profile: str) -> Rates:
    """Return the guessed rates, from which a fit begins."""
    likes, rates = (profile, _LIKE.get(profile), "course"), {}
    for name, (unit, values) in _GUESSES.items():
        if found := next((values[like] for like in likes if like in values), None):
            origin = LIMIT if name == "limit" and profile != "nanotron" else GUESS
            rates[name] = Rate(found[0], unit, found[1], origin)
    return Rates(profile, rates)


def known(profile: str) -> Rates:
    """Return the best known rates: fitted on published runs (`strategy fit`), or guesses."""
    path = PUBLISHED / f"rates_{profile}.json"
    if path.exists():
        return read(path)
    rates = guesses(profile)
    if profile not in _MEASURED:
        return rates
    found = read(PUBLISHED / "rates_engines.json").all
    return Rates(profile, rates.all | {n: r for n, r in found.items() if n not in _NOT_OF_THEM})


def today(rates: Rates) -> Rates:
    """Return `rates` adjusted to current training setups, if they were fitted on older runs.

    Megatron overlaps gradient reduction with backward (--overlap-grad-reduce, Core 0.19.2), and has
    no
    dropout: two of the 10 bytes of Korthikanti et al. 2022 (Table 2) are its masks.
    """
    if rates.profile != "megatron":
        return rates
    hides = "a guess: with --overlap-grad-reduce, as what jobs commonly reach"
    exposed = replace(rates.all["exposed"], value=0.25, spread=0.5, origin=hides)
    kept = replace(rates.all["kept"], value=8.0, origin="counted: without dropout's masks")
    return replace(rates, all={**rates.all, "exposed": exposed, "kept": kept})


def read(path: Path) -> Rates:
    """Read rates that `Rates.write` wrote. Raises ValueError, which names the fault in the file."""
    given = read_json("rates", path)
    try:
        profile, listed = given["profile"], given["rates"]
        rates = {n: Rate(float(r["value"]), str(r["unit"]), float(r["spread"]), str(r["origin"]))
                 for n, r in listed.items()}  # fmt: skip
        missing = [name for name in guesses(profile) if name not in rates]
        machine = Machine(**given["machine"]) if "machine" in given else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(
            f"rates={str(path)!r}: allowed are files that `strategy fit` wrote"
        ) from None
    bad = [n for n, r in rates.items() if not 1e-9 <= r.value <= 1e9 or not 0 <= r.spread <= 1e9]
    for name in missing + bad:
        allowed = f"files with a {name!r} from 1e-9 to 1e9, and its spread from 0"
        raise ValueError(f"rates={str(path)!r}: allowed are {allowed}")
    return Rates(profile, rates, machine)
