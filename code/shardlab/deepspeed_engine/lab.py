"""The lab: a Llama of Hugging Face's `transformers`, four ways, with one breakdown for each.

    python -m shardlab.deepspeed_engine.lab --ranks 2 --price 2.5

runs it on one process with plain torch, and then with DeepSpeed: data parallel, ZeRO-3 with the
states in the host's memory, and tensor parallel. Each way first generates (greedy, with a cache of
keys and values), then trains the same weights with AdamW, in float32.

Symbols: B sequences, S tokens of each, H hidden, L layers, V vocabulary.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab import ranks
from shardlab.count import clock
from shardlab.layout import Layout
from shardlab.options import Parser, any_encoding

from .breakdown import (
    WAYS,
    WORK,
    Report,
    Task,
    inference_flops,
    inference_moved,
    table,
    training_flops,
    training_moved,
)
from .core import config, initialize
from .start import prepare, quiet

# Llama's parts in a size for two CPU cores: 3.1 million parameters.
TINY = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_WARM = 2  # tokens that are generated before the clock starts
_REPEATS = 3  # of the generation, which is short: its median is reported


def generate(model: Any, tokens_BS: Tensor, new: int) -> Tensor:
    """The `new` likeliest tokens after [B, S], one after the other: [B, new]."""
    cache, given, found = None, tokens_BS, []
    with torch.no_grad():
        for _ in range(new):
            out = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            given = out.logits[:, -1:].argmax(-1)  # [B, 1]
            found.append(given)
    return torch.cat(found, 1)


def _shape(name: str | None) -> Any:
    """The model's configuration. Imports what forked ranks then need not import again."""
    with quiet():
        from transformers import AutoConfig, LlamaConfig
        from transformers.models.llama import modeling_llama  # noqa: F401

    shape = LlamaConfig(**TINY) if name is None else AutoConfig.from_pretrained(name)
    if shape.model_type != "llama":
        raise ValueError(f"model={name!r}: a {shape.model_type}; allowed are those of type llama")
    return shape


def llama(name: str | None = None, **changes: Any) -> Any:
    """A Llama of `transformers`: one from the hub by its `name`, or TINY, the same at every call.

    changes: of TINY's shape, or further settings of a LlamaConfig.
    """
    _shape(name)
    from transformers import LlamaConfig, LlamaForCausalLM

    if name is not None:
        return LlamaForCausalLM.from_pretrained(name, dtype=torch.float32, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def _engine(way: str, module: Any, batch: int) -> tuple[Any, torch.optim.Optimizer | None]:
    if way == "one":
        module.to(ranks.device())
        return module, torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    size = dist.get_world_size()
    place = "cpu" if ranks.device().type == "cpu" else "auto"
    layout = {
        "data": Layout(size, micro_batch=batch),
        "zero3": Layout(size, micro_batch=batch, zero=3, offload="parameters"),
        "tensor": Layout(tp=size, micro_batch=batch),
    }[way]
    return initialize(module, config(layout, tp_plan="llama", device=place)), None


def _rank(way: str, task: Task, name: str | None) -> dict[str, Any]:
    """On every rank: generate, then train; times, outcomes, and what was moved."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = llama(name)
    shape, parts = module.config, size if way in ("data", "zero3") else 1
    lookup = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    length = max(task.prompt, task.seq)
    some = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(0, shape.vocab_size, (task.batch, length), generator=some)
    mine_BS = tokens_BS.chunk(parts)[rank % parts].to(ranks.device())
    engine, optimizer = _engine(way, module, len(mine_BS))
    held = sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())
    found: dict[str, Any] = {}

    prompt_BS = mine_BS[:, : task.prompt].contiguous()
    generate(engine, prompt_BS, _WARM)
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        begin = clock(ranks.device())
        outcome = generate(engine, prompt_BS, task.new)
        times.append(clock(ranks.device()) - begin)
    moved = inference_moved(
        shape, held - lookup, len(mine_BS), task.prompt, task.new, size // parts, way == "zero3"
    )
    found["inference"] = (outcome, moved, statistics.median(times))

    losses, own = [], held // size if way == "zero3" else held
    for step in range(1 + task.steps):
        if step == 1:
            dist.barrier()
            begin = clock(ranks.device())
        text_BS = mine_BS[:, : task.seq].contiguous()
        value = engine(input_ids=text_BS, labels=text_BS).loss
        if optimizer:
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(value)
            engine.step()
        losses.append(value.detach())
    seconds = clock(ranks.device()) - begin
    mean = torch.stack(losses)
    dist.all_reduce(mean)  # [1 + steps]; ranks of a tensor-parallel group all have the same
    moved = task.steps * training_moved(held, own, way == "zero3")
    found["training"] = (mean / size, moved, seconds)
    return found


def run(
    way: str,
    size: int = 2,
    task: Task | None = None,
    price: float | None = None,
    model: str | None = None,
    device: str = "auto",
    timeout: float = 300.0,
) -> list[Report]:
    """Generate and train in one `way` (of WAYS) on `size` ranks; "one" is always one process.

    price: of a GPU hour, in whatever currency; the cost comes in the same. Without one, there is no
    cost: ranks on one CPU, or on one GPU that they share, cost no more than one. model: a name on
    Hugging Face's hub, to be downloaded by each rank's process; without one, TINY with random
    weights, and no network. device: as in `ranks.run`.

    Returns a Report for inference and one for training. Raises ValueError for what is not allowed.
    """
    task = task or Task()
    size = 1 if way == "one" else size
    ranks.agree.check_whole(size=size)
    if way not in WAYS:
        raise ValueError(f"way={way!r}: allowed are {', '.join(map(repr, WAYS))}")
    if price is not None:
        ranks.check_number(0, price=price)
    if way in ("data", "zero3") and task.batch % size:
        raise ValueError(f"batch={task.batch}: allowed are multiples of the {size} ranks")
    shape = _shape(model)
    heads = shape.num_key_value_heads
    if way == "tensor" and heads % size:
        raise ValueError(f"size={size}: allowed are divisors of {heads}, the heads of the keys")
    if way != "one":
        prepare()  # once here, rather than in each forked rank
    found = ranks.run(_rank, size, way, task, model, device=device, timeout=timeout)
    reports = []
    split = way in ("data", "zero3")
    for work in WORK:
        results = [one[work] for one in found]
        outcome = results[0][0]
        if work == "inference":
            tokens = task.batch * task.new
            flops = inference_flops(shape, task.batch, task.prompt, task.new)
            outcome = torch.cat([r[0] for r in results]) if split else outcome
        else:
            tokens = task.steps * task.batch * task.seq
            flops = task.steps * training_flops(shape, task.batch, task.seq)
        moved, seconds = sum(r[1] for r in results), max(r[2] for r in results)
        reports.append(Report(way, work, size, tokens, seconds, flops, moved, price, outcome))
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    any_encoding()  # of what it prints
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--price", type=float, help="of a GPU hour: adds what tokens cost")
    parser.add_argument("--model", help="a name on Hugging Face's hub; downloads it")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for name, default in vars(Task()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="the breakdown as JSON")
    chosen = parser.parse_args(arguments)
    try:
        task = Task(**{name: getattr(chosen, name) for name in vars(Task())})
        reports = [
            report
            for way in chosen.ways
            for report in run(
                way, chosen.ranks, task, chosen.price, chosen.model, chosen.device, 3600
            )
        ]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps([report.as_dict() for report in reports], indent=1))
    else:
        table(reports)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
