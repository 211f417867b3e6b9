"""The structure of a model as far as a planner or a count needs it: kinds of layers, and the ends.

`Structure` is made from the course's `Config` (`of_config`), or from the config.json of any model
in `transformers` (`shardtools.hub`). Code that counts, predicts or plans reads a Structure, and no
model's own fields.

Letters: h hidden, V vocabulary, a query heads, K key-value heads, D size of a head, F width of a
network, E experts, k chosen, s tokens of a sequence. The standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from shardlab.common.arguments import shorten_repr
from shardlab.common.shapes import Config

from .entries import COPIED, Entry, of_kind, outside


@dataclass(frozen=True)
class Core:
    """The attention core of a layer: queries times keys, and their softmax times values."""

    heads: int  # [a]
    kv_heads: int  # [K]
    query: int  # size of a head of queries and keys
    value: int  # size of a head of values
    window: int | None = None  # most tokens that a query sees, its own included; None: all
    chunk: int | None = None  # a query sees only the tokens of its own chunk
    top: int | None = None  # number of keys chosen per query, of all before it (sparse attention)
    scores: int = 0  # numbers per query that are compared with each key's, for the choice

    def keys(self, seq: int) -> float:
        """Return the mean number of keys that a query sees in `seq` tokens, its own included."""
        if self.chunk and self.chunk < seq:
            whole, rest = divmod(seq, self.chunk)
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / seq
        w = min(seq, self.window or seq, self.top or seq)
        return w - w * (w - 1) / (2 * seq)

    def pairs(self, tp: int = 1) -> float:
        """Return the key and value elements per token on one of `tp` ranks: at least one head's."""
        return (self.query + self.value) * max(1.0, self.kv_heads / tp)

    def flops(self, seq: int, causal: bool = True) -> float:
        """Return the FLOP of a token's forward pass; causal: without the pairs that are masked."""
        whole = (seq + 1) / 2 if causal else seq
        mixed = 2 * self.heads * (self.query + self.value) * (self.keys(seq) if causal else seq)
        return mixed + 2 * self.scores * whole


@dataclass(frozen=True)
class Routed:
    """The routed experts of a layer: a token passes `chosen` of `number` experts."""

    number: int  # [E]
    chosen: int  # [k]
    width: int  # of one expert
    inputs: int  # numbers per token that an expert reads and returns: h, or a latent width


@dataclass(frozen=True)
class Product:
    """A product of a token with a matrix, or with several that read the same input."""

    outputs: int
    inputs: int
    tp: int | None  # the dimension that a tensor degree divides, 0 or 1; None: neither
    expert: bool  # of an expert, where one stands for all


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of layer. Element counts are per token."""

    name: str
    # The layer's parameters, with one expert (expert=0) that stands for all.
    entries: tuple[Entry, ...]
    core: Core | None  # None: no attention core, as in a state space layer
    width: int  # of the networks that see every token; 0: none
    gated: bool  # networks have three matrices instead of two
    routed: Routed | None = None
    # Elements kept for backward, in 16 bits, by fused kernels:
    stream: int = 0  # as wide as the residual stream: inputs and outputs of norms
    latent: int = 0  # others that no tensor rank cuts
    heads: int = 0  # cut with the heads: queries, keys, values, the core's output
    scans: float = 0.0  # FLOP of a token's forward pass beyond matrices and core

    @cached_property
    def parameters(self) -> int:
        """The layer's parameters, with all experts."""
        return self.met(self.routed.number if self.routed else 0)

    def met(self, experts: int | None = None) -> int:
        """Return the parameters used per token with `experts` experts; None: the chosen ones."""
        times = (self.routed.chosen if self.routed else 0) if experts is None else experts
        some = [e for e in self.entries if experts is not None or not e.table]
        return sum(e.elements() * (1 if e.expert is None else times) for e in some)

    def heads_on(self, tp: int, again: frozenset[str]) -> float:
        """Return the `heads` elements on one of `tp` ranks, each of which has keys and values.

        again: operators of `Layout.recompute`; "latents": tensors made of latents are not kept.
        """
        if self.core and self.latent and "latents" in again:
            return (self.heads - self.core.heads * self.core.query - self.core.pairs()) / tp
        copied = self.core.pairs(tp) - self.core.pairs() / tp if self.core else 0.0
        return self.heads / tp + copied

    @property
    def wide(self) -> int:
        """The width of all networks that a token passes."""
        return self.width + (self.routed.chosen * self.routed.width if self.routed else 0)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The layer's matrix products; adjacent ones with the same input (q, k, v) are one."""

        def alike(e: Entry) -> tuple[object, ...]:
            own = () if e.tp == 1 else (e.shape[1],)  # row-parallel: reads its own input
            return e.kind, e.tp, e.expert, own or e.name

        matrices = [e for e in self.entries if len(e.shape) == 2 and not e.table]
        found = []
        for _, some in groupby(matrices, alike):
            first, *others = some
            rows = sum(entry.shape[0] for entry in (first, *others))
            found.append(Product(rows, first.shape[1], first.tp, first.expert is not None))
        return tuple(found)

    @cached_property
    def biased(self) -> int:
        """The outputs of an expert's first product if it has biases; 0 if not."""
        biases = any(e.expert is not None and len(e.shape) == 1 for e in self.entries)
        return next(one.outputs for one in self.products if one.expert) if biases else 0

    @cached_property
    def raised(self) -> tuple[Product, ...]:
        """The products that make queries, keys and values from latents."""
        if self.core is None or not self.latent:
            return ()
        matrices = [e for e in self.entries if e.kind == "attention" and len(e.shape) == 2]
        return tuple(Product(*e.shape, 0, False) for e in matrices if e.tp == 0)


@dataclass(frozen=True, eq=False)
class Structure:
    """A model: its kinds of layers, the kind of each layer, and the parameters outside."""

    hidden: int  # [h]
    vocab: int  # [V]
    seq: int  # longest sequence, in tokens
    kinds: tuple[Kind, ...]
    order: tuple[int, ...]  # the kind of each layer, first to last
    outside: tuple[Entry, ...]  # embedding first, norm and head last
    tied: bool  # the output layer is the embedding, transposed
    model_type: str = "gpt"  # the name in transformers
    assumed: tuple[str, ...] = ()  # assumptions where a file is incomplete, in words
    unplanned: str = ""  # why time and memory are not predicted; "": they are
    own: Config | None = None  # the shape of the course's model if it is the same; None if not

    @property
    def layers(self) -> int:
        """[L] The number of layers."""
        return len(self.order)

    @property
    def experts(self) -> int:
        """[E] The experts of the layer with the most; 0: no experts."""
        return max((kind.routed.number for kind in self.kinds if kind.routed), default=0)

    @cached_property
    def total(self) -> int:
        """The number of parameters; tied ones count once."""
        return self._ends() + sum(self.kinds[k].parameters for k in self.order)

    @cached_property
    def active(self) -> int:
        """The parameters that one token uses: of all experts the chosen ones."""
        tables = sum(entry.elements() for entry in self.outside if entry.table)
        return self._ends() - tables + sum(self.kinds[k].met() for k in self.order)

    def _ends(self) -> int:
        return sum(entry.elements() for entry in self.outside if entry.tied is None)

    @cached_property
    def largest(self) -> Kind:
        """The kind of layer with the most parameters."""
        return max(self.kinds, key=lambda kind: kind.parameters)

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, and the end, the number of earlier layers of each kind."""
        found = [(0,) * len(self.kinds)]
        for kind in self.order:
            found.append(tuple(n + (k == kind) for k, n in enumerate(found[-1])))
        return tuple(found)

    @lru_cache(maxsize=4096)  # noqa: B019  which keeps a process's few structures
    def counted(self, chunks: tuple[range, ...]) -> tuple[int, ...]:
        """Return the number of layers of each kind in these chunks."""
        ends = [(self._before[chunk.start], self._before[chunk.stop]) for chunk in chunks]
        return tuple(sum(end[k] - start[k] for start, end in ends) for k in range(len(self.kinds)))


def structure(config: Config | Structure) -> Structure:
    """Return the structure of a Config; a Structure is returned as it is."""
    return of_config(config) if isinstance(config, Config) else config


@lru_cache(maxsize=256)
def of_config(config: Config) -> Structure:
    """Return the structure of GPT(config)."""
    found: dict[tuple[bool, int | None], int] = {}
    order = []
    for layer in range(config.layers):
        sparse = config.experts > 0 and layer >= config.dense_layers
        order.append(found.setdefault((sparse, config.get_window(layer)), len(found)))
    kinds = tuple(_kind(config, *what) for what in found)
    ends = config.hidden, config.vocab, config.seq
    return Structure(*ends, kinds, tuple(order), outside(config), config.tied, own=config)


def _kind(c: Config, sparse: bool, window: int | None) -> Kind:
    a, k, size = c.heads, c.key_value_heads, c.head_size
    core, latent = Core(a, k, size, c.value_size, window), 0
    heads = (3 if c.qk_norm else 2) * (a + k) * size
    if c.latent is not None:  # each latent, and its normalised copy
        latent, heads = 2 * (c.latent + (c.query_latent or 0)), 2 * a * (size + c.value_size)
    routed, width = None, c.ffn_width
    if sparse:
        routed = Routed(c.experts, c.experts_per_token, c.expert_width, c.hidden)
        width = c.shared_experts * c.expert_width
    name = ("experts" if sparse else "dense") + (", window" if window else "")
    return Kind(
        name, of_kind(c, sparse), core, width, c.mlp == "swiglu", routed, stream=4 * c.hidden,
        latent=latent, heads=heads,
    )  # fmt: skip


def own_config(config: Config | Structure, **asked: object) -> Config:
    """Return the Config of the course's equal model. Raises ValueError if there is none.

    asked: the option that needs it, such as emit="megatron".
    """
    found = structure(config)
    if found.own is None:
        words = ", ".join(f"{name}={shorten_repr(value)}" for name, value in asked.items())
        allowed = f"models that the course's own GPT can be, which no {found.model_type} is"
        raise ValueError(f"{words}: allowed are {allowed}")
    return found.own


# Degrees that a model allows.


def cut_sizes(config: Config | Structure) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides in the layers, by name."""
    entries = [entry for kind in structure(config).kinds for entry in kind.entries]
    return {entry.along: entry.units for entry in entries if entry.along and entry.units}


def check_tensor_degree(config: Config | Structure, tp: int, copies: bool = False) -> None:
    """Raise ValueError unless `tp` ranks can cut each layer of `config`.

    copies: several ranks may hold the same key-value head, as in `tensor_parallel`.
    """
    for name, size in cut_sizes(config).items():
        may = copies and name == COPIED
        if size % tp and not (may and tp % size == 0):
            what = "divisors and multiples" if may else "divisors"
            raise ValueError(f"tp={tp}: allowed are {what} of {name}={size}")


def check_expert_degree(config: Config | Structure, ep: int) -> None:
    """Raise ValueError unless `ep` ranks can share the experts of `config`."""
    experts = structure(config).experts
    if ep > 1 and not experts:
        raise ValueError(f"ep={ep}: allowed is 1, for a model without experts")
    if ep > 1 and experts % ep:
        raise ValueError(f"ep={ep}: allowed are divisors of experts={experts}")
