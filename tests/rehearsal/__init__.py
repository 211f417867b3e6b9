"""The rehearsal: a pretended CUDA and a pretended nccl, on a machine that has neither.

Tensors are plain tensors on the CPU whose storage carries *paint*: the device where they would be.
Processes, gloo and numbers are real. What CUDA or nccl would refuse, or get wrong in silence,
raises. See CONTRIBUTING.md, "The rehearsal"; an idea a file:

    machine     the GPUs that are pretended, and what is done with a finding
    paint       the colours, and memory
    move        from device to device, and what the host reads
    factories   new tensors, and random numbers
    mode        every operator, as it passes: what a GPU would refuse
    kernels     operators that CUDA computes in another way
    messages    tensors under way, and the groups that carry them
    connections nccl's, which are made when the first message goes
    cuda        torch.cuda's face, and clocks
    storages    files with tensors in them

Settings, from the environment, because every child has to find them: REHEARSE=<GPUs>;
REHEARSE_FORK=1 lets ranks be forked although the caller "used CUDA" (quick); REHEARSE_LOG=<file>
gets a line for every finding; REHEARSE_DEVICE=xpu: Intel's GPUs, whose messages xccl moves, and
gloo none.
"""

from __future__ import annotations


def install(gpus: int) -> None:
    """Pretend `gpus` GPUs in this process, its threads, and whatever it forks."""
    # Its import fails once torch.version.cuda is set, and the first operator in a mode needs it.
    import torch._dynamo

    from . import cuda, factories, kernels, machine, messages, mode, move, storages

    machine.HERE.gpus = gpus
    try:
        for part in (factories, move, kernels, cuda, storages, messages, mode):
            part.install()
    except AttributeError as error:  # a private name of torch is gone
        raise RuntimeError(
            f"the rehearsal is made for torch 2.13, this is {torch.__version__}: {error}"
        ) from error
