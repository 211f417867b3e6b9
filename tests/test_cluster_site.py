"""A computing centre's file: its contents, and the batch files, commands and pages for it."""

import base64
import re
import shlex
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import yaml
from commands import run_main
from test_cluster_slurm import read_losses, wait_for_end
from test_strategy_emit_job import ENGINES, LLAMA, NEEDS, PAIR, write_files

from shardlab.common import show
from shardlab.common.shapes import PRESETS
from shardlab.layout import Layout
from shardtools.cluster import site, slurm
from shardtools.strategy.emit import Limits, emit, render_job
from shardtools.strategy.emit.job import BATCH_FILE, SITE_FILE
from shardtools.strategy.emit.target import Target

EXAMPLES = sorted(site.EXAMPLES.glob("*.yml"))
CENTRES = yaml.safe_load((show.ROOT / "tests/centres.yml").read_text("utf-8"))
SITES = {path.stem: site.read_site(path) for path in EXAMPLES}
SITES |= {name: site.parse_site({"name": name, **said}) for name, said in CENTRES.items()}
COURSE = sorted(site.JOBS.glob("*.sbatch"))
LIGHTNING = show.ROOT / "code/shardlab/trainers/lightning.sbatch"
PLAIN = Layout(dp=4, zero=3, microbatches=2)


def plan_files(at, engine="course", config=LLAMA, layout=PLAIN):
    files = render_job(
        Target(engine, config, PAIR, layout, config.seq), Limits("00:50:00"), 30, 60.0
    )
    return files | {
        BATCH_FILE: at.adapt_batch_file(files[BATCH_FILE]),
        SITE_FILE: at.make_setup_script(),
    }


def adapt_all(at):
    """Return every batch file that the course has or writes, adapted to the centre."""
    adapt = partial(at.adapt_batch_file, use_launcher=False)
    texts = {path.name: adapt(path.read_text()) for path in [*COURSE, LIGHTNING]}
    texts["plan"] = at.adapt_batch_file(emit("slurm", LLAMA, PAIR, PLAIN))
    for engine in ENGINES:
        if engine != "megatron" or at.launcher != "srun":
            texts[engine] = plan_files(at, engine)[BATCH_FILE]
    return texts


@pytest.mark.parametrize("name", SITES)
def test_every_batch_file_is_made_for_each_site(name):
    at = SITES[name]
    texts = adapt_all(at)
    for name, text in texts.items():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        head = text[: re.search("(?m)^[^#\n]", text).start()]
        for key, value in at.get_job_options().items():
            assert head.count(f"#SBATCH {key}={value}") == 1, (name, key)
        assert all(len(re.findall(rf"#SBATCH {one}(?!\S)", head)) == 1 for one in at.sbatch), name
        assert ("--gres=gpu:" in head) == bool(at.gres), name
        assert not (at.gres and "--gpus" in head), name
        started = len(re.findall("(?m)^srun ", text))
        if at.container:
            program = at.runtime.split()[0]
            flag = {"pyxis": "--container-image=", "podman-hpc": "podman-hpc run"}.get(
                program, f"{program} exec"
            )
            assert text.count(flag) == started, name
            assert text.count("/bin/activate") == (started if at.environment else 0), name
            assert f'"{at.container}"' in text or name == "devices.sbatch", name
        lines = at.get_setup_lines()
        assert ("source ./site.sh" in text) or all(line in text for line in lines), name
    subprocess.run(["bash", "-n"], input=at.make_setup_script(), text=True, check=True)
    if at.launcher == "srun":
        assert "torchrun --" not in texts["course"] and "--ntasks-per-node=2 " in texts["course"]


def test_a_container_s_programs_start_in_its_environment():
    """A virtual environment on an image's PyTorch works only inside it, as on LUMI and CSCS."""
    text = (site.JOBS / "torchrun.sbatch").read_text()
    text = SITES["LUMI"].adapt_batch_file(text, use_launcher=False)
    started = text[text.index("\nsrun ") :].replace("\\\n ", "").split()
    order = (
        "singularity",
        "/project/project_462000123/pytorch.sif",
        "source",
        "torch.distributed.run",
    )
    places = [next(i for i, word in enumerate(started) if part in word) for part in order]
    assert places == sorted(places)
    assert "activate" not in SITES["LUMI"].make_setup_script()


def test_a_file_without_a_key_changes_no_batch_file():
    for path in COURSE:
        text = path.read_text()
        made = site.parse_site({}).adapt_batch_file(text)
        assert made == text


WRONG = {
    "partitions: gpu": "'partitions' (did you mean partition?)",
    "gpus_per_node: four": "gpus_per_node='four'",
    "account: a b": "account='a b'",
    "modules: CUDA": "modules='CUDA'",
    "launcher: mpirun": "launcher='mpirun'",
    "scheduler: pbs": "scheduler='pbs'",
    "sbatch: [--nodes=4]": "sbatch=('--nodes=4',)",
    # Values that a shell would not read as one word, or would read beyond their line.
    "environment: ~bob/venv": "environment='~bob/venv'",
    "scratch: '/a/${b'": "scratch='/a/${b'",
    "runtime: apptainer --bind=$(touch x)": "runtime='apptainer --bind=$(touch x)'",
    "gres: gpu:a100:4": "gres='gpu:a100:4'",
    "account: [": "YAML",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_a_file_cannot_say_is_one_clear_error(text, tmp_path, capsys):
    path = tmp_path / "cluster.yml"
    path.write_text(text)
    given = ("--site", str(path), "--into", str(tmp_path))
    status, _, error = run_main(capsys, "cluster", "files", *given)
    assert status == 2 and error.count("\n") == 1
    assert f"site={str(path)!r}: " in error and WRONG[text] in error
    assert not list(tmp_path.glob("*.sbatch"))


def test_the_planner_takes_the_file(tmp_path, capsys):
    ask = ["--model", "nano", "--gpu", "a100", "--gpus", "8", "--batch", "16"]
    given = ["--site", str(site.EXAMPLES / "university-modules.yml")]
    more = ["--time", "02:00:00", "--into", str(tmp_path)]
    status, _, error = run_main(capsys, "strategy", "emit", "slurm", *ask, *given, *more)
    assert status == 0 and "profile course" in error, error
    out = (tmp_path / "plan.sbatch").read_text()
    assert all(f"#SBATCH --{one}" in out for one in ("nodes=2 ", "gres=gpu:a100:4", "time=02:00"))
    folder = tmp_path / "jo b$(touch X)"
    whole = ["strategy", "emit", "course", *ask, *given, "--into", str(folder)]
    status, out, error = run_main(capsys, *whole, "--partition", "long")
    assert status == 0 and "Put your site's modules" not in out, error
    asked = shlex.split(out[out.index("  cd ") :])
    assert asked[1] == str(folder) and {"--partition=long", "--gres=gpu:a100:4"} <= set(asked)
    text = (folder / BATCH_FILE).read_text()
    assert text.count("--partition=") == 1 and "--partition=long" in text
    assert "module load Python/3.12 CUDA/12.6" in (folder / SITE_FILE).read_text()


def test_typed_commands_get_what_the_site_asks_for():
    at = site.parse_site({"account": "mine", "partition": "gpu"})
    made = at.adapt_command("srun --nodes=2 hostname")
    assert made.startswith("srun --account=mine --partition=gpu -")
    inside = "srun --overlap --jobid=7 --pty bash"  # in jobs that contain this command
    assert at.adapt_command(inside) == inside and at.adapt_command("squeue --me") == "squeue --me"
    at = site.parse_site({"constraint": "gpu&hbm80g", "gres": "gpu:a100", "sbatch": ["--mem=0"]})
    made = at.adapt_command("salloc --nodes=2 --gpus-per-node=4")
    assert made == "salloc --constraint='gpu&hbm80g' --nodes=2 --gres=gpu:a100:4"
    line = "python -m shardlab strategy emit course --model nano --into job"
    assert at.adapt_command(line) == f"{line} --site cluster.yml"


@NEEDS
def test_slurm_takes_what_is_made(tmp_path):
    """The test's Slurm has no accounts, reservations or types of GPU: these are omitted."""
    with slurm.run_cluster(tmp_path / "box", cpus=8) as box:
        for path in EXAMPLES:
            omitted = dict.fromkeys(("account", "reservation", "gres"), "")
            at = replace(site.read_site(path), **omitted)
            for name, text in adapt_all(replace(at, partition="all")).items():
                folder = write_files({f"{name}.sh": text}, tmp_path / path.stem)
                box.run(["sbatch", "--test-only", f"{name}.sh"], cwd=folder)


@pytest.mark.weekly("trains once more: another job's ranks are torchrun's each day")
@NEEDS
def test_srun_starts_the_ranks_of_a_planned_job(tmp_path):
    nano, at = replace(PRESETS["nano"], seq=16), site.parse_site({"launcher": "srun"})
    folder = write_files(plan_files(at, "course", nano, Layout(dp=2, zero=1)), tmp_path / "job")
    with slurm.run_cluster(tmp_path / "box", cpus=8) as box:
        more = {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE"}
        how = {"cwd": folder, "env": {**box.environment, **more, "CUDA_VISIBLE_DEVICES": ""}}
        options = ["--limit", "4000", "--report", "1", "--steps", "3"]
        number = box.run(["sbatch", "--parsable", BATCH_FILE, *options], **how).stdout.strip()
        said = folder / f"train-{number}.err"
        assert wait_for_end(box, number) == "COMPLETED", said.read_text()
        assert len(read_losses(folder / "run")) == 3
        assert "rank 1 of 2" in (folder / f"train-{number}.out").read_text()


PAGE = """\

```bash
srun hostname
squeue --me
```

```bash
#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8
srun torchrun train.py
```

```{code-cell} ipython3
from IPython.display import HTML
HTML(open("shown.html").read())
```
"""


def test_pages_are_made_for_the_site_that_one_line_names(tmp_path):
    from throwaway import Book  # takes seconds

    book = Book(tmp_path)
    shown = show.file(site.JOBS / "one.sbatch", "bash").html
    book.write("shown.html", shown)
    book.write("lessons/shown.html", shown)
    book.edit("lessons/small.md", "See [the code]", f"{PAGE}\nSee [the code]")
    book.edit("_config.yml", 'cluster_file: ""', "cluster_file: mine.yml")
    book.write("mine.yml", "accounts: mine\n")
    assert book.build() != 0
    assert "cluster_file='" in book.log and "key 'accounts'" in book.log, book.log
    book.write("mine.yml", "name: mine\naccount: me\ncontainer: a.sif\nmodules: [CUDA]\n")
    text = _read_page(book.build_checked())
    page = re.sub("<[^>]+>", "", text)
    assert "srun --account=me hostname\nsqueue --me" in page
    assert "#SBATCH --account=me" in page and "apptainer exec --nv" in page
    (saved,) = re.findall(r'base64,([^"]+)" download="one.sbatch"', text)
    assert base64.b64decode(saved).decode() == site.parse_site(yaml.safe_load(
        (tmp_path / "mine.yml").read_text()
    )).adapt_batch_file((site.JOBS / "one.sbatch").read_text(), use_launcher=False)  # fmt: skip
    book.write("mine.yml", "account: you\n")  # a page is rebuilt when its centre changes
    assert "#SBATCH --account=you" in re.sub("<[^>]+>", "", _read_page(book.build_checked()))


def _read_page(book):
    return (book.root / "_build/html/lessons/small.html").read_text("utf-8")
