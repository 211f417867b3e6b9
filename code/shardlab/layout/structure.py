"""What a model is made of, as far as a planner or a count has to know: kinds of layers, and ends.

`Structure` is made from the course's own `Config` (`of_config`), or of any model of `transformers`
from its config.json (`shardtools.hub`). Who counts, predicts or plans reads it, and no model's own
fields.

Letters: h hidden, V vocabulary, a query heads, K key-value heads, D size of a head, F width of a
network, E experts, k chosen, s tokens of a sequence. The standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from shardlab.common.arguments import told
from shardlab.common.shapes import Config

from .entries import COPIED, Entry, of_kind, outside


@dataclass(frozen=True)
class Core:
    """What mixes the tokens of a sequence: queries times keys, and their softmax times values."""

    heads: int  # [a]
    kv_heads: int  # [K]
    query: int  # size of a head of queries, and of keys
    value: int  # size of a head of values
    window: int | None = None  # tokens that a query sees at most, itself among them; None: all
    chunk: int | None = None  # a query sees those of its own chunk alone
    top: int | None = None  # so many are chosen for it, of all before it (sparse attention)
    scores: int = 0  # numbers of a query that are compared with those of every key, to choose them

    def keys(self, seq: int) -> float:
        """Keys that a query sees, in the mean over a sequence of `seq` tokens; its own is one."""
        if self.chunk and self.chunk < seq:
            whole, rest = divmod(seq, self.chunk)
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / seq
        w = min(seq, self.window or seq, self.top or seq)
        return w - w * (w - 1) / (2 * seq)

    def pairs(self, tp: int = 1) -> float:
        """Numbers of a token's keys and values on one of `tp` ranks, which has a head at least."""
        return (self.query + self.value) * max(1.0, self.kv_heads / tp)

    def flops(self, seq: int, causal: bool = True) -> float:
        """Operations of a token's forward pass; causal: without the pairs that the mask hides."""
        whole = (seq + 1) / 2 if causal else seq
        mixed = 2 * self.heads * (self.query + self.value) * (self.keys(seq) if causal else seq)
        return mixed + 2 * self.scores * whole


@dataclass(frozen=True)
class Routed:
    """The experts of a layer: a token goes through `chosen` of `number`."""

    number: int  # [E]
    chosen: int  # [k]
    width: int  # of one
    inputs: int  # numbers of a token that an expert gets, and gives: h, or a latent width


@dataclass(frozen=True)
class Product:
    """A matrix, or several that read the same numbers, times a token."""

    outputs: int
    inputs: int
    tp: int | None  # which of the two a tensor degree divides, 0 or 1; None: neither
    expert: bool  # one of an expert that stands for all


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of layer. Elements are those of a token."""

    name: str
    # Its parameters, with one expert (expert=0) that stands for all.
    entries: tuple[Entry, ...]
    core: Core | None  # None: nothing of the kind, as in a state space
    width: int  # of the network, or networks, that see every token; 0: there is none
    gated: bool  # networks have three matrices, and two otherwise
    routed: Routed | None = None
    # Elements kept for backward, in 16 bits, by fused kernels:
    stream: int = 0  # as wide as the residual stream: inputs and outputs of norms
    latent: int = 0  # others that no tensor rank cuts
    heads: int = 0  # that go with the heads: queries, keys, values, what the core gives
    scans: float = 0.0  # operations of a token's forward pass, beside matrices and core

    @cached_property
    def parameters(self) -> int:
        """Of the layer, with all its experts."""
        return self.met(self.routed.number if self.routed else 0)

    def met(self, experts: int | None = None) -> int:
        """Parameters that a token meets, in so many experts; None: in those it chooses."""
        times = (self.routed.chosen if self.routed else 0) if experts is None else experts
        some = [e for e in self.entries if experts is not None or not e.table]
        return sum(e.elements() * (1 if e.expert is None else times) for e in some)

    def heads_on(self, tp: int, again: frozenset[str]) -> float:
        """Of the `heads` elements those on one of `tp` ranks, each of which has keys and values.

        again: operators of `Layout.recompute`; with "latents" what is made of these is not kept.
        """
        if self.core and self.latent and "latents" in again:
            return (self.heads - self.core.heads * self.core.query - self.core.pairs()) / tp
        copied = self.core.pairs(tp) - self.core.pairs() / tp if self.core else 0.0
        return self.heads / tp + copied

    @property
    def wide(self) -> int:
        """Width of all networks that a token goes through."""
        return self.width + (self.routed.chosen * self.routed.width if self.routed else 0)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Of its matrices: neighbours that read the same numbers, as queries and keys, are one."""

        def alike(e: Entry) -> tuple[object, ...]:
            own = () if e.tp == 1 else (e.shape[1],)  # what is cut along reads numbers of its own
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
        """Numbers that an expert's first product gives, where it has biases; 0: it has none."""
        biases = any(e.expert is not None and len(e.shape) == 1 for e in self.entries)
        return next(one.outputs for one in self.products if one.expert) if biases else 0

    @cached_property
    def raised(self) -> tuple[Product, ...]:
        """Of its matrices those that make queries, keys and values, where there are latents."""
        if self.core is None or not self.latent:
            return ()
        matrices = [e for e in self.entries if e.kind == "attention" and len(e.shape) == 2]
        return tuple(Product(*e.shape, 0, False) for e in matrices if e.tp == 0)


@dataclass(frozen=True, eq=False)
class Structure:
    """Kinds of layers, which of them each layer is, and what stands outside."""

    hidden: int  # [h]
    vocab: int  # [V]
    seq: int  # longest sequence, in tokens
    kinds: tuple[Kind, ...]
    order: tuple[int, ...]  # the kind of each layer, first to last
    outside: tuple[Entry, ...]  # embedding first, norm and head last
    tied: bool  # the output layer is the embedding, transposed
    model_type: str = "gpt"  # transformers' word, for a model of it
    assumed: tuple[str, ...] = ()  # what a file left open, in words
    unplanned: str = ""  # why its time and memory are not predicted; "": they are
    own: Config | None = None  # of what shape the course's own model is the same; None: of none

    @property
    def layers(self) -> int:
        """[L] how many."""
        return len(self.order)

    @property
    def experts(self) -> int:
        """[E] of the layer that has most; 0: none has any."""
        return max((kind.routed.number for kind in self.kinds if kind.routed), default=0)

    @cached_property
    def total(self) -> int:
        """Parameters; tied ones count once."""
        return self._ends() + sum(self.kinds[k].parameters for k in self.order)

    @cached_property
    def active(self) -> int:
        """Parameters that one token meets: of all experts those it chooses."""
        tables = sum(entry.elements() for entry in self.outside if entry.table)
        return self._ends() - tables + sum(self.kinds[k].met() for k in self.order)

    def _ends(self) -> int:
        return sum(entry.elements() for entry in self.outside if entry.tied is None)

    @cached_property
    def largest(self) -> Kind:
        """The kind of layer that has most parameters."""
        return max(self.kinds, key=lambda kind: kind.parameters)

    @cached_property
    def _before(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, how many before it are of each kind; and of all."""
        found = [(0,) * len(self.kinds)]
        for kind in self.order:
            found.append(tuple(n + (k == kind) for k, n in enumerate(found[-1])))
        return tuple(found)

    @lru_cache(maxsize=4096)  # noqa: B019  which keeps a process's few structures
    def counted(self, chunks: tuple[range, ...]) -> tuple[int, ...]:
        """How many of the layers of these chunks are of each kind."""
        ends = [(self._before[chunk.start], self._before[chunk.stop]) for chunk in chunks]
        return tuple(sum(end[k] - start[k] for start, end in ends) for k in range(len(self.kinds)))


def structure(config: Config | Structure) -> Structure:
    """Of a shape of the course's own model, or what is one already."""
    return of_config(config) if isinstance(config, Config) else config


@lru_cache(maxsize=256)
def of_config(config: Config) -> Structure:
    """The structure of GPT(config)."""
    found: dict[tuple[bool, int | None], int] = {}
    order = []
    for layer in range(config.layers):
        sparse = config.experts > 0 and layer >= config.dense_layers
        order.append(found.setdefault((sparse, config.window_of(layer)), len(found)))
    kinds = tuple(_kind(config, *what) for what in found)
    ends = config.hidden, config.vocab, config.seq
    return Structure(*ends, kinds, tuple(order), outside(config), config.tied, own=config)


def _kind(c: Config, sparse: bool, window: int | None) -> Kind:
    a, k, size = c.heads, c.key_value_heads, c.head_size
    core, latent = Core(a, k, size, c.value_size, window), 0
    heads = (3 if c.qk_norm else 2) * (a + k) * size
    if c.latent is not None:  # each latent, and what its norm makes of it
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
    """The shape of the course's own model that is the same. Raises ValueError where none is.

    asked: what it is needed for, as emit="megatron".
    """
    found = structure(config)
    if found.own is None:
        words = ", ".join(f"{name}={told(value)}" for name, value in asked.items())
        allowed = f"models that the course's own GPT can be, which no {found.model_type} is"
        raise ValueError(f"{words}: allowed are {allowed}")
    return found.own


# Which degrees a model takes.


def cut_sizes(config: Config | Structure) -> dict[str, int]:
    """What tensor parallelism cuts in the layers, by name, and how many of it there are."""
    entries = [entry for kind in structure(config).kinds for entry in kind.entries]
    return {entry.along: entry.units for entry in entries if entry.along and entry.units}


def check_tensor_degree(config: Config | Structure, tp: int, copies: bool = False) -> None:
    """Raise ValueError unless `tp` ranks can cut each layer of `config`.

    copies: several ranks may have the same head of keys and values, as in `tensor_parallel`.
    """
    for name, size in cut_sizes(config).items():
        may = copies and name == COPIED
        if size % tp and not (may and tp % size == 0):
            what = "divisors and multiples" if may else "divisors"
            raise ValueError(f"tp={tp}: allowed are {what} of {name}={size}")


def check_expert_degree(config: Config | Structure, ep: int) -> None:
    """Raise ValueError unless `ep` ranks can deal out the experts of `config`."""
    experts = structure(config).experts
    if ep > 1 and not experts:
        raise ValueError(f"ep={ep}: allowed is 1, for a model without experts")
    if ep > 1 and experts % ep:
        raise ValueError(f"ep={ep}: allowed are divisors of experts={experts}")
