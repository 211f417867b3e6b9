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


class RateValues:
    """Values of the rates, as attributes for formulas: one for each of `_GUESSES`."""

    def __init__(self, **values: float) -> None:
        self.__dict__ = {**_NEUTRAL_VALUES, **values}


@dataclass(frozen=True)
class Rates(Mapping[str, float]):
    """The rates of one profile by name; `rates["launch"]` is a value without its origin."""

    profile: str
    by_name: dict[str, Rate]
    machine: Machine | None = None  # the machine on which they were measured, if known

    def __getitem__(self, name: str) -> float:
        return self.by_name[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def to_values(self) -> RateValues:
        """Return the values, as attributes."""
        return RateValues(**self)

    def write_json(self, path: Path) -> None:
        """Write the rates to a file."""
        listed = {name: vars(rate) for name, rate in self.by_name.items()}
        given: dict[str, Any] = {"profile": self.profile, "rates": listed}
        if self.machine:
            given["machine"] = vars(self.machine)
        text = json.dumps(given, indent=1)
        path.write_text(text + "\n", "utf-8")


# Each rate's meaning, and guesses by profile: value and spread. A profile without a guess takes
# that of `_FALLBACK_PROFILES`, or else the course's. First rates of time, then of
# memory, then rates of today's engines alone.
# fmt: off
_GUESSES = {
    "products": ("share of the data sheet's operations that matrix products reach",
        {"course": (0.6, 0.2), "megatron": (0.77, 0.04), "nanotron": (0.5, 0.3),
         "engines": (0.72, 0.2)}),
    "attention": ("share of the data sheet's operations that fused attention reaches",
        {"course": (0.4, 0.3), "megatron": (0.45, 0.3), "engines": (0.4, 0.3)}),
    "memory": ("share of the data sheet's memory bandwidth", {"course": (0.75, 0.1)}),
    "elementwise": ("bytes per token and unit of width that a layer's forward pass moves",
        {"course": (20.0, 0.3), "megatron": (20.0, 0.2), "nanotron": (30.0, 0.5),
         "engines": (40.0, 0.5)}),
    "scores": ("passes over plain attention's scores in a layer's forward pass",
        {"course": (6.0, 0.3)}),
    "launch": ("seconds in which a CPU launches a layer, forward and backward",
        {"course": (0.002, 0.5), "megatron": (0.001, 0.5), "nanotron": (0.0036, 0.3),
         "engines": (0.0006, 0.7)}),
    "crossing": ("extra launch seconds per further tensor rank if a pipeline crosses nodes",
        {"course": (1e-06, 0.1), "nanotron": (0.0022, 0.4)}),
    "node": ("share of the data sheet's rate between the GPUs of a node",
        {"course": (0.6, 0.2), "nanotron": (0.7, 0.3), "engines": (0.75, 0.25)}),
    "overlapped_collectives": ("share of hideable tensor collectives in backward that is hidden",
        {"course": (0.2, 0.3), "megatron": (0.85, 0.15), "nanotron": (0.5, 0.3),
         "engines": (0.65, 0.3)}),
    "extra_node": ("extra seconds of a layer for each further node of a tensor group",
        {"course": (0.004, 0.5), "nanotron": (0.004, 0.4)}),
    "network": ("share of the network cards' rate",
        {"course": (0.6, 0.3), "megatron": (0.6, 0.2), "nanotron": (0.6, 0.4)}),
    "message_latency": ("latency of a message between stages in seconds",
        {"course": (0.0001, 0.5), "megatron": (3e-05, 0.7), "nanotron": (0.0004, 0.5)}),
    "exposed_reduce": ("share of gradient all-reduces that backward does not hide",
        {"course": (0.25, 0.5), "megatron": (1.0, 0.1), "nanotron": (0.5, 0.3),
         "engines": (0.3, 0.5)}),
    "exposed_gathers": ("least share of ZeRO-2 and ZeRO-3 traffic that compute does not hide",
        {"course": (0.2, 0.5)}),
    # NCCL itself assumes 14 µs: hwLat in its src/graph/tuning.cc, for a ring over the network.
    # nanotron gathers the weights of a layer one by one.
    "gather_latency": ("seconds per further node of a layer's gather or reduction under ZeRO",
        {"course": (1.4e-05, 0.5), "nanotron": (0.0001, 0.5)}),
    "expert_imbalance": ("rows of the fullest expert-parallel rank over the mean",
        {"course": (1.15, 0.15), "engines": (1.0, 0.05)}),
    "step": ("seconds of a step that no other part counts",
        {"course": (0.01, 1.0), "nanotron": (0.05, 1.0)}),
    # At 96 % nodes sometimes fail (see the issue in LIMIT_ORIGIN): NCCL and CUDA need the rest.
    # nanotron, early in 2025, retried from some 71.5 GiB on.
    "limit": ("share of a GPU's memory beyond which the allocator retries",
        {"course": (0.927, 0.02), "nanotron": (0.9042, 0.02)}),
    "retries": ("factor of the step time if the allocator retries",
        {"course": (1.0, 0.5), "nanotron": (7.0, 0.5)}),
    # Rates of memory.
    "saved_bytes": ("bytes per token and unit of width that a layer saves outside of cut matrices",
        {"course": (8.0, 0.1), "megatron": (10.0, 0.1), "nanotron": (12.0, 0.15)}),
    "fragments": ("reserved over allocated bytes of activations",
        {"course": (1.05, 0.05), "nanotron": (1.08, 0.05)}),
    "logit_bytes": ("bytes per logit, saved and for computing the loss",
        {"course": (12.0, 0.15), "megatron": (10.0, 0.15), "nanotron": (11.0, 0.15)}),
    "late_buffers": ("uncut residual streams in late-freed buffers of tensor collectives",
        {"course": (4.0, 0.5), "nanotron": (45.0, 0.3)}),
    "settling_microbatches": ("micro-batches after which two thirds of these buffers exist",
        {"course": (4.0, 0.7)}),
    "gather_buffers": ("extra bytes of ZeRO-1's gather over a rank's weight bytes",
        {"course": (0.1, 0.5), "nanotron": (1.0, 0.5)}),
    # DeepSpeed's buckets: 5e8 gradients of 2 B, twice if communication overlaps.
    "overhead": ("GiB reserved independently of the layout",
        {"course": (0.3, 0.7), "megatron": (0.5, 0.7), "deepspeed": (2.2, 0.3)}),
    # Rates of today's engines; other profiles take `_NEUTRAL_VALUES`.
    "fp8": ("factor of the products' share in 8 bits", {"engines": (1.0, 0.2)}),
    "mxfp8": ("the same with a scale per block", {"engines": (1.0, 0.2)}),
    "nvfp4": ("the same in 4 bits", {"engines": (0.7, 0.3)}),
    "fp4_gpus": ("factor of the products' share on GPUs with 4-bit products",
        {"engines": (0.9, 0.15)}),
    "pre_fp8_gpus": ("factor of the products' share on GPUs without 8-bit products",
        {"engines": (1.1, 0.15)}),
    "narrow_heads": ("factor of attention's share with head sizes of 64 or less",
        {"engines": (0.6, 0.3)}),
    "mlp_passes": ("factor of the memory passes inside feed-forward networks",
        {"engines": (1.5, 0.5)}),
    "cast_passes": ("memory passes over products' inputs and outputs for casts",
        {"engines": (1.5, 0.7)}),
    "scan": ("seconds per operation in state spaces over those in attention",
        {"engines": (50.0, 1.0)}),
    "grouped_matmul": ("factor of the products' share for experts", {"engines": (0.6, 0.3)}),
    "half_rate_rows": ("rows at which an expert's product reaches half of its rate",
        {"engines": (300.0, 1.0)}),
    "permute_passes": ("memory passes that permute experts' inputs and outputs",
        {"engines": (8.0, 0.7)}),
    "expert_launch": ("extra seconds in which a CPU launches a layer with experts",
        {"engines": (0.004, 1.0)}),
    "exposed_all_to_all": ("share of all-to-all traffic between nodes that nothing hides",
        {"engines": (0.8, 0.3)}),
    "eager": ("factor of element-wise time without compilation", {"engines": (1.4, 0.2)}),
    "torchtitan": ("step time over Megatron's", {"engines": (1.2, 0.15)}),
    "automodel": ("step time over Megatron's", {"engines": (1.1, 0.2)}),
    "fsdp": ("step time over Megatron's", {"engines": (1.2, 0.15)}),
}
# fmt: on
_FALLBACK_PROFILES = {"engines": "megatron"}  # others: the course's
# Neutral values of rates that a profile lacks: 0 for addends, 1 for factors.
_ADDENDS = "cast_passes", "half_rate_rows", "permute_passes", "expert_launch"
_NEUTRAL_VALUES = {
    name: 0.0 if name in _ADDENDS else 1.0
    for name, (_, values) in _GUESSES.items()
    if "course" not in values
}
_FITTED_PROFILES = "torchtitan", "fsdp2"  # profiles whose steps were measured with today's engines
_GUESSED_RATES = (
    "launch", "crossing",  # Megatron's values: it launches less
    "limit", "retries", "saved_bytes", "fragments", "logit_bytes", "late_buffers",
    "settling_microbatches", "gather_buffers", "overhead",
)  # fmt: skip
DATA_DIR = Path(__file__).parent / "published"
GUESS_ORIGIN = "a guess: a commonly reached value"
LIMIT_ORIGIN = "measured: H100s ran with 73.3 of 79.1 GiB reserved, pytorch/torchtitan#1789"


def guess_rates(profile: str) -> Rates:
    """Return the guessed rates, from which a fit begins."""
    profiles, rates = (profile, _FALLBACK_PROFILES.get(profile), "course"), {}
    for name, (unit, values) in _GUESSES.items():
        if guess := next((values[like] for like in profiles if like in values), None):
            origin = LIMIT_ORIGIN if name == "limit" and profile != "nanotron" else GUESS_ORIGIN
            rates[name] = Rate(guess[0], unit, guess[1], origin)
    return Rates(profile, rates)


def load_rates(profile: str) -> Rates:
    """Return the best known rates: fitted on published runs (`strategy fit`), or guesses."""
    path = DATA_DIR / f"rates_{profile}.json"
    if path.exists():
        return read_rates(path)
    rates = guess_rates(profile)
    if profile not in _FITTED_PROFILES:
        return rates
    engines = read_rates(DATA_DIR / "rates_engines.json").by_name
    fitted = {name: rate for name, rate in engines.items() if name not in _GUESSED_RATES}
    return Rates(profile, rates.by_name | fitted)


def modernize_rates(rates: Rates) -> Rates:
    """Return `rates` adjusted to current training setups, if they were fitted on older runs.

    Megatron overlaps gradient reduction with backward (--overlap-grad-reduce, Core 0.19.2), and
    trains without dropout: two of the 10 bytes of Korthikanti et al. 2022 (Table 2) are its masks.
    """
    if rates.profile != "megatron":
        return rates
    old = rates.by_name
    origin = "a guess for --overlap-grad-reduce: a commonly reached value"
    reduce = replace(old["exposed_reduce"], value=0.25, spread=0.5, origin=origin)
    origin = "counted: no masks without dropout"
    saved = replace(old["saved_bytes"], value=8.0, origin=origin)
    return replace(rates, by_name=old | {"exposed_reduce": reduce, "saved_bytes": saved})


def read_rates(path: Path) -> Rates:
    """Read rates that `Rates.write_json` wrote. Raises ValueError for other files."""
    given = read_json("rates", path)
    try:
        profile, listed = given["profile"], given["rates"]
        rates = {n: Rate(float(r["value"]), str(r["unit"]), float(r["spread"]), str(r["origin"]))
                 for n, r in listed.items()}  # fmt: skip
        missing = [name for name in guess_rates(profile) if name not in rates]
        machine = Machine(**given["machine"]) if "machine" in given else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        words = f"rates={str(path)!r}: must be a file that `strategy fit` wrote"
        raise ValueError(words) from None
    bad = [n for n, r in rates.items() if not 1e-9 <= r.value <= 1e9 or not 0 <= r.spread <= 1e9]
    for name in missing + bad:
        words = f"must have a rate {name!r} from 1e-9 to 1e9, with a spread of 0 or more"
        raise ValueError(f"rates={str(path)!r}: {words}")
    return Rates(profile, rates, machine)
