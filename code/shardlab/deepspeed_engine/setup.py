"""Start DeepSpeed without output, without a compiler, and on the rank's device.

By default, DeepSpeed compiles a C++ extension when it joins a process group on a CPU (about a
minute, and an error without g++ and ninja), warns if it finds no GPU, and prints tables. Training
needs none of this: only the all-reduce of DeepSpeed's inference engine uses the extension.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from shardlab import ranks


def import_deepspeed() -> Any:
    """Import DeepSpeed, configure it for this process's device, and return the module.

    All functions of this package call this one. Call it before `ranks.run` to spare each forked
    rank the import of a second or more. Raises ImportError if DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError(
            "DeepSpeed is not installed here: "
            "pip install deepspeed (any 0.19; without a compiler: DS_BUILD_OPS=0)"
        )
    device = ranks.device().type
    # DeepSpeed reads the accelerator from this variable; without it, DeepSpeed guesses and warns.
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed = importlib.import_module("deepspeed")
            # Import here what the first engine would import in each rank, which takes seconds.
            importlib.import_module("torch._inductor.compile_fx")
            importlib.import_module("tqdm.auto")  # warns of missing widgets in a notebook, once
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before
    _use_accelerator(device)
    deepspeed.ops.__compatible_ops__ = {}  # makes DeepSpeed compile no extension
    for handler in deepspeed.utils.logger.handlers:
        if type(handler) is logging.StreamHandler:
            # The old stream is the importing process's and may be closed: setStream would flush it.
            handler.stream = sys.stderr
    deepspeed.utils.logger.setLevel(logging.ERROR)
    ranks.register_cleanup(_reset_global_state)
    return deepspeed


def _use_accelerator(device: str) -> None:
    """Set DeepSpeed's accelerator: the process that imported it may have used another device."""
    accelerator = importlib.import_module("deepspeed.accelerator.real_accelerator")
    if accelerator.get_accelerator().device_name() != device:
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerator.set_accelerator(getattr(module, f"{device.upper()}_Accelerator")())


@contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress all output and warnings of DeepSpeed inside this context."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),  # progress bars
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _reset_global_state() -> None:
    """Reset DeepSpeed's global state after a run: a process under torchrun has several runs."""
    name = "deepspeed.{}".format
    importlib.import_module(name("comm.comm")).cdb = None
    importlib.reload(importlib.import_module(name("utils.groups")))
    importlib.import_module(name("module_inject.layers")).set_autotp_mode(training=False)
    messages = importlib.import_module(name("runtime.pipe.p2p"))
    messages._groups = messages._grid = None
