"""What a rank sends, computes and keeps, by formula: equal to what is counted.

Bytes are those of one rank. Of what it hands to an all-to-all, (N - 1)/N goes out.

In formulas: B batch, S tokens in all, s = S/N of one rank, A heads, K heads of keys and values, D
size of a head, e bytes an element.
"""

from __future__ import annotations

from itertools import product

from shardlab.common.arguments import check_one_of

from .core import blocks
from .layout import check_seq, key_repeats

WAYS = "one", "ring", "ulysses"


def score_turns(layout: str, seq: int, ranks: int, causal: bool = True) -> list[list[int]]:
    """For each rank and each turn of the ring: pairs of query and key that it computes.

    In one head of one sequence. Under a causal mask S (S + 1) / 2 in all, and each turn takes as
    long as its slowest rank: contiguous, that is a whole block in all turns; zig-zag, half of one.
    """
    check_seq(seq, ranks, layout)
    found = [[0] * ranks for _ in range(ranks)]
    for rank, turn in product(range(ranks), repeat=2):
        source = (rank - turn) % ranks
        each = blocks(layout, ranks, rank, source, causal, seq // ranks)
        found[rank][turn] = sum(block.pairs for block in each)
    return found


def score_pairs(layout: str, seq: int, ranks: int, rank: int, causal: bool = True) -> int:
    """The same in all turns, for one rank."""
    return sum(score_turns(layout, seq, ranks, causal)[rank])


def ring_sent(
    batch: int, seq: int, kv_heads: int, head_size: int, ranks: int, itemsize: int = 4
) -> dict[str, int]:
    """Bytes that a rank sends for one `ring_attention`, "forward" and "backward", in "messages".

    A share's keys and values are 2 B s K D e bytes. They go N - 1 hops forward and N - 1 backward;
    their gradients, of 4 bytes at least, go N hops, the last one home.
    """
    check_seq(seq, ranks, "contiguous")
    elements = 2 * batch * (seq // ranks) * kv_heads * head_size
    home = ranks if ranks > 1 else 0
    return {
        "forward": (ranks - 1) * elements * itemsize,
        "backward": (ranks - 1) * elements * itemsize + home * elements * max(4, itemsize),
        "messages": 2 * (ranks - 1) + home,
    }


def ulysses_sent(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    ranks: int,
    itemsize: int = 4,
) -> dict[str, int]:
    """Bytes that a rank sends for one `all_to_all_attention`, "forward" and "backward".

    "handed": bytes given to the "calls" all-to-alls of both together, of which it sends (N - 1)/N.
    Queries and results are B s A D e bytes, keys and values B s K D e each, of heads of which there
    are as many as ranks at least.
    """
    check_seq(seq, ranks, "contiguous")
    sent_heads = kv_heads * key_repeats(heads, kv_heads, ranks)
    handed = 2 * batch * (seq // ranks) * (heads + sent_heads) * head_size * itemsize
    if ranks == 1:
        return {"forward": 0, "backward": 0, "calls": 0, "handed": 0}
    once = handed * (ranks - 1) // ranks
    return {"forward": once, "backward": once, "calls": 4, "handed": 2 * handed}


def attention_memory(
    way: str,
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    ranks: int = 1,
    itemsize: int = 4,
) -> dict[str, int]:
    """Bytes on one rank for the core of one attention: "kept" for backward, "forward", "backward".

    way: "one" process with torch's fused kernel on a CPU, "ring" or "ulysses". "kept" is exact:
    queries, keys, values, results, and a number for each query and head, of 4 bytes at least, all
    of it divided by N. All-to-all attention keeps its results twice, by heads and by tokens, and
    keys and values as often as they were sent. Scores are in none of them: no kernel keeps any.

    "forward" and "backward" are the most that there is at one moment, queries, keys and values
    included, on the rank that needs most; the results' own gradient is not. A ring has the keys and
    values of two ranks at once beside its own; backward, the gradients of three. All-to-all
    attention has everything twice while it is on the way; for a moment, gloo's threads may hold
    a message that is over. What the kernel needs for itself is not counted.
    """
    check_one_of(WAYS, way=way)
    ranks = 1 if way == "one" else ranks
    check_seq(seq, ranks, "contiguous")
    wide = max(4, itemsize)
    tokens = batch * (seq // ranks)
    q, kv = tokens * heads * head_size, 2 * tokens * kv_heads * head_size  # elements
    rows = tokens * heads * wide
    inputs = (q + kv) * itemsize
    kept = inputs + q * itemsize + rows
    gradients = (q + kv) * itemsize
    if way == "one" or (ranks == 1 and way == "ring"):
        return {"kept": kept, "forward": kept, "backward": kept + gradients}
    if way == "ring":
        moving = kv * itemsize  # one rank's keys and values
        first = q * itemsize + rows  # a block's results, as they come
        # Beside results that are there already: weighed, and for 16 bits widened before.
        merging = q * (itemsize + wide) + 3 * rows
        if itemsize < wide:
            merging += q * wide - rows
        last = 2 * moving + merging if ranks > 2 else max(2 * moving + first, moving + merging)
        return {
            "kept": kept,
            "forward": inputs + q * wide + rows + last,
            "backward": kept + q * wide + (1 + (ranks > 2)) * moving + 3 * kv * wide + gradients,
        }
    repeats = key_repeats(heads, kv_heads, ranks)
    sent = (q + kv * repeats) * itemsize
    before = inputs + (kv * repeats * itemsize if repeats > 1 else 0)  # and the heads repeated
    q *= itemsize
    kept += sent - inputs + q
    return {
        "kept": kept,
        "forward": before + max(2 * sent, sent + 3 * q + rows),
        "backward": inputs + kept + sent + q,
    }
