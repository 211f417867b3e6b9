"""Formulas for the bytes a rank sends and keeps, and for its work; they equal the counted values.

Bytes are those of one rank. It sends (N - 1)/N of the tensor that it passes to an all-to-all.

In formulas: B batch, S tokens in all, s = S/N of one rank, A heads, K heads of keys and values, D
size of a head, e bytes an element.
"""

from __future__ import annotations

from itertools import product

from shardlab.common.arguments import check_one_of

from .core import list_blocks
from .layout import check_seq, count_key_repeats

METHODS = "one", "ring", "ulysses"


def count_pairs_by_turn(layout: str, seq: int, ranks: int, causal: bool = True) -> list[list[int]]:
    """Return the query-key pairs that each rank computes in each turn of the ring, [rank][turn].

    Pairs are counted in one head of one sequence, S (S + 1) / 2 in all under a causal mask. A turn
    takes as long as its slowest rank: a whole block if contiguous, half a block if zig-zag.
    """
    check_seq(seq, ranks, layout)
    found = [[0] * ranks for _ in range(ranks)]
    for rank, turn in product(range(ranks), repeat=2):
        source = (rank - turn) % ranks
        each = list_blocks(layout, ranks, rank, source, causal, seq // ranks)
        found[rank][turn] = sum(block.num_pairs for block in each)
    return found


def count_pairs(layout: str, seq: int, ranks: int, rank: int, causal: bool = True) -> int:
    """Return the query-key pairs that one rank computes in all turns: see `count_pairs_by_turn`."""
    return sum(count_pairs_by_turn(layout, seq, ranks, causal)[rank])


def predict_ring_bytes(
    batch: int, seq: int, kv_heads: int, head_size: int, ranks: int, itemsize: int = 4
) -> dict[str, int]:
    """Return a rank's bytes sent in one `ring_attention` ("forward", "backward"), and "messages".

    One rank's keys and values take 2 B s K D e bytes. They travel N - 1 hops in forward and N - 1
    in backward; their gradients, of at least 4 bytes each, N hops, the last to the owner.
    """
    check_seq(seq, ranks, "contiguous")
    elements = 2 * batch * (seq // ranks) * kv_heads * head_size
    home = ranks if ranks > 1 else 0
    return {
        "forward": (ranks - 1) * elements * itemsize,
        "backward": (ranks - 1) * elements * itemsize + home * elements * max(4, itemsize),
        "messages": 2 * (ranks - 1) + home,
    }


def predict_ulysses_bytes(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    ranks: int,
    itemsize: int = 4,
) -> dict[str, int]:
    """Return a rank's bytes sent in one `all_to_all_attention` ("forward", "backward").

    "calls" is the number of all-to-alls in forward and backward, and "handed" the bytes of their
    inputs, of which the rank sends (N - 1)/N. Queries and outputs take B s A D e bytes each, keys
    and values B s K D e each, where heads are repeated until K is at least N.
    """
    check_seq(seq, ranks, "contiguous")
    sent_heads = kv_heads * count_key_repeats(heads, kv_heads, ranks)
    handed = 2 * batch * (seq // ranks) * (heads + sent_heads) * head_size * itemsize
    if ranks == 1:
        return {"forward": 0, "backward": 0, "calls": 0, "handed": 0}
    once = handed * (ranks - 1) // ranks
    return {"forward": once, "backward": once, "calls": 4, "handed": 2 * handed}


def predict_attention_memory(
    method: str,
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    ranks: int = 1,
    itemsize: int = 4,
) -> dict[str, int]:
    """Return one attention's bytes on a rank: "kept" for backward, peak "forward" and "backward".

    method: "one" process with torch's fused kernel on a CPU, "ring" or "ulysses". "kept" is exact:
    queries, keys, values, outputs, and the logarithm for each query and head (at least 4 bytes),
    all divided by N. All-to-all attention keeps its outputs twice, sharded by heads and by tokens,
    and keys and values as often as they were sent. No kernel keeps scores.

    "forward" and "backward" are peaks on the rank that needs most. They include queries, keys and
    values, but not the gradient of the output. Ring attention holds two ranks' keys and values
    beside its own, and in backward also three ranks' gradients of these. All-to-all attention
    holds everything twice while it is sent; gloo's threads may briefly keep a finished message.
    The kernel's workspace is not counted.
    """
    check_one_of(METHODS, method=method)
    ranks = 1 if method == "one" else ranks
    check_seq(seq, ranks, "contiguous")
    wide = max(4, itemsize)
    tokens = batch * (seq // ranks)
    q, kv = tokens * heads * head_size, 2 * tokens * kv_heads * head_size  # elements
    rows = tokens * heads * wide
    inputs = (q + kv) * itemsize
    kept = inputs + q * itemsize + rows
    gradients = (q + kv) * itemsize
    if method == "one" or (ranks == 1 and method == "ring"):
        return {"kept": kept, "forward": kept, "backward": kept + gradients}
    if method == "ring":
        moving = kv * itemsize  # one rank's keys and values
        first = q * itemsize + rows  # the first block's output
        # Temporaries of `merge_attention`: the weighted outputs, and for 16 bits a float32 copy.
        merging = q * (itemsize + wide) + 3 * rows
        if itemsize < wide:
            merging += q * wide - rows
        last = 2 * moving + merging if ranks > 2 else max(2 * moving + first, moving + merging)
        return {
            "kept": kept,
            "forward": inputs + q * wide + rows + last,
            "backward": kept + q * wide + (1 + (ranks > 2)) * moving + 3 * kv * wide + gradients,
        }
    repeats = count_key_repeats(heads, kv_heads, ranks)
    sent = (q + kv * repeats) * itemsize
    before = inputs + (kv * repeats * itemsize if repeats > 1 else 0)  # plus repeated heads
    q *= itemsize
    kept += sent - inputs + q
    return {
        "kept": kept,
        "forward": before + max(2 * sent, sent + 3 * q + rows),
        "backward": inputs + kept + sent + q,
    }
