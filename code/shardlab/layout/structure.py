"""The structure of a model as far as a planner or a count needs it: kinds of layers, and the ends.

`Structure` is made from the course's `Config` (`build_structure`), or from the config.json of any
model in `transformers` (`shardtools.hub`). Code that counts, predicts or plans reads a Structure,
and no model's own fields.

Letters: h hidden, V vocabulary, a query heads, K key-value heads, D size of a head, F width of a
network, E experts, k chosen, s tokens of a sequence. Imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from shardlab.common.arguments import shorten_repr
from shardlab.common.shapes import Config

from .parameters import KV_HEADS, ParamInfo, list_layer_params, list_outer_params


@dataclass(frozen=True)
class AttentionCore:
    """The attention core of a layer: queries times keys, and their softmax times values."""

    heads: int  # [a]
    kv_heads: int  # [K]
    head_size: int  # size of a head of queries and keys
    value_size: int  # size of a head of values
    window: int | None = None  # most tokens that a query sees, its own included; None: all
    chunk: int | None = None  # a query sees only the tokens of its own chunk
    top_k: int | None = None  # number of keys chosen per query, of all before it (sparse attention)
    indexer_width: int = 0  # numbers per query that are compared with each key's, for the choice

    def count_keys(self, seq: int) -> float:
        """Return the mean number of keys that a query sees in `seq` tokens, its own included."""
        if self.chunk and self.chunk < seq:
            whole, rest = divmod(seq, self.chunk)
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / seq
        w = min(seq, self.window or seq, self.top_k or seq)
        return w - w * (w - 1) / (2 * seq)

    def count_kv_elements(self, tp: int = 1) -> float:
        """Return the key and value elements per token on one of `tp` ranks: at least one head's."""
        return (self.head_size + self.value_size) * max(1.0, self.kv_heads / tp)

    def count_flops(self, seq: int, causal: bool = True) -> float:
        """Return the FLOP of a token's forward pass; causal: without the pairs that are masked."""
        whole = (seq + 1) / 2 if causal else seq
        keys = self.count_keys(seq) if causal else seq
        return (
            2 * self.heads * (self.head_size + self.value_size) * keys
            + 2 * self.indexer_width * whole
        )


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of a layer: a token passes `top_k` of `num_experts` experts."""

    num_experts: int  # [E]
    top_k: int  # [k]
    width: int  # of one expert
    input_width: int  # numbers per token that an expert reads and returns: h, or a latent width


@dataclass(frozen=True)
class MatrixProduct:
    """A product of a token with a matrix, or with several that read the same input."""

    outputs: int
    inputs: int
    tp_dim: int | None  # the dimension that a tensor degree divides, 0 or 1; None: neither
    is_expert: bool  # of an expert, where one stands for all


@dataclass(frozen=True, eq=False)
class LayerKind:
    """A kind of layer. Element counts are per token."""

    name: str
    # The layer's parameters, with one expert (expert=0) that stands for all.
    parameters: tuple[ParamInfo, ...]
    core: AttentionCore | None  # None: no attention core, as in a state space layer
    ffn_width: int  # of the networks that see every token; 0: none
    gated: bool  # networks have three matrices instead of two
    routed: RoutedExperts | None = None
    # Elements kept for backward, in 16 bits, by fused kernels:
    stream_elements: int = 0  # as wide as the residual stream: inputs and outputs of norms
    latent_elements: int = 0  # others that no tensor rank cuts
    head_elements: int = 0  # cut with the heads: queries, keys, values, the core's output
    extra_flops: float = 0.0  # FLOP of a token's forward pass beyond matrices and core

    @cached_property
    def num_params(self) -> int:
        """The layer's parameters, with all experts."""
        return self.count_params(self.routed.num_experts if self.routed else 0)

    def count_params(self, experts: int | None = None) -> int:
        """Return the parameters used per token with `experts` experts; None: the chosen ones."""
        times = (self.routed.top_k if self.routed else 0) if experts is None else experts
        some = [e for e in self.parameters if experts is not None or not e.is_lookup]
        return sum(e.count_elements() * (1 if e.expert is None else times) for e in some)

    def count_head_elements(self, tp: int, recomputed: frozenset[str]) -> float:
        """Return the head elements on one of `tp` ranks, each of which has keys and values.

        recomputed: operators of `Layout.recompute`; "latents": no tensor made of latents is kept.
        """
        core, all_heads = self.core, self.head_elements
        if core and self.latent_elements and "latents" in recomputed:
            return (all_heads - core.heads * core.head_size - core.count_kv_elements()) / tp
        copied = core.count_kv_elements(tp) - core.count_kv_elements() / tp if core else 0.0
        return all_heads / tp + copied

    @property
    def active_width(self) -> int:
        """The width of all networks that a token passes."""
        return self.ffn_width + (self.routed.top_k * self.routed.width if self.routed else 0)

    @cached_property
    def matrix_products(self) -> tuple[MatrixProduct, ...]:
        """The layer's matrix products; adjacent ones with the same input (q, k, v) are one."""

        def get_input_key(e: ParamInfo) -> tuple[object, ...]:
            own = () if e.tp_dim == 1 else (e.shape[1],)  # row-parallel: reads its own input
            return e.kind, e.tp_dim, e.expert, own or e.name

        matrices = [e for e in self.parameters if len(e.shape) == 2 and not e.is_lookup]
        found = []
        for _, some in groupby(matrices, get_input_key):
            first, *others = some
            rows = sum(entry.shape[0] for entry in (first, *others))
            found.append(
                MatrixProduct(rows, first.shape[1], first.tp_dim, first.expert is not None)
            )
        return tuple(found)

    @cached_property
    def expert_bias_width(self) -> int:
        """The outputs of an expert's first product if it has biases; 0 if not."""
        biases = any(e.expert is not None and len(e.shape) == 1 for e in self.parameters)
        return next(one.outputs for one in self.matrix_products if one.is_expert) if biases else 0

    @cached_property
    def up_projections(self) -> tuple[MatrixProduct, ...]:
        """The products that make queries, keys and values from latents."""
        if self.core is None or not self.latent_elements:
            return ()
        matrices = [e for e in self.parameters if e.kind == "attention" and len(e.shape) == 2]
        return tuple(MatrixProduct(*e.shape, 0, False) for e in matrices if e.tp_dim == 0)


@dataclass(frozen=True, eq=False)
class Structure:
    """A model: its kinds of layers, the kind of each layer, and the parameters outside."""

    hidden: int  # [h]
    vocab: int  # [V]
    seq: int  # longest sequence, in tokens
    kinds: tuple[LayerKind, ...]
    layer_kinds: tuple[int, ...]  # the kind of each layer, first to last
    outer_params: tuple[ParamInfo, ...]  # embedding first, norm and head last
    tied: bool  # the output layer is the embedding, transposed
    model_type: str = "gpt"  # the name in transformers
    assumptions: tuple[str, ...] = ()  # assumptions where a file is incomplete, in words
    unsupported_reason: str = ""  # why time and memory are not predicted; "": they are
    course_config: Config | None = None  # of the course's equal model; None: there is none

    @property
    def layers(self) -> int:
        """[L] The number of layers."""
        return len(self.layer_kinds)

    @property
    def experts(self) -> int:
        """[E] The experts of the layer with the most; 0: no experts."""
        return max((kind.routed.num_experts for kind in self.kinds if kind.routed), default=0)

    @cached_property
    def num_params(self) -> int:
        """The number of parameters; tied ones count once."""
        return self._count_outer_params() + sum(self.kinds[k].num_params for k in self.layer_kinds)

    @cached_property
    def num_active_params(self) -> int:
        """The number of parameters that one token uses: of all experts the chosen ones."""
        tables = sum(entry.count_elements() for entry in self.outer_params if entry.is_lookup)
        layers = sum(self.kinds[k].count_params() for k in self.layer_kinds)
        return self._count_outer_params() - tables + layers

    def _count_outer_params(self) -> int:
        return sum(entry.count_elements() for entry in self.outer_params if entry.tied_to is None)

    @cached_property
    def largest_kind(self) -> LayerKind:
        """The kind of layer with the most parameters."""
        return max(self.kinds, key=lambda kind: kind.num_params)

    @cached_property
    def _kind_counts(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, and the end, the number of earlier layers of each kind."""
        found = [(0,) * len(self.kinds)]
        for kind in self.layer_kinds:
            found.append(tuple(n + (k == kind) for k, n in enumerate(found[-1])))
        return tuple(found)

    @lru_cache(maxsize=4096)  # noqa: B019  which keeps a process's few structures
    def count_kinds(self, chunks: tuple[range, ...]) -> tuple[int, ...]:
        """Return the number of layers of each kind in these chunks."""
        ends = [(self._kind_counts[chunk.start], self._kind_counts[chunk.stop]) for chunk in chunks]
        return tuple(sum(end[k] - start[k] for start, end in ends) for k in range(len(self.kinds)))


def get_structure(config: Config | Structure) -> Structure:
    """Return the structure of a Config; a Structure is returned as it is."""
    return build_structure(config) if isinstance(config, Config) else config


@lru_cache(maxsize=256)
def build_structure(config: Config) -> Structure:
    """Return the structure of GPT(config)."""
    found: dict[tuple[bool, int | None], int] = {}
    order = []
    for layer in range(config.layers):
        sparse = config.experts > 0 and layer >= config.dense_layers
        order.append(found.setdefault((sparse, config.get_window(layer)), len(found)))
    kinds = tuple(_build_kind(config, *what) for what in found)
    ends = config.hidden, config.vocab, config.seq
    return Structure(
        *ends, kinds, tuple(order), list_outer_params(config), config.tied, course_config=config
    )


def _build_kind(c: Config, sparse: bool, window: int | None) -> LayerKind:
    a, k, size = c.heads, c.key_value_heads, c.head_size
    core, latent = AttentionCore(a, k, size, c.value_size, window), 0
    heads = (3 if c.qk_norm else 2) * (a + k) * size
    if c.latent is not None:  # each latent, and its normalised copy
        latent, heads = 2 * (c.latent + (c.query_latent or 0)), 2 * a * (size + c.value_size)
    routed, width = None, c.ffn_width
    if sparse:
        routed = RoutedExperts(c.experts, c.experts_per_token, c.expert_width, c.hidden)
        width = c.shared_experts * c.expert_width
    name = ("experts" if sparse else "dense") + (", window" if window else "")
    return LayerKind(
        name, list_layer_params(c, sparse), core, width, c.mlp == "swiglu", routed,
        stream_elements=4 * c.hidden, latent_elements=latent, head_elements=heads,
    )  # fmt: skip


def require_course_config(config: Config | Structure, **option: object) -> Config:
    """Return the Config of the course's equal model. Raises ValueError if there is none.

    option: the option that needs the Config, such as emit="megatron".
    """
    found = get_structure(config)
    if found.course_config is None:
        words = ", ".join(f"{name}={shorten_repr(value)}" for name, value in option.items())
        needed = f"must have the structure of the course's GPT, unlike {found.model_type}"
        raise ValueError(f"{words}: the model {needed}")
    return found.course_config


# Degrees that a model allows.


def get_tp_sizes(config: Config | Structure) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides in the layers, by name."""
    entries = [entry for kind in get_structure(config).kinds for entry in kind.parameters]
    return {entry.size_name: entry.units for entry in entries if entry.size_name and entry.units}


def check_tensor_degree(config: Config | Structure, tp: int, copies: bool = False) -> None:
    """Raise ValueError unless `tp` ranks can cut each layer of `config`.

    copies: several ranks may hold the same key-value head, as in `tensor_parallel`.
    """
    for name, size in get_tp_sizes(config).items():
        may = copies and name == KV_HEADS
        if size % tp and not (may and tp % size == 0):
            multiple = " or be a multiple of it" if may else ""
            raise ValueError(f"tp={tp}: must divide {name}={size}{multiple}")


def check_expert_degree(config: Config | Structure, ep: int) -> None:
    """Raise ValueError unless `ep` ranks can share the experts of `config`."""
    experts = get_structure(config).experts
    if ep > 1 and not experts:
        raise ValueError(f"ep={ep}: must be 1 for a model without experts")
    if ep > 1 and experts % ep:
        raise ValueError(f"ep={ep}: must divide experts={experts}")
