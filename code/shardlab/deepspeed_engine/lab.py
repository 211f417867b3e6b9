"""The lab: generate with and train a Llama of `transformers` in eight modes, and compare costs.

    python -m shardlab.deepspeed_engine.lab --ranks 2 --price 2.5
    python -m shardlab.deepspeed_engine.lab --ranks 4 --modes data zero3 mixed --precision bf16
    python -m shardlab.deepspeed_engine.lab --memory 1e8

The lab runs the Llama in one process with plain torch, and then with DeepSpeed: data parallel,
ZeRO's stages, ZeRO-3 with offload to the host's memory, tensor parallel, and tensor parallel with
ZeRO-1. Each mode first generates (greedy, with a KV cache), then trains the same weights. With
ZeRO-3 no rank ever holds the whole model. A mode that runs out of memory gets a row in the table,
and the others go on.

Symbols: B sequences, S tokens of each, H hidden, L layers, V vocabulary.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab import ranks
from shardlab.common.arguments import check_integer, check_number, check_one_of, drop_none
from shardlab.layout import Layout
from shardlab.measure.count import read_clock, track_memory

from .breakdown import (
    BYTES_PER_VALUE,
    MODES,
    PHASES,
    Report,
    Task,
    inference_bytes_moved,
    inference_flops,
    show_table,
    training_bytes_moved,
    training_flops,
)
from .core import build_config, init_distributed, initialize
from .setup import import_deepspeed, suppress_output

# A Llama small enough for two CPU cores: 3.1 million parameters.
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
_WARMUP_TOKENS = 2  # tokens generated as a warm-up, before timing
_GENERATION_REPEATS = 3  # runs of the generation, which is short; the median is reported
_MIXED_TP = 2  # tensor-parallel ranks in the mode "mixed"
_OOM_MESSAGES = "out of memory", "OutOfMemoryError", "can't allocate memory"  # in torch's messages


def generate_tokens(model: Any, tokens_BS: Tensor, new: int) -> Tensor:
    """Generate `new` tokens after [B, S] greedily, one by one: [B, new]."""
    cache, given, found = None, tokens_BS, []
    with torch.no_grad():
        for _ in range(new):
            out = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            given = out.logits[:, -1:].argmax(-1)  # [B, 1]
            found.append(given)
    return torch.cat(found, 1)


def build_llama(**changes: Any) -> Any:
    """Return a Llama of `transformers` with TINY's shape and the same random weights each time.

    changes: other sizes than TINY's, or further settings of a LlamaConfig.
    """
    with suppress_output():
        from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def _build_layout(mode: str, size: int, batch: int) -> Layout:
    """Return the layout of a mode on `size` ranks; data-parallel copies divide `batch` sequences.

    Raises ValueError if ranks, heads or sequences cannot be divided so.
    """
    tp = {"tensor": size, "mixed": _MIXED_TP}.get(mode, 1)
    heads = TINY["num_key_value_heads"]
    if heads % tp:
        raise ValueError(f"size={size}: must divide the number of key-value heads ({heads})")
    if size % tp:
        raise ValueError(f"size={size}: must be a multiple of {tp} with mode={mode!r}")
    dp = size // tp
    if batch % dp:
        raise ValueError(f"batch={batch}: must be a multiple of the number of copies ({dp})")
    zero = {"zero1": 1, "zero2": 2, "zero3": 3, "offload": 3, "mixed": 1}.get(mode, 0)
    offload = "parameters" if mode == "offload" else "none"
    return Layout(dp, tp, zero=zero, micro_batch=batch // dp, offload=offload)


class _PlainEngine:
    """A single process with plain torch, and with the methods of DeepSpeed's engine.

    AdamW updates float32 weights: the model's own, or copies of 16-bit ones, as in DeepSpeed.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        masters = [p.detach().float().requires_grad_() for p in module.parameters()]
        self.pairs = list(zip(module.parameters(), masters, strict=True))
        self.adamw = torch.optim.AdamW(masters, lr=1e-3, foreach=False)

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in self.pairs:
            master.grad, weight.grad = weight.grad.float(), None
        self.adamw.step()
        for weight, master in self.pairs:
            weight.copy_(master)


def _load_sharded_llama(folder: str, settings: dict[str, Any]) -> Any:
    """Load a Llama from a folder as ZeRO-3 shards, gathering only one full tensor at a time."""
    deepspeed = import_deepspeed()
    from safetensors import safe_open
    from transformers import AutoConfig, LlamaForCausalLM

    shape = AutoConfig.from_pretrained(folder)
    init_distributed()
    with suppress_output(), deepspeed.zero.Init(config_dict_or_path=settings):
        module = LlamaForCausalLM(shape)
    named = dict(module.named_parameters())
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted({*file.keys()} & {*named}):
                with deepspeed.zero.GatheredParameters(named[name], modifier_rank=0):
                    if dist.get_rank() == 0:
                        named[name].data.copy_(file.get_tensor(name))
    return module


def _build_engine(mode: str, layout: Layout, folder: str, precision: str) -> tuple[Any, int]:
    """Return the engine of a mode, and this rank's peak bytes while it built the model."""
    if mode == "one":
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        with track_memory() as counted:
            module = build_llama().to(ranks.device(), dtype)
        return _PlainEngine(module), counted.peak_bytes
    place = "cpu" if ranks.device().type == "cpu" else "auto"
    # DeepSpeed's default bucket has 5e8 elements: more memory than a small Llama's whole training.
    small = {"reduce_bucket_size": 1_000_000}
    settings = build_config(
        layout, precision=precision, tp_plan="llama", device=place, zero_optimization=small
    )
    with track_memory() as counted:
        module = _load_sharded_llama(folder, settings) if layout.zero == 3 else build_llama()
    return initialize(module, settings), counted.peak_bytes


def _run_on_rank(
    mode: str, layout: Layout, task: Task, folder: str, precision: str, memory: float | None
) -> dict[str, Any]:
    with track_memory(device=ranks.device(), limit=memory) if memory else nullcontext():
        return _run_task(mode, layout, task, folder, precision)


def _run_task(mode: str, layout: Layout, task: Task, folder: str, precision: str) -> dict[str, Any]:
    engine, build_peak = _build_engine(mode, layout, folder, precision)
    shape, number = engine.module.config, BYTES_PER_VALUE[precision]
    lookup = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    length = max(task.prompt, task.seq)
    some = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(0, shape.vocab_size, (task.batch, length), generator=some)
    mine_BS = tokens_BS.chunk(layout.dp)[dist.get_rank() // layout.tp].to(ranks.device())
    held = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    found: dict[str, Any] = {"built": build_peak}

    prompt_BS = mine_BS[:, : task.prompt].contiguous()
    generate_tokens(engine, prompt_BS, _WARMUP_TOKENS)
    times = []
    for _ in range(_GENERATION_REPEATS):
        dist.barrier()
        begin = read_clock(ranks.device())
        outcome = generate_tokens(engine, prompt_BS, task.new)
        times.append(read_clock(ranks.device()) - begin)
    moved = inference_bytes_moved(shape, task, layout, held - lookup, number)
    found["inference"] = (outcome, moved, statistics.median(times))

    losses, own = [], held // layout.dp if layout.zero else held
    for step in range(1 + task.steps):
        if step == 1:
            dist.barrier()
            begin = read_clock(ranks.device())
        text_BS = mine_BS[:, : task.seq].contiguous()
        value = engine(input_ids=text_BS, labels=text_BS).loss
        engine.backward(value)
        engine.step()
        losses.append(value.detach())
    seconds = read_clock(ranks.device()) - begin
    mean = torch.stack(losses)
    dist.all_reduce(mean)  # [1 + steps]; all ranks of a tensor-parallel group have equal losses
    moved = task.steps * training_bytes_moved(held, own, layout.zero == 3, number)
    found["training"] = (mean / layout.world_size, moved, seconds)
    return found


def run(
    mode: str,
    size: int = 2,
    task: Task | None = None,
    price: float | None = None,
    device: str = "auto",
    timeout: float = 300.0,
    precision: str = "fp32",
    memory: float | None = None,
) -> list[Report]:
    """Generate and train in one `mode` (of MODES) on `size` ranks; "one" is always one process.

    price: of a GPU hour, in any currency; costs have the same currency. None: no cost, for ranks
    that share one CPU or one GPU. device: as in `ranks.run`. precision: "fp32"; or "bf16" weights
    with float32 master copies for AdamW. memory: limit of a rank's bytes, as `count.track_memory`
    counts them.

    Returns a Report for inference and one for training. Raises ValueError for bad arguments, and
    RankError if a rank fails.
    """
    task = task or Task()
    size = 1 if mode == "one" else size
    check_integer(size=size)
    check_one_of(MODES, mode=mode)
    check_one_of(BYTES_PER_VALUE, precision=precision)
    check_number(**drop_none(memory=memory, price=price))
    layout = _build_layout(mode, size, task.batch)
    if mode != "one":
        import_deepspeed()  # import DeepSpeed once here, rather than in each forked rank
    model = build_llama()  # imports transformers here, too, before the fork
    shape = model.config
    with tempfile.TemporaryDirectory() as folder:
        if layout.zero == 3:
            with suppress_output():
                model.save_pretrained(folder)
        arguments = mode, layout, task, folder, precision, memory
        found = ranks.run(_run_on_rank, size, *arguments, device=device, timeout=timeout)
    build_peak, reports = max(one["built"] for one in found), []
    for work in PHASES:
        outcomes, moved, seconds = zip(*(one[work] for one in found), strict=True)
        if work == "inference":
            tokens = task.batch * task.new
            flops = inference_flops(shape, task.batch, task.prompt, task.new)
            outcome = torch.cat(outcomes[:: layout.tp])
        else:
            tokens = task.steps * task.batch * task.seq
            flops = task.steps * training_flops(shape, task.batch, task.seq)
            outcome = outcomes[0]
        cost = max(seconds), flops, sum(moved), price
        reports.append(Report(mode, work, size, tokens, *cost, outcome, build_peak))
    return reports


def run_each(modes: list[str], *args: Any, **options: Any) -> tuple[list[Report], dict[str, str]]:
    """Run each mode; return the reports of successful modes, and the causes of out-of-memory ones.

    args, options: further arguments of `run`. Raises as `run` does for all other errors.
    """
    reports: list[Report] = []
    failed: dict[str, str] = {}
    for mode in modes:
        try:
            reports += run(mode, *args, **options)
        except ranks.RankError as error:
            if not any(words in str(error) for words in _OOM_MESSAGES):
                raise
            failed[mode] = "out of memory"
    return reports, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=list(MODES), help=", ".join(MODES))
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--price", type=float, help="of a GPU hour, in any currency: adds a cost")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--precision", default="fp32", help="fp32 (default) or bf16")
    parser.add_argument("--memory", type=float, help="limit of each rank, in bytes")
    for name, default in vars(Task()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args(arguments)
    try:
        task = Task(**{name: getattr(chosen, name) for name in vars(Task())})
        arguments = chosen.ranks, task, chosen.price, chosen.device, 3600
        show_table(*run_each(chosen.modes, *arguments, chosen.precision, chosen.memory))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
