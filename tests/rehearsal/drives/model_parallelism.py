"""The plain model, and what the lesson about the whole subject runs."""

from __future__ import annotations

from shardlab.common.shapes import PRESETS
from shardlab.gpt.model import loss

from .common import batch, model


def plain_model():
    config = PRESETS["nano"]
    x, y = batch(config)
    loss(model(config)(x), y).backward()
