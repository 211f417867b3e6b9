"""The collectives, built from point-to-point messages, and their costs.

The convention is torch.distributed's: functions return nothing. The result is written into the
argument itself (`broadcast`, `reduce`, `all_reduce`), or into the output, which is the first
argument (`all_gather`, `reduce_scatter`, `all_to_all`). Two differences: `group` is a required
argument, and a root is a rank of that group. Lists hold one tensor per rank of the group, of any
sizes, zero included. Sums are computed in the tensor's dtype and rounded after each addition, as
Gloo and NCCL do; the algorithms differ in the order of their additions.

N is the number of ranks, S the bytes of the whole tensor; a tree has log2 N rounds, rounded up.
Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), section 4: algorithms, costs; Patarasuk,
Yuan, JPDC 69 (2009): the bandwidth-optimal ring; Hockney, Parallel Computing 20 (1994): cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from . import ranks
from .common import gpu
from .common.arguments import check_integer, check_one_of


@torch.no_grad()
def broadcast(tensor: Tensor, root: int, group: Group) -> None:
    """Copy the root's `tensor` to every rank, in place, along a binomial tree.

    In round k, the 2^k ranks that have the tensor send it on: log2 N rounds (Thakur et al., 4.3).
    """
    rank, size = _check_group(group, root)
    offset = (rank - root) % size  # rank relative to the root, which has offset 0
    for reach in _tree_distances(size):
        if offset < reach and offset + reach < size:
            ranks.isend(tensor, (rank + reach) % size, group).wait()
        elif reach <= offset < 2 * reach:
            ranks.irecv(tensor, (rank - reach) % size, group).wait()


@torch.no_grad()
def reduce(tensor: Tensor, root: int, group: Group) -> None:
    """Sum all ranks' `tensor` on the root, in place, along the broadcast's tree in reverse.

    The other ranks' `tensor` ends with partial sums; torch.distributed leaves it undefined, too.
    """
    rank, size = _check_group(group, root)
    offset = (rank - root) % size
    incoming = torch.empty_like(tensor)
    for reach in reversed(_tree_distances(size)):
        if offset < reach and offset + reach < size:
            ranks.irecv(incoming, (rank + reach) % size, group).wait()
            tensor += incoming
        elif reach <= offset < 2 * reach:
            ranks.isend(tensor, (rank - reach) % size, group).wait()


def split_evenly(tensor: Tensor, parts: int) -> list[Tensor]:
    """Cut `tensor` into `parts` flat views; the first `numel % parts` have one element more."""
    return list(tensor.view(-1).tensor_split(parts))


@torch.no_grad()
def reduce_scatter(output: Tensor, inputs: Sequence[Tensor], group: Group) -> None:
    """Write the sum of all ranks' `inputs[r]` to rank r's `output` (which may be `inputs[r]`).

    The sum of piece j starts at rank j + 1 and travels around the ring; each rank adds its piece
    and sends the sum on, until it reaches rank j: N - 1 steps (Patarasuk and Yuan, section 4).
    """
    rank, size = _check_group(group)
    _check_sizes(inputs, output, rank, size)
    mine = [piece.view(-1) for piece in inputs]
    buffers = output.new_empty(2, max(map(Tensor.numel, mine)))  # one receives, the other sends
    partial_sum = mine[rank - 1]
    for step in range(size - 1):
        piece = mine[(rank - 2 - step) % size]
        incoming = buffers[step % 2, : piece.numel()]
        ranks.exchange(partial_sum, (rank + 1) % size, incoming, (rank - 1) % size, group).wait()
        partial_sum = incoming.add_(piece)
    output.view(-1).copy_(partial_sum)


@torch.no_grad()
def all_gather(outputs: Sequence[Tensor], input: Tensor, group: Group) -> None:
    """Copy rank r's `input` to `outputs[r]` of every rank (`input` may be `outputs[rank]` itself).

    Each rank sends on the piece it received last: N - 1 steps around the ring (Thakur et al., 4.1).
    """
    rank, size = _check_group(group)
    _check_sizes(outputs, input, rank, size)
    outputs[rank].view(-1).copy_(input.view(-1))
    for step in range(size - 1):
        outgoing, incoming = outputs[(rank - step) % size], outputs[(rank - step - 1) % size]
        ranks.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size, group).wait()


@torch.no_grad()
def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group) -> None:
    """Send `inputs[j]` to rank j, and receive rank i's piece into `outputs[i]`.

    In step k, each rank sends to rank + k and receives from rank - k, so no rank receives two
    messages at once: N - 1 steps (Thakur et al., section 4, pairwise exchange).
    """
    rank, size = _check_group(group)
    _check_sizes(inputs, outputs[rank], rank, size)
    _check_sizes(outputs, inputs[rank], rank, size)
    outputs[rank].view(-1).copy_(inputs[rank].view(-1))
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        ranks.exchange(inputs[to], to, outputs[source], source, group).wait()


@torch.no_grad()
def all_reduce_naive(tensor: Tensor, group: Group) -> None:
    """Sum all ranks' `tensor` on rank 0, rank by rank, and send the sum to each rank."""
    rank, size = _check_group(group)
    incoming = torch.empty_like(tensor)
    if rank > 0:
        ranks.isend(tensor, 0, group).wait()
        return ranks.irecv(tensor, 0, group).wait()
    for peer in range(1, size):
        ranks.irecv(incoming, peer, group).wait()
        tensor += incoming
    for message in [ranks.isend(tensor, peer, group) for peer in range(1, size)]:
        message.wait()


def all_reduce_tree(tensor: Tensor, group: Group) -> None:
    """Reduce along a tree, then broadcast along the same tree: 2 log2 N rounds of all bytes."""
    reduce(tensor, 0, group)
    broadcast(tensor, 0, group)


def all_reduce_ring(tensor: Tensor, group: Group) -> None:
    """Run a reduce-scatter, then an all-gather: 2(N - 1) steps of S/N bytes each.

    Each piece is summed once and then copied, so all ranks get bitwise equal results.
    """
    rank, size = _check_group(group)
    pieces = split_evenly(tensor, size)
    reduce_scatter(pieces[rank], pieces, group)
    all_gather(pieces, pieces[rank], group)


ALL_REDUCE = {"naive": all_reduce_naive, "tree": all_reduce_tree, "ring": all_reduce_ring}


def all_reduce(tensor: Tensor, group: Group, algorithm: str = "ring") -> None:
    """Sum all ranks' `tensor` on every rank, in place. algorithm: "naive", "tree" or "ring"."""
    check_one_of(ALL_REDUCE, algorithm=algorithm)
    ALL_REDUCE[algorithm](tensor, group)


def barrier(group: Group) -> None:
    """Return once every rank of `group` has called it.

    In round k, each rank tells rank + 2^k that it and all ranks it has heard of have arrived. After
    log2 N rounds it has heard of all ranks (Hensgen, Finkel, Manber, IJPP 17 (1988)).
    """
    rank, size = _check_group(group)
    device = ranks.device() if gpu.is_gpu_backend(dist.get_backend(group)) else "cpu"
    sent, received = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for reach in _tree_distances(size):
        ranks.exchange(sent, (rank + reach) % size, received, (rank - reach) % size, group).wait()
        received.item()  # on a GPU `wait` only blocks the stream; reading the value blocks the host


def count_bytes_sent(
    name: str, nbytes: int, itemsize: int, size: int, rank: int, root: int = 0
) -> int:
    """Return the exact number of bytes that `rank` of `size` sends in the collective `name`.

    nbytes: S, the sum over all pieces, which are cut as `split_evenly` cuts items of `itemsize`
    bytes. root: of a broadcast or a reduce.
    """
    count, longer = divmod(nbytes // itemsize, size)
    piece = [(count + (j < longer)) * itemsize for j in range(size)]
    offset = (rank - root) % size
    children = sum(offset < reach and offset + reach < size for reach in _tree_distances(size))
    sent = {
        "broadcast": children * nbytes,
        "reduce": (offset > 0) * nbytes,
        "reduce_scatter": nbytes - piece[rank],  # all but this rank's own piece
        "all_gather": nbytes - piece[(rank + 1) % size],  # all but the piece received last
        "all_to_all": nbytes - piece[rank],
        "barrier": len(_tree_distances(size)),
        "all_reduce naive": nbytes if rank else (size - 1) * nbytes,
    }
    sent["all_reduce tree"] = sent["reduce"] + sent["broadcast"]
    sent["all_reduce ring"] = sent["reduce_scatter"] + sent["all_gather"]
    return sent[name]


def critical_path(name: str, size: int) -> tuple[int, float]:
    """Return the critical path of `name`: (number of latencies, bytes in series in units of S).

    Thakur et al., section 4, with equal pieces. In the naive all-reduce rank 0 receives one message
    after another; it sends the sum to all at once, so that only the bytes follow one another.
    """
    rounds, steps, fraction = len(_tree_distances(size)), size - 1, (size - 1) / size
    paths = dict.fromkeys(["broadcast", "reduce"], (rounds, float(rounds)))
    paths |= dict.fromkeys(["reduce_scatter", "all_gather", "all_to_all"], (steps, fraction))
    paths |= {"message": (1, 1.0), "barrier": (rounds, 0.0)}
    paths["all_reduce naive"] = (steps + min(steps, 1), 2.0 * steps)
    paths["all_reduce tree"] = (2 * rounds, 2.0 * rounds)
    paths["all_reduce ring"] = (2 * steps, 2 * fraction)
    return paths[name]


@dataclass(frozen=True)
class CostModel:
    """Hockney's cost model: a message of n bytes takes `latency` + n / `bandwidth` seconds.

    It ignores the time of additions, and links and cores that several ranks share.
    """

    latency: float  # alpha, seconds
    bandwidth: float  # 1 / beta, bytes per second

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float]) -> CostModel:
        """Fit `seconds` measured for `sizes` bytes, by least squares of the relative errors."""
        t, n = (torch.tensor(values, dtype=torch.float64) for values in (seconds, sizes))
        a = torch.stack([1 / t, n / t], dim=1)  # (measurements, 2): a @ (alpha, beta) should be 1
        alpha, beta = torch.linalg.lstsq(a, torch.ones_like(t)[:, None]).solution.view(-1).tolist()
        if alpha < 0:  # a latency is never negative: fit a line through 0 instead
            alpha, beta = 0.0, float(a[:, 1].sum() / a[:, 1].square().sum())
        return cls(alpha, 1 / beta)

    def predict_seconds(self, name: str, nbytes: float, size: int = 2) -> float:
        """Return the predicted seconds of the collective `name` on `nbytes` and `size` ranks."""
        messages, volume = critical_path(name, size)
        return messages * self.latency + volume * nbytes / self.bandwidth

    def find_crossover(self, size: int) -> float:
        """Return the bytes from which a ring all-reduce is faster than a tree's (`size` > 1)."""
        ring, less = critical_path("all_reduce ring", size)
        tree, more = critical_path("all_reduce tree", size)
        return max(0.0, (ring - tree) / (more - less)) * self.latency * self.bandwidth


def _tree_distances(size: int) -> list[int]:
    """Return 1, 2, 4, … below `size`: the distances between sender and receiver in a tree."""
    return [2**k for k in range((size - 1).bit_length())]


def _check_group(group: Group, root: int = 0) -> tuple[int, int]:
    rank, size = ranks.check_group(group)
    check_integer(0, size - 1, root=root)
    return rank, size


def _check_sizes(pieces: Sequence[Tensor], tensor: Tensor, rank: int, size: int) -> None:
    sizes = [piece.numel() for piece in pieces]
    if len(sizes) != size or sizes[rank] != tensor.numel():
        needed = f"{size} tensors, that of rank {rank} with {tensor.numel()} elements"
        raise ValueError(f"tensors with {sizes} elements: the list must hold {needed}")


if __name__ == "__main__":
    import sys

    from shardlab.measure import comparison

    def _train_on_rank(algorithm: str) -> comparison.Comparison:
        """Train copies of a small GPT, and average gradients with this all-reduce; compare."""
        model, world, n = comparison.build_model(), dist.group.WORLD, dist.get_world_size()

        def backward(model: torch.nn.Module, *batch: Tensor) -> None:
            comparison.backward_share(model, *batch)
            for parameter in model.parameters():
                parameter.grad /= n
                all_reduce(parameter.grad, world, algorithm)

        run = comparison.train(model, backward, comparison.load_batches())
        name = f"all_reduce {algorithm}"
        sizes = (p.nbytes for p in model.parameters())
        want = sum(count_bytes_sent(name, size, 4, n, dist.get_rank()) for size in sizes)
        found = {"sent": (want, run.sent.bytes)}
        return comparison.Comparison(found, *comparison.compare_weights(model.state_dict()))

    sys.exit(comparison.main(_train_on_rank, "algorithm", list(ALL_REDUCE)))
