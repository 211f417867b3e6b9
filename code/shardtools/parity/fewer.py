"""Two layers of a model that fits nowhere: the same widths, and so the same techniques at work."""

from __future__ import annotations

from torch import nn

from shardlab.common.arguments import check_kind, check_whole


def first_layers(model: nn.Module, layers: int = 2) -> nn.Module:
    """Cut a model's lists of layers to their first ones, in place; returns the model.

    In both programs, where the model is made, before it is wrapped or sharded: on torch's meta
    device, where the whole does not fit. What cuts layers' tensors, as tensor, sequence, context
    and expert parallelism and ZeRO do, does in two what it does in all; a pipeline needs as many
    layers as it has parts. Lists within a layer, as of experts, stay. The report says so.

    Raises ValueError for a model that has no list of more layers of one kind.
    """
    check_kind(nn.Module, model=model)
    check_whole(1, layers=layers)
    inside: tuple[str, ...] = ()
    had = 0
    for name, each in list(model.named_modules()):
        if not isinstance(each, nn.ModuleList) or name.startswith(inside):
            continue
        inside += (f"{name}.",)
        if len(each) > layers and len({type(layer) for layer in each}) == 1:
            had = max(had, len(each))
            del each[layers:]
    if not had:
        raise ValueError(
            f"model={type(model).__name__}: it has no ModuleList of more than {layers} layers of "
            "one kind; needed is one"
        )
    if hasattr(getattr(model, "config", None), "num_hidden_layers"):  # as transformers' count them
        model.config.num_hidden_layers = layers
    model.fewer = f"{layers} of {had} layers, the same widths"
    return model
