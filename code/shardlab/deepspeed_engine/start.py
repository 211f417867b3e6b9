"""Starting DeepSpeed: quietly, without a compiler, on the device that the rank has.

Left to itself, DeepSpeed compiles a C++ extension when it joins a process group on a CPU (about a
minute, and an error without g++ and ninja), warns when it finds no GPU, and prints tables. None of
it is needed to train: the extension serves the all-reduce of its inference engine alone.
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


def prepare() -> Any:
    """Import DeepSpeed, ready for this process's device, and return the module.

    Every function here calls it. Called once before `ranks.run`, it spares each forked rank the
    import, which takes a second or more. Raises ImportError when DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ImportError(
            "this needs DeepSpeed, which is not installed here: "
            "pip install deepspeed (any 0.19; without a compiler: DS_BUILD_OPS=0)"
        )
    device = ranks.device().type
    # What DeepSpeed itself reads to learn the accelerator; without it, it warns that it guesses.
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed = importlib.import_module("deepspeed")
            # The first engine would import it, seconds' worth, in each rank again.
            importlib.import_module("torch._inductor.compile_fx")
            importlib.import_module("tqdm.auto")  # in a notebook it warns, once, of missing widgets
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before
    _use_accelerator(device)
    deepspeed.ops.__compatible_ops__ = {}  # no extension is worth compiling: so none is compiled
    for handler in deepspeed.utils.logger.handlers:
        if type(handler) is logging.StreamHandler:
            # This rank's; that of the import was the caller's, and may be closed: no setStream,
            handler.stream = sys.stderr  # which flushes it.
    deepspeed.utils.logger.setLevel(logging.ERROR)
    ranks.at_parting(_forget)
    return deepspeed


def _use_accelerator(device: str) -> None:
    """Tell DeepSpeed which device it runs on; the caller that imported it may have had another."""
    accelerator = importlib.import_module("deepspeed.accelerator.real_accelerator")
    if accelerator.get_accelerator().device_name() != device:
        module = importlib.import_module(f"deepspeed.accelerator.{device}_accelerator")
        accelerator.set_accelerator(getattr(module, f"{device.upper()}_Accelerator")())


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing that DeepSpeed prints reaches the page."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),  # progress bars
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _forget() -> None:
    """Take from DeepSpeed what it keeps of this run: a process of torchrun's has more than one."""
    name = "deepspeed.{}".format
    importlib.import_module(name("comm.comm")).cdb = None
    importlib.reload(importlib.import_module(name("utils.groups")))
    importlib.import_module(name("module_inject.layers")).set_autotp_mode(training=False)
    messages = importlib.import_module(name("runtime.pipe.p2p"))
    messages._groups = messages._grid = None
