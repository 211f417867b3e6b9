"""The collectives, from scratch on messages from one rank to another, and what they cost.

The convention is torch.distributed's: nothing is returned; the result stands in the tensor that
the caller handed over (`broadcast`, `reduce`, `all_reduce`), or in the output, which comes before
the input (`all_gather`, `reduce_scatter`, `all_to_all`). Two differences: the group is always an
argument, and a root is a rank of that group. Lists hold one tensor per rank of the group, of any
sizes, zero included. Sums are made in the tensor's own type and rounded after each addition, as
gloo and nccl do; the algorithms differ in the order of their additions.

N are the ranks, S the bytes of the whole tensor; a tree has log2 N rounds, rounded up. Sources:
Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), section 4: algorithms and costs; Patarasuk, Yuan,
JPDC 69 (2009): the ring, none sends less; Hockney, Parallel Computing 20 (1994): the cost model.
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
from .common.arguments import check_one_of, check_whole


@torch.no_grad()
def broadcast(tensor: Tensor, root: int, group: Group) -> None:
    """Give every rank the root's `tensor`, in place, along a binomial tree.

    In round k the 2^k ranks that have it send it on: log2 N rounds (Thakur et al., section 4.3).
    """
    rank, size = _enter(group, root)
    place = (rank - root) % size  # as seen from the root, which is place 0
    for reach in _powers(size):
        if place < reach and place + reach < size:
            ranks.isend(tensor, (rank + reach) % size, group).wait()
        elif reach <= place < 2 * reach:
            ranks.irecv(tensor, (rank - reach) % size, group).wait()


@torch.no_grad()
def reduce(tensor: Tensor, root: int, group: Group) -> None:
    """Leave the sum of all ranks' `tensor` on the root: the broadcast's tree, walked backwards.

    The other ranks' `tensor` ends with partial sums, which torch.distributed leaves undefined too.
    """
    rank, size = _enter(group, root)
    place = (rank - root) % size
    incoming = torch.empty_like(tensor)
    for reach in reversed(_powers(size)):
        if place < reach and place + reach < size:
            ranks.irecv(incoming, (rank + reach) % size, group).wait()
            tensor += incoming
        elif reach <= place < 2 * reach:
            ranks.isend(tensor, (rank - reach) % size, group).wait()


def split(tensor: Tensor, parts: int) -> list[Tensor]:
    """Cut `tensor` into `parts` flat views; the first `numel % parts` have one element more."""
    return list(tensor.view(-1).tensor_split(parts))


@torch.no_grad()
def reduce_scatter(output: Tensor, inputs: Sequence[Tensor], group: Group) -> None:
    """Leave the sum of all ranks' `inputs[r]` in rank r's `output` (it may be `inputs[r]` itself).

    The sum of piece j sets out from rank j + 1 and goes around the ring; each rank adds its share
    and sends it on, until it comes home to rank j: N - 1 steps (Patarasuk and Yuan, section 4).
    """
    rank, size = _enter(group)
    _fit_together(inputs, output, rank, size)
    mine = [piece.view(-1) for piece in inputs]
    buffers = output.new_empty(2, max(map(Tensor.numel, mine)))  # one fills, the other leaves
    travelling = mine[rank - 1]
    for step in range(size - 1):
        piece = mine[(rank - 2 - step) % size]
        incoming = buffers[step % 2, : piece.numel()]
        ranks.exchange(travelling, (rank + 1) % size, incoming, (rank - 1) % size, group).wait()
        travelling = incoming.add_(piece)
    output.view(-1).copy_(travelling)


@torch.no_grad()
def all_gather(outputs: Sequence[Tensor], input: Tensor, group: Group) -> None:
    """Give every rank all `input`s: rank r's stands in `outputs[r]`, and may be that memory itself.

    Each rank passes on what it got last: N - 1 steps around the ring (Thakur et al., section 4.1).
    """
    rank, size = _enter(group)
    _fit_together(outputs, input, rank, size)
    outputs[rank].view(-1).copy_(input.view(-1))
    for step in range(size - 1):
        outgoing, incoming = outputs[(rank - step) % size], outputs[(rank - step - 1) % size]
        ranks.exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size, group).wait()


@torch.no_grad()
def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Group) -> None:
    """Send `inputs[j]` to rank j; what rank i sent stands in `outputs[i]`.

    In step k each rank sends k places ahead and receives from k behind, so that no rank is sent two
    messages at a time: N - 1 steps (Thakur et al., section 4, pairwise exchange).
    """
    rank, size = _enter(group)
    _fit_together(inputs, outputs[rank], rank, size)
    _fit_together(outputs, inputs[rank], rank, size)
    outputs[rank].view(-1).copy_(inputs[rank].view(-1))
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        ranks.exchange(inputs[to], to, outputs[source], source, group).wait()


@torch.no_grad()
def all_reduce_naive(tensor: Tensor, group: Group) -> None:
    """Sum on rank 0, one rank after the other, and hand the sum back one by one."""
    rank, size = _enter(group)
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
    """Sum up a tree, and send the sum down the same tree: 2 log2 N rounds of the whole tensor."""
    reduce(tensor, 0, group)
    broadcast(tensor, 0, group)


def all_reduce_ring(tensor: Tensor, group: Group) -> None:
    """Reduce-scatter, then all-gather: 2(N - 1) steps of an N-th of the tensor each.

    Each piece is summed once and then copied, so all ranks end with the same bits.
    """
    rank, size = _enter(group)
    pieces = split(tensor, size)
    reduce_scatter(pieces[rank], pieces, group)
    all_gather(pieces, pieces[rank], group)


ALL_REDUCE = {"naive": all_reduce_naive, "tree": all_reduce_tree, "ring": all_reduce_ring}


def all_reduce(tensor: Tensor, group: Group, algorithm: str = "ring") -> None:
    """Give every rank the sum of all ranks' `tensor`, in place: "naive", "tree" or "ring"."""
    check_one_of(ALL_REDUCE, algorithm=algorithm)
    ALL_REDUCE[algorithm](tensor, group)


def barrier(group: Group) -> None:
    """Return once every rank of `group` has called it.

    In round k each rank tells the one 2^k ahead that it, and all it has heard of, are here: log2 N
    rounds later it has heard of everyone (Hensgen, Finkel, Manber, IJPP 17 (1988)).
    """
    rank, size = _enter(group)
    device = ranks.device() if gpu.carries(dist.get_backend(group)) else "cpu"
    here, heard = torch.zeros(2, 1, dtype=torch.uint8, device=device)
    for reach in _powers(size):
        ranks.exchange(here, (rank + reach) % size, heard, (rank - reach) % size, group).wait()
        heard.item()  # on a GPU `wait` orders only the stream: a value that is read has arrived


def bytes_sent(name: str, nbytes: int, itemsize: int, size: int, rank: int, root: int = 0) -> int:
    """Bytes that `rank` of `size` sends in the collective `name`, exactly.

    nbytes: S, all pieces together where there are pieces, cut as `split` cuts items of `itemsize`.
    root: of a broadcast or a reduce.
    """
    count, longer = divmod(nbytes // itemsize, size)
    piece = [(count + (j < longer)) * itemsize for j in range(size)]
    place = (rank - root) % size
    children = sum(place < reach and place + reach < size for reach in _powers(size))
    sent = {
        "broadcast": children * nbytes,
        "reduce": (place > 0) * nbytes,
        "reduce_scatter": nbytes - piece[rank],  # all but the one that comes home
        "all_gather": nbytes - piece[(rank + 1) % size],  # all but the one that arrives last
        "all_to_all": nbytes - piece[rank],
        "barrier": len(_powers(size)),
        "all_reduce naive": nbytes if rank else (size - 1) * nbytes,
    }
    sent["all_reduce tree"] = sent["reduce"] + sent["broadcast"]
    sent["all_reduce ring"] = sent["reduce_scatter"] + sent["all_gather"]
    return sent[name]


def critical_path(name: str, size: int) -> tuple[int, float]:
    """What `name` costs in time: latencies in a row, and bytes after one another in units of S.

    Thakur et al., section 4. Pieces are taken as equal. The naive all-reduce's messages queue at
    rank 0's wire without waiting for one another's latency.
    """
    rounds, steps, fraction = len(_powers(size)), size - 1, (size - 1) / size
    paths = dict.fromkeys(["broadcast", "reduce"], (rounds, float(rounds)))
    paths |= dict.fromkeys(["reduce_scatter", "all_gather", "all_to_all"], (steps, fraction))
    paths |= {"message": (1, 1.0), "barrier": (rounds, 0.0)}
    paths["all_reduce naive"] = (2 * min(steps, 1), 2.0 * steps)
    paths["all_reduce tree"] = (2 * rounds, 2.0 * rounds)
    paths["all_reduce ring"] = (2 * steps, 2 * fraction)
    return paths[name]


@dataclass(frozen=True)
class CostModel:
    """A message of n bytes takes `latency` + n / `bandwidth` seconds (Hockney's two parameters).

    Not in it: the time of the additions; links and cores that several ranks share.
    """

    latency: float  # alpha, seconds
    bandwidth: float  # 1 / beta, bytes per second

    @classmethod
    def fit(cls, sizes: Sequence[float], seconds: Sequence[float]) -> CostModel:
        """Least squares of the relative errors of `seconds`, measured for messages of `sizes` B."""
        t, n = (torch.tensor(values, dtype=torch.float64) for values in (seconds, sizes))
        a = torch.stack([1 / t, n / t], dim=1)  # (measurements, 2): a @ (alpha, beta) should be 1
        alpha, beta = torch.linalg.lstsq(a, torch.ones_like(t)[:, None]).solution.view(-1).tolist()
        if alpha < 0:  # no latency is below 0: the best line through 0 instead
            alpha, beta = 0.0, float(a[:, 1].sum() / a[:, 1].square().sum())
        return cls(alpha, 1 / beta)

    def seconds(self, name: str, nbytes: float, size: int = 2) -> float:
        """Predicted seconds of the collective `name` on `nbytes` and `size` ranks."""
        messages, volume = critical_path(name, size)
        return messages * self.latency + volume * nbytes / self.bandwidth

    def crossover(self, size: int) -> float:
        """Bytes from which the ring's all-reduce beats the tree's, on `size` > 1 ranks."""
        ring, less = critical_path("all_reduce ring", size)
        tree, more = critical_path("all_reduce tree", size)
        return max(0.0, (ring - tree) / (more - less)) * self.latency * self.bandwidth


def _powers(size: int) -> list[int]:
    """1, 2, 4, … below `size`: how far a tree's rounds reach."""
    return [2**k for k in range((size - 1).bit_length())]


def _enter(group: Group, root: int = 0) -> tuple[int, int]:
    """Return this rank's number in `group` and the group's size."""
    rank, size = ranks.check_group(group)
    check_whole(0, size - 1, root=root)
    return rank, size


def _fit_together(pieces: Sequence[Tensor], tensor: Tensor, rank: int, size: int) -> None:
    sizes = [piece.numel() for piece in pieces]
    if len(sizes) != size or sizes[rank] != tensor.numel():
        needed = f"{size} tensors, that of rank {rank} with {tensor.numel()} elements"
        raise ValueError(f"a list of tensors with {sizes} elements: needed are {needed}")
