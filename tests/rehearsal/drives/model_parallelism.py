"""The plain model, and what the lesson about the whole subject runs."""

from __future__ import annotations

from shardlab.model import loss
from shardlab.shapes import PRESETS

from .common import batch, model


def plain_model():
    config = PRESETS["nano"]
    x, y = batch(config)
    loss(model(config)(x), y).backward()
