"""Published silent bugs of parallel training, each as a program here or elsewhere.

THREADS has programs for each bug that no other test program shows: a plain one, and a parallel one
with and without the bug. Models are small. ELSEWHERE has the other threads, and names the program
that shows their mistake: one of `parity_mistakes`, another thread, or the lesson, which runs ten of
them at every build. The last twenty were written after all rules were fixed, and run once: all were
found, 18 at the right place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from shardlab import tensor_parallel as tp

WIDTH, INNER, WORDS, EXPERTS, BATCH, LENGTH = 8, 16, 12, 4, 8, 8
Program = Callable[[Any], None]
BUGS: dict[str, PublishedBug] = {}
LESSON_FILE = "lessons/parity.md"
ELSEWHERE = {  # thread -> the program that shows its mistake
    "AReaL 312": "zero: clipped by the norm of a piece",
    "Automodel 1412": "Megatron-LM 3672",
    "Automodel 3816": LESSON_FILE,
    "ColossalAI 2192": LESSON_FILE,
    "DeepSpeed 1801": LESSON_FILE,
    "DeepSpeed 5555": "data: divided twice",
    "DeepSpeed 8224": "Automodel 3530",
    "DeepSpeed 8437": LESSON_FILE,
    "DeepSpeed 8475": "mesh: norm counts replicated gradients twice",
    "KempnerForge 115": "checkpoint: the optimizer's state is forgotten",
    "LlamaFactory 10787": "context: each rank a short text",
    "Megatron-LM 737": "data: padding in the softmax",
    "Megatron-LM 1256": LESSON_FILE,
    "Megatron-LM 1446": "sequence: gradients of norms not summed",
    "Megatron-LM 1622": "experts: averaged over all ranks",
    "Megatron-LM 5916": "mesh: norm counts replicated gradients twice",
    "Megatron-LM 5956": LESSON_FILE,
    "Megatron-LM 7452, finding 3": "data: a mean of means over other counts",
    "Megatron-LM 7452, finding 7": "context: targets are not in zig-zag",
    "Megatron-LM 7452, finding 11": LESSON_FILE,
    "Megatron-LM 7513": "data: divided twice",
    "TransformerEngine 1557": "tensor: sum of the input's gradient forgotten",
    "TransformerEngine 3551": "context: the mask is forgotten on the ring",
    "VeOmni 184": "mesh: norm counts replicated gradients twice",
    "gpt-neox 1257": "data: divided twice",
    "miles 3231": "data: micro-batches' losses not divided",
    "mistral 194": "data: the same share on every rank",
    "ms-swift 7944": "tensor: rank 0's shards on all ranks",
    "open-instruct 1498": LESSON_FILE,
    "picotron 5": "data: never averaged",
    "pytorch 144352": "pipeline: loss not divided by m",
    "pytorch 149768": "tensor: bias added by each rank",
    "pytorch 160285": LESSON_FILE,
    "pytorch 162692": "data: a mean of means over other counts",
    "slapo 10": "tensor: bias added by each rank",
    "torchtitan 596": "tensor: clipped by the norm of each rank",
    "torchtitan 1373": "tensor: gradients of shared heads not summed",
    "torchtitan 1805": LESSON_FILE,
    "transformers 24088": "zero: learning rate times ranks",
    "transformers 34191": LESSON_FILE,
    "tt-metal 55947": LESSON_FILE,
    "verl 4250": "context: targets are shifted within a share",
}


@dataclass(frozen=True)
class PublishedBug:
    ranks: int
    plain: Program
    program: Callable[[Any, bool], None]  # called with watch, and whether to make the mistake
    place: str  # regular expressions for the place and the words of the report
    words: str
    quote: str  # quoted from the thread


def register_bug(
    name: str, ranks: int, plain: Program, place: str, words: str, said: str
) -> Callable[[Callable], Callable]:
    def register(program: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
        BUGS[name] = PublishedBug(ranks, plain, program, place, words, said)
        return program

    return register


class Net(nn.Module):
    """Model from tokens [batch, length] to logits [batch, length, words], without attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.act = nn.GELU()
        self.down = nn.Linear(INNER, WIDTH)
        self.drop: nn.Module = nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            for p in self.norm.parameters():  # random values, so that each parameter matters
                p.add_(0.1 * torch.randn_like(p))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.compute_hidden(tokens))

    def compute_hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Sparse(nn.Module):
    """Layer with two of four experts for each token; `mine` are this process's experts."""

    def __init__(self, mine: range = range(EXPERTS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(e): experts[e] for e in mine})
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        self.probabilities = self.router(x).softmax(-1)
        score, self.index = self.probabilities.topk(2)
        return self.head(x + self.mix_experts(x, score))

    def mix_experts(self, x: Tensor, score: Tensor) -> Tensor:
        return sum(
            (score * (self.index == int(e))).sum(-1, keepdim=True) * expert(x).tanh()
            for e, expert in self.experts.items()
        )

    def count_choices(self) -> Tensor:
        return torch.bincount(self.index.flatten(), minlength=EXPERTS).float()


def make_tokens(step: int = 0, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(WORDS, (BATCH, length), generator=generator)


def make_targets(x: Tensor) -> Tensor:
    return x.roll(-1, 1)


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def run_backward(model: nn.Module, step: int) -> None:
    x = make_tokens(step)
    cross_entropy(model(x), make_targets(x)).backward()


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of a forgotten call."""


def train(
    watch: Any,
    model: nn.Module,
    backward: Callable[[Any, int], None] = run_backward,
    after: Callable[[Any], None] = do_nothing,
    optimizer: Any = None,
    steps: int = 1,
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    watch(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        after(model)
        optimizer.step()


def train_plain(watch: Any) -> None:
    train(watch, Net())


def train_sparse(watch: Any) -> None:
    train(watch, Sparse())


# Helpers that run on ranks


def take_own_part(x: Tensor, dimension: int = 0) -> Tensor:
    return x.chunk(dist.get_world_size(), dimension)[dist.get_rank()]


def sum_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = sum_over_ranks(p.grad) / dist.get_world_size()


# Tensor and sequence parallelism


def cut_block(net: Net, row: type = tp.RowLinear, edges: Any = None) -> Net:
    enter, leave = (
        (edges.enter_region, edges.leave_region) if edges else (tp.copy_to, tp.reduce_from)
    )
    net.up = tp.ColumnLinear(net.up, dist.group.WORLD, enter)
    net.down = row(net.down, dist.group.WORLD, leave)
    return net


@register_bug("xtuner 1004", 2, train_plain, "backward act$", "2 times .*sum over 2 ranks",
        "torch.distributed.nn's all_reduce sums in backward, too")  # fmt: skip
def sum_twice(watch: Any, wrong: bool) -> None:
    net = cut_block(Net())
    if wrong:
        net.down.leave_region = lambda x, group: differentiable_all_reduce(x, group=group)
    train(watch, net)


class SharedBias(tp.RowLinear):
    straight = True

    def forward(self, x: Tensor) -> Tensor:
        b = self.bias / dist.get_world_size(self.group)
        b = self.bias + (b - self.bias).detach() if self.straight else b
        return self.leave_region(F.linear(x, self.weight, b), self.group)


@register_bug("torchtitan 4332", 4, train_plain, r"gradient down\.bias", r"0.25 .*ranks \(4\) one",
        "bias / tp is differentiable: 1/tp of the bias's gradient")  # fmt: skip
def divide_bias(watch: Any, wrong: bool) -> None:
    net = cut_block(Net(), SharedBias)
    net.down.straight = not wrong
    train(watch, net)


def permute_rows(rows: Tensor, head: int) -> Tensor:
    return rows.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


def train_permuted(watch: Any) -> None:
    net = Net()
    net.up.weight.data.copy_(permute_rows(net.up.weight.data, 8))
    train(watch, net)


@register_bug("transformers 48519", 2, train_permuted, "forward up$", "for an unknown reason",
        "queries are permuted for rotation with a head size that is the part's")  # fmt: skip
def permute_part(watch: Any, wrong: bool) -> None:
    net = cut_block(Net())
    net.up.weight.data.copy_(permute_rows(net.up.weight.data, 4 if wrong else 8))
    train(watch, net)


# Pipelines


class FirstStage(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        for name, child in net.named_children():
            if name != "head":
                setattr(self, name, child)

    forward = Net.compute_hidden


class LastStage(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.head = net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def take_stage(net: Net) -> nn.Module:
    return (FirstStage, LastStage)[dist.get_rank()](net)


def build_schedule(stage: nn.Module, parts: int, over: float = 1.0, scale: bool = False) -> Any:
    """Build torch's own schedule; over: divisor of each micro-batch's loss."""
    staged = PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu"))
    loss = lambda logits, y: cross_entropy(logits, y) / over  # noqa: E731
    return ScheduleGPipe(staged, parts, loss, scale_grads=scale)


def run_schedule(pipe: Any, x: Tensor) -> None:
    pipe.step(x) if dist.get_rank() == 0 else pipe.step(target=make_targets(x))


def train_accumulated(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number in range(3):
            x = make_tokens(number)
            (cross_entropy(net(x), make_targets(x)) / 3).backward()

    train(watch, Net(), backward)


@register_bug("torchtitan 1733", 2, train_accumulated, "gradient ", "all weights should be equal",
        "each step of the schedule divides all of .grad again")  # fmt: skip
def divide_again(watch: Any, wrong: bool) -> None:
    stage = take_stage(Net())
    pipe = build_schedule(stage, 2, over=3 if wrong else 6, scale=wrong)

    def backward(net: nn.Module, step: int) -> None:
        for number in range(3):
            run_schedule(pipe, make_tokens(number))

    train(watch, stage, backward)


LENGTHS = 4, 4, 6


def train_lengths(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number, length in enumerate(LENGTHS):
            x = make_tokens(number, length)
            (cross_entropy(net(x), make_targets(x)) / 3).backward()

    train(watch, Net(), backward)


@register_bug("Automodel 3530", 2, train_lengths, "gradient ", "all weights should be equal",
        "a new sequence length begins new stages, and wipes what was accumulated")  # fmt: skip
def wipe_gradients(watch: Any, wrong: bool) -> None:
    stage = take_stage(Net())

    def backward(net: nn.Module, step: int) -> None:
        pipe, last = None, 0
        for number, length in enumerate(LENGTHS):
            if length != last:
                pipe, last = build_schedule(net, 2, over=6), length
                for p in net.parameters():
                    p.grad = None if wrong else p.grad
            run_schedule(pipe, make_tokens(number, length))

    train(watch, stage, backward)


def build_tied_net() -> Net:
    net = Net()
    net.embedding.weight.data.mul_(0.5)
    net.head.weight = net.embedding.weight
    return net


def train_tied(watch: Any) -> None:
    train(watch, build_tied_net())


@register_bug("Megatron-LM 4641", 2, train_tied, r"update embedding\.weight", "Muon; .* uses AdamW",
        "Muon updates the copy on the last stage, Adam the one on the first")  # fmt: skip
def use_other_optimizer(watch: Any, wrong: bool) -> None:
    net, rank = build_tied_net(), dist.get_rank()
    stage = take_stage(net)
    pipe, ends = build_schedule(stage, 2, over=2), net.embedding.weight
    parameters = [*stage.parameters()]
    if wrong and rank:
        optimizer = torch.optim.Muon(parameters, 1e-2)
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-2, foreach=False)

    def sum_tied_gradients(stage: nn.Module) -> None:
        ends.grad = sum_over_ranks(ends.grad)

    train(
        watch,
        stage,
        lambda stage, step: run_schedule(pipe, make_tokens(step)),
        sum_tied_gradients,
        optimizer,
    )


# Expert parallelism


class ParallelSparse(Sparse):
    def __init__(self, sums: bool = True) -> None:
        rank = dist.get_rank()
        self.sums, share = sums, EXPERTS // dist.get_world_size()
        super().__init__(range(rank * share, rank * share + share))

    def mix_experts(self, x: Tensor, score: Tensor) -> Tensor:
        world = dist.group.WORLD
        if self.sums:  # the ranks' parts of gradients
            x, score = tp.copy_to(x, world), tp.copy_to(score, world)
        return tp.reduce_from(super().mix_experts(x, score), world)


@register_bug("transformers 48205", 2, train_sparse, r"(backward|gradient) (router|embedding)",
        "not added up", "a rank's gradient of the scores covers its own experts alone")  # fmt: skip
def skip_score_sum(watch: Any, wrong: bool) -> None:
    train(watch, ParallelSparse(sums=not wrong))


class WronglyPaired(ParallelSparse):
    def mix_experts(self, x: Tensor, score: Tensor) -> Tensor:
        by_expert = torch.zeros(*score.shape[:-1], EXPERTS).scatter(-1, self.index, score)
        return super().mix_experts(x, by_expert[..., :2])


@register_bug("transformers 45473", 2, train_sparse, "forward (head)?$",
        "last right tensor: output of experts", "scores are paired with other experts")  # fmt: skip
def pair_wrongly(watch: Any, wrong: bool) -> None:
    train(watch, WronglyPaired() if wrong else ParallelSparse())


def compute_balance_loss(model: Sparse, counts: Tensor, number: int) -> Tensor:
    """Return the auxiliary loss of `number` tokens: each expert's probability times its choices."""
    return EXPERTS * (model.probabilities.sum((0, 1)) * counts).sum() / number**2


def train_balanced(watch: Any) -> None:
    def backward(model: Sparse, step: int) -> None:
        x = make_tokens(step)
        loss = cross_entropy(model(x), make_targets(x))
        (loss + compute_balance_loss(model, model.count_choices(), x.numel())).backward()

    train(watch, Sparse(), backward)


@register_bug("Megatron-LM 3672", 4, train_balanced, "(backward|gradient) router", "auxiliary",
        "the balancing loss sums a rank's own probabilities over all ranks' tokens")  # fmt: skip
def balance_own_choices(watch: Any, wrong: bool) -> None:
    def backward(model: Sparse, step: int) -> None:
        x = make_tokens(step)
        loss = cross_entropy(model(take_own_part(x)), take_own_part(make_targets(x)))
        own = compute_balance_loss(model, sum_over_ranks(model.count_choices()), x.numel())
        (loss + (own if wrong else own * dist.get_world_size())).backward()

    train(watch, Sparse(), backward, average_gradients)


# Data parallelism


MICRO = 4


def compute_micro_loss(net: nn.Module, number: int, of: Any = lambda x: x) -> Tensor:
    x = make_tokens(number)
    return cross_entropy(net(of(x)), of(make_targets(x))) / MICRO


def train_micro_batches(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        for number in range(MICRO):
            compute_micro_loss(net, number).backward()

    train(watch, Net(), backward)


@register_bug("build-nanogpt 30", 2, train_micro_batches, "gradient ", "weights should be equal",
        "the flag that DDP reads in forward is set after it")  # fmt: skip
def set_flag_late(watch: Any, wrong: bool) -> None:
    def backward(net: Any, step: int) -> None:
        for number in range(MICRO):
            if not wrong:
                net.require_backward_grad_sync = number == MICRO - 1
            loss = compute_micro_loss(net, number, take_own_part)
            net.require_backward_grad_sync = number == MICRO - 1
            loss.backward()

    train(watch, DistributedDataParallel(Net()), backward)


@register_bug("DeepSpeed 1800", 2, train_micro_batches, "gradient ", "bfloat16",
        "gradients of micro-batches are added up in bfloat16")  # fmt: skip
def add_in_bf16(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        total = [torch.zeros_like(p).bfloat16() if wrong else 0 * p for p in net.parameters()]
        for number in range(MICRO):
            net.zero_grad()
            compute_micro_loss(net, number, take_own_part).backward()
            for one, p in zip(total, net.parameters(), strict=True):
                one.data += p.grad.to(one.dtype)
        for one, p in zip(total, net.parameters(), strict=True):
            p.grad = one.detach().float()

    train(watch, Net(), backward, average_gradients)


ROWS, SHARE = 32, 4  # rows of the data, rows of a rank's batch


def take_rows(epoch: int, batch: int, rank: int) -> Tensor:
    sampler = DistributedSampler(range(ROWS), 2, rank, seed=7)
    sampler.set_epoch(epoch)
    everything = torch.cat([make_tokens(n) for n in range(ROWS // BATCH)])
    return everything[[*sampler][batch * SHARE : (batch + 1) * SHARE]]


def train_second_epoch(watch: Any) -> None:
    def backward(net: Net, step: int) -> None:
        x = torch.cat([take_rows(1, 2 + step, rank) for rank in (0, 1)])
        cross_entropy(net(x), make_targets(x)).backward()

    train(watch, Net(), backward)


@register_bug("accelerate 4071", 2, train_second_epoch, "backward (head)?$", "use the same batch",
        "a loader that is resumed within an epoch shuffles as in the first one")  # fmt: skip
def shuffle_again(watch: Any, wrong: bool) -> None:
    def backward(net: Net, step: int) -> None:
        x = take_rows(0 if wrong else 1, 2 + step, dist.get_rank())
        cross_entropy(net(x), make_targets(x)).backward()

    train(watch, Net(), backward, average_gradients)


# Bugs that torch 2.13 still has. When one is fixed, the program has to rebuild it.


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(x)


def make_exact_numbers() -> Tensor:
    """Return numbers whose products and half sums are exact in bfloat16, but not the whole sum.

    So the sum of the two halves is the only operation that can round.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(8, (BATCH, LENGTH, WIDTH), generator=generator).float()
    x[:, LENGTH // 2 :] /= 32
    return x


def train_gained(watch: Any) -> None:
    train(watch, GainModel(), lambda model, step: model(make_exact_numbers()).sum().backward())


@register_bug("pytorch 190626", 2, train_gained, r"gradient gain\.weight", "only bfloat16",
        "reduce_dtype=float32 is not that of the sum over tensor-parallel ranks")  # fmt: skip
def sum_in_narrow_dtype(watch: Any, wrong: bool) -> None:
    """With accumulation, FSDP2 keeps gradients and the sum over ranks in reduce_dtype."""
    model, mesh = GainModel(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"gain": SequenceParallel()})
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)

    def backward(model: Any, step: int) -> None:
        parts = take_own_part(make_exact_numbers(), 1).chunk(1 if wrong else 2)
        for number, x in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            y = model(x)
            y = y.to_local() if isinstance(y, DTensor) else y
            y.float().sum().backward()

    train(watch, model, backward)
