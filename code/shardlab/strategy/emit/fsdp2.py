"""A script that trains the course's plain GPT with torch's fully_shard, for torch 2.13.

A stage of ZeRO is what fully_shard is told to do between forward, backward and micro-batches:

    ZeRO  weights                     gradients                         fully_shard over
    0     whole                       whole, sent with the last one     groups of one rank
    1     gathered once a step        whole, sent with the last one     all copies, or a group
    2     gathered once a step        sent with each, a share is kept   the same
    3     gathered for each layer     sent with each, a share is kept   the same
"""

from __future__ import annotations

from dataclasses import fields

from .target import Target, beside

FILE = "train_fsdp2.py"

# Before the bar: the words that must all hold (! before one: must not) for the line to be written.
# Between « and »: what `_words` fills in.
TEMPLATE = '''
|"""A plain GPT by torch's fully_shard.
|
|«title».
|
|    «launch»
|
|For torch 2.13, on GPUs or, to try it, on CPUs; nothing is compiled. Put your own data in the place
|of `batch`, and your own model in that of `build`.
|"""
|
tp|import math
|import os
full|from functools import partial
|
|import torch
|import torch.distributed as dist
tp|import torch.distributed.tensor.parallel as cut
!tp|from torch import nn
|from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
|from torch.distributed.device_mesh import init_device_mesh
!host|from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
host|from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
tp|from torch.distributed.tensor import Replicate, Shard
full|from torch.utils.checkpoint import checkpoint
|
|from shardlab.model import GPT, Config, loss
|
|SHAPE = Config(
|    «shape»,
|)
|«settings»
|DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
|STEPS, RATE, CLIP = 20, 3e-4, 1.0  # no layout decides these: put your own
|
|
tp|def cuts():
tp|    """Which matrices are cut, and how: «why tensor»."""
tp|    whole, rank = Replicate(), «between»  # «why sequence»
tp|    plan = {
tp|        "embedding": cut.RowwiseParallel(input_layouts=whole, output_layouts=rank),
tp|        "head": cut.ColwiseParallel(
tp|            input_layouts=rank, output_layouts=Shard(-1), use_local_output=False
tp|        ),  # logits stay cut, and the loss is taken on the pieces
tp tokens|        "norm": cut.SequenceParallel(),
tp|    }
tp|    for name in («columns»):
tp|        plan[f"blocks.*.{name}"] = cut.ColwiseParallel()  # outputs are this rank's own
tp|    for part, last in (("attention", "out"), ("ffn", "down")):
tp tokens|        plan[f"blocks.*.{part}_norm"] = cut.SequenceParallel()
tp|        plan[f"blocks.*.{part}"] = cut.PrepareModuleInput(  # once for all that read it
tp|            input_layouts=(rank,), desired_input_layouts=(whole,)
tp|        )
tp|        plan[f"blocks.*.{part}.{last}"] = cut.RowwiseParallel(output_layouts=rank)  # sums
tp|    return plan
tp|
tp|
|def build(mesh):
|    """The model, spread over all ranks, with the weights that rank 0 has drawn."""
|    with torch.device("meta"):  # no GPU ever holds all of it
|        model = GPT(SHAPE)
tp|    cut.parallelize_module(model, mesh["tensor"], cuts(), src_data_rank=None)
tp tied|    model.head.weight = model.embedding.weight  # one matrix, cut once
full|    for block in model.blocks:  # «why recompute»
full|        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
|    how = {
!groups|        "mesh": mesh["shard"],  # «why zero»
groups|        "mesh": mesh["repeat", "shard"],  # «why zero»
|        "mp_policy": MixedPrecisionPolicy(DTYPE, reduce_dtype=torch.float32),  # sums keep digits
3|        "reshard_after_forward": True,  # ZeRO-3: weights leave, and come again for backward
!3|        "reshard_after_forward": False,  # «why kept»
host|        "offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda"),  # «why host»
|    }
|    for block in model.blocks:  # a unit each: one's weights come while another one computes
|        fully_shard(block, **how)
|    fully_shard(model, **how)  # embedding, last norm and head
!host|    model.to_empty(device=DEVICE)
host|    model.to_empty(device="cpu")
tied|    model.head.weight = model.embedding.weight  # still one matrix
|    weights = {}
|    if dist.get_rank() == 0:  # a large model is read from a checkpoint instead
|        torch.manual_seed(0)
|        weights = GPT(SHAPE).state_dict()
|    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
|    set_model_state_dict(model, weights, options=options)
|    return model
|
|
|def batch(step, micro, share):
|    """Tokens and what follows each, both [b, s]: here at random, the same ones in each step."""
|    draw = torch.Generator().manual_seed(10**3 * micro + share)
|    tokens = torch.randint(0, SHAPE.vocab, (MICRO_BATCH, SEQ + 1), generator=draw)
|    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)
|
|
tp|def clip(model):
tp|    """Scale the gradient to a norm of CLIP at most. Pieces lie on several meshes: one sum."""
tp|    total = torch.zeros((), device=DEVICE)
tp|    for gradient in (parameter.grad for parameter in model.parameters()):
tp|        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
tp|        pieces = math.prod(size for size, how in sizes if not how.is_replicate())
tp|        squares = gradient.to_local().square().sum().to(DEVICE)
tp|        total += squares * pieces / dist.get_world_size()  # equal pieces count once together
tp|    dist.all_reduce(total)  # a scalar
tp|    for parameter in model.parameters():
tp|        local = parameter.grad.to_local()
tp|        local *= (CLIP / total.sqrt()).clamp(max=1.0).to(local.device)
tp|
tp|
!fp16|def update(model, optimizer, step, share):
fp16|def update(model, optimizer, scaler, step, share):
|    """One step; this rank's mean loss."""
|    total = torch.zeros((), device=DEVICE)
|    for micro in range(MICROBATCHES):
many !3|        last = micro == MICROBATCHES - 1
many 3 groups|        last = micro == MICROBATCHES - 1
many early|        model.set_requires_gradient_sync(last)  # gradients are sent once a step
many !3|        model.set_reshard_after_backward(last)  # gathered weights serve all micro-batches
many !early groups|        model.set_requires_all_reduce(last)  # groups add up once a step
|        tokens, targets = batch(step, micro, share)
!tp|        value = loss(model(tokens), targets) / MICROBATCHES
!tp !fp16|        value.backward()
!tp fp16|        scaler.scale(value).backward()
tp|        with cut.loss_parallel():  # backward inside, because it has one of its own
tp|            value = loss(model(tokens), targets) / MICROBATCHES
tp !fp16|            value.backward()
tp fp16|            scaler.scale(value).backward()
!tp|        total += value.detach()
tp|        total += value.detach().full_tensor()
fp16|    scaler.unscale_(optimizer)
!tp|    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
tp|    clip(model)
!fp16|    optimizer.step()
fp16|    scaler.step(optimizer)
fp16|    scaler.update()
|    optimizer.zero_grad()
|    return total
|
|
|def train(steps=STEPS):
|    """The mean loss of each step over all ranks, one after another. Inside a process group."""
|    mesh = init_device_mesh(DEVICE, «sizes», mesh_dim_names=«names»)
|    model = build(mesh)
|    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE«foreach»)
fp16|    scaler = torch.amp.GradScaler(DEVICE)  # «why half»
!tp|    share = dist.get_rank()  # of the data
tp|    share = dist.get_rank() // «tensor»  # of the data: ranks that share matrices share it
|    for step in range(steps):
!fp16|        value = update(model, optimizer, step, share)
fp16|        value = update(model, optimizer, scaler, step, share)
|        dist.all_reduce(value, dist.ReduceOp.AVG)  # a scalar
|        yield value.item()
|
|
|def main():
|    """On every rank that torchrun starts."""
|    if DEVICE == "cuda":
|        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
|    dist.init_process_group()
|    for step, value in enumerate(train()):
|        if dist.get_rank() == 0:
|            print(f"step {step}: loss {value:.6f}", flush=True)
|    dist.barrier()  # nobody closes its connections while another one still needs them
|    dist.destroy_process_group()
|
|
|if __name__ == "__main__":
|    main()
'''


def write(target: Target) -> str:
    """The text of the script; ValueError for what fully_shard and DTensor cannot do."""
    _check(target)
    true, words = _true(target), _words(target)
    lines = []
    for line in TEMPLATE.strip().splitlines():
        wanted, _, text = line.partition("|")
        if all((w[0] != "!") == (w.lstrip("!") in true) for w in wanted.split()):
            indent = " " * (len(text) - len(text.lstrip()))
            for name, value in words.items():
                text = text.replace(f"«{name}»", value.replace("\n", f"\n{indent}"))
            lines.append(text)
    return "\n".join(_wrapped(line) for line in "\n".join(lines).splitlines()) + "\n"


def _true(target: Target) -> set[str]:
    at = target.layout
    known = {
        "tp": at.tp > 1,
        "tokens": at.sequence_parallel,
        "tied": target.config.tied,
        "full": at.recompute == "full",
        "groups": at.replicas > 1 or at.zero == 0,
        "host": at.offload == "parameters",
        "fp16": target.half == "fp16",
        "many": at.microbatches > 1,
        "early": at.zero < 2,  # gradients stay whole up to the last micro-batch
        "3": at.zero == 3,
    }
    return {name for name, holds in known.items() if holds}


def _words(target: Target) -> dict[str, str]:
    at = target.layout
    repeat = at.dp if at.zero == 0 else at.replicas
    mesh = {"repeat": repeat, "shard": at.dp // repeat, "tensor": at.tp}
    if at.zero and at.replicas == 1:
        del mesh["repeat"]
    if at.tp == 1:
        del mesh["tensor"]
    gate = ["ffn.gate"] if target.config.mlp == "swiglu" else []
    columns = ["attention.query", "attention.key", "attention.value", "ffn.up", *gate]
    given = [
        f"{field.name}={getattr(target.config, field.name)!r}".replace("'", '"')
        for field in fields(target.config)
        if getattr(target.config, field.name) != field.default
    ]
    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[target.half]
    settings = [
        (f"SEQ = {target.seq}", "tokens of a sequence"),
        (f"MICRO_BATCH = {at.micro_batch}", target.why_micro_batch()),
        (f"MICROBATCHES = {at.microbatches}", target.why_microbatches()),
        (f"DTYPE = {dtype}", target.why_half()),
    ]
    return {
        "title": "\n".join(target.title()),
        "launch": "\n".join(target.torchrun(FILE)),
        "shape": ",\n".join(given),
        "settings": "\n".join(beside(settings)),
        "columns": ", ".join(f'"{name}"' for name in columns),
        "between": "Shard(1)" if at.sequence_parallel else "Replicate()",
        "tensor": str(at.tp),
        "sizes": repr(tuple(mesh.values())),
        "names": repr(tuple(mesh)).replace("'", '"'),
        # Norms that are not cut live on another mesh than what is: no step for all at once.
        "foreach": ", foreach=False" if at.tp > 1 and not at.sequence_parallel else "",
        "why tensor": target.why_tensor(),
        "why sequence": target.why_sequence(),
        "why recompute": target.why_recompute(),
        "why zero": target.why_zero(),
        "why half": target.why_half(),
        "why kept": f"ZeRO-{at.zero}: weights stay for backward" if at.zero else "nothing is cut",
        "why host": "weights and optimizer in the host's memory: room, for time",
    }


def _wrapped(line: str) -> str:
    """A line of more than 100 columns with its comment above it."""
    code, mark, why = line.partition("  # ")
    if len(line) <= 100 or not mark:
        return line
    indent = " " * (len(code) - len(code.lstrip()))
    return f"{indent}# {why}\n{code}"


def _check(target: Target) -> None:
    at = target.layout
    if at.pp > 1:
        why = "fully_shard and DTensor cut no stages; nearest are torchtitan and megatron"
        raise target.refusal(f"pp={at.pp}", "is 1", why)
    if at.cp > 1:
        why = "torch's context parallelism is experimental; nearest are torchtitan and megatron"
        raise target.refusal(f"cp={at.cp}", "is 1", why)
    if at.offload == "optimizer":
        why = "its offload takes weights along; nearest is 'parameters', with zero=3"
        raise target.refusal("offload='optimizer'", "are 'none' and 'parameters'", why)
    if at.recompute == "selective":
        why = "torch's fused attention keeps no scores; nearest is 'none', which is no larger"
        raise target.refusal("recompute='selective'", "are 'none' and 'full'", why)
    target.check_vocab()
