"""Each step from one GPU to many is requested in a sentence, when the steps before are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.train import core, ddp, fsdp, one_gpu, sampler
from shardtools import steps

SCRIPTS = {m.__name__.rpartition(".")[2]: m for m in (core, ddp, fsdp, one_gpu, sampler)}
STEP = 'torch.save(model.module.state_dict(), folder / "last.pt")'
BEST, LOAD = STEP.replace("last", "best"), 'torch.load(folder / "best.pt", device)'
FILES = {  # written with torch's other names
    STEP: 'torch.save(obj=model.module.state_dict(), f=folder / "last.pt")',
    BEST: 'torch.save(model.module.state_dict(), open(folder / "best.pt", "wb"))',
    LOAD: 'torch.load(f=folder / "best.pt", map_location=device)',
}
# Script, replacements in it; number of steps that are made, and words of the message.
ROWS = [
    ("one_gpu", {}, 0, "Each process trains alone"),
    ("core", {"    dist.destroy_process_group()\n": ""}, 1, "left open"),
    ("core", {'int(os.environ["LOCAL_RANK"])': "rank"}, 2, "first GPU"),
    ("core", {"torch.manual_seed(seed)\n": "torch.manual_seed(seed + rank)\n"}, 3, "[0, 1]"),
    ("core", {"    torch.manual_seed(seed + 1 + rank)\n": ""}, 3, "drop the same units"),
    (
        "core",
        {"    model = DistributedDataParallel(model)\n": "", "model.module": "model"},
        4,
        "Nothing averages the gradients",
    ),
    ("ddp", {}, 5, "the ranks read the same windows"),
    ("core", {"batch // world": "batch"}, 6, "A step reads 32 windows over all ranks, and 16"),
    ("core", {"seed=seed, drop_last=True": "seed=seed"}, 7, "filled up 47 windows to 48"),
    ("core", {"        sampler.set_epoch(": "        print("}, 8, "Epoch 2 has the order"),
    ("core", {"seed=seed, drop_last": "seed=7, drop_last"}, 8, "Step 1 reads other windows"),
    ("sampler", {}, 9, "the loss of its own share"),
    ("core", {"value = value / dist.get_world_size()": "pass"}, 9, "the ranks' sum"),
    (
        "core",
        {"DistributedSampler(windows, world, rank": "DistributedSampler(windows, 1, 0"},
        10,
        "Each rank validates all windows",
    ),
    (
        "core",
        {"        targets[positions >=": "        positions[positions >="},
        11,
        "targets -100",
    ),
    ("core", {"    dist.all_reduce(total)  # [2]\n": ""}, 11, "The validation loss is"),
    ("core", {"say = print if rank == 0 else lambda *_: None": "say = print"}, 12, "Rank 1 prints"),
    (
        "core",
        {"                if rank == 0:": "                if True:"},
        13,
        "Rank 1 writes last",
    ),
    ("core", {STEP: STEP.replace(".module", "")}, 13, "begin with `module.`"),
    ("core", {"    dist.barrier()": "    pass"}, 14, "while rank 0 still writes"),
    ("core", FILES, 15, "DDP keeps all on each rank"),
    ("fsdp", {"in (*model.blocks, model)": "in (model,)"}, 15, "one unit"),
    ("fsdp", {"full_state_dict=True": "full_state_dict=False"}, 16, "a rank's state dict"),
    ("fsdp", {"mesh=mesh, reshard_after_forward=True": "mesh=mesh"}, 16, "It ended with Runtime"),
    ("fsdp", {}, 17, ""),
]
DAILY = {9, 20, 24}


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_step_that_is_missing_is_named(number, tmp_path, request):
    if number not in DAILY and not request.config.getoption("--weekly"):
        pytest.skip("two ranks train once more")
    name, changes, made, words = ROWS[number]
    text = Path(SCRIPTS[name].__file__).read_text("utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / "my_train.py").write_text(text, "utf-8")
    done, wrong = steps.check_script(tmp_path / "my_train.py")
    assert (done, words in wrong) == (made, True), (done, wrong)
    assert bool(wrong) == (made < 17)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="must be a script, such as my_train.py"):
        steps.check_script(tmp_path / "none.py")
