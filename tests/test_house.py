"""The house keeps its own rules: rooms, sizes, pins. What imports what, `make lint` holds."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from forked import draw
from visible import place_of

from shardcourse.build import index

ROOT = Path(__file__).resolve().parents[1]
TOPICS = sorted(path.stem for path in ROOT.glob("lessons/*.md"))

# The lesson on the whole subject uses every module; the one that it brings is another's.
BRINGS = {name: topic.module for name, topic in index.read(ROOT).topics.items() if topic.module}


def test_code_is_no_package() -> None:
    assert not (ROOT / "code/__init__.py").exists()  # it would hide the standard library's `code`


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_has_all_its_rooms(topic: str) -> None:
    module = BRINGS.get(topic, topic)
    assert place_of(module)
    for room in (
        f"code/lessons/{topic}.py",
        f"code/shardcourse/exercises/{topic}.py",
        f"figures/{topic}.py",
        f"tests/test_{module}.py",
    ):
        assert (ROOT / room).exists(), f"{room} is missing"
    assert list(ROOT.glob(f"figures/{topic}_*.svg"))


@pytest.mark.parametrize("topic", [*TOPICS, "notation"])
def test_a_script_draws_the_pictures_that_are_kept(topic: str, tmp_path: Path) -> None:
    for path in [ROOT / f"figures/{topic}.py", *ROOT.glob(f"figures/{topic}_*.json")]:
        shutil.copy(path, tmp_path)
    draw(tmp_path / f"{topic}.py")
    kept = {path.name for path in ROOT.glob(f"figures/{topic}_*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == kept


# Without a mesh, their second argument or by keyword, these take "the accelerator of this machine".
# A run on the CPU of a machine with a GPU has another device.
TAKE_A_MESH = {
    "fully_shard": "mesh",
    "distribute_tensor": "device_mesh",
    "distribute_module": "device_mesh",
    "parallelize_module": "device_mesh",
}


def test_whatever_takes_a_mesh_is_given_it() -> None:
    bare = []
    for folder in ("code", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                keywords = {keyword.arg for keyword in node.keywords}  # None: ** of some dict
                given = keywords & {TAKE_A_MESH.get(name), None} or node.args[1:]
                if name in TAKE_A_MESH and not given:
                    bare.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert bare == []


def test_requirements_are_exact() -> None:
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    lines = [line.partition(" #")[0].strip() for line in lines if not line.startswith("#")]
    loose = [n for n in lines if n and not re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.]+( ;.*)?", n)]
    assert lines and not loose
    assert "torch==2.13.0" in lines


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.stem)
def test_workflows_pin_their_actions_and_ask_for_little(path: Path) -> None:
    text = path.read_text("utf-8")
    uses = re.findall(r"^\s*(?:- )?uses: (.*)$", text, re.MULTILINE)
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    granted = {k for job in workflow["jobs"].values() for k in job.get("permissions", {})}
    wanted = {
        "pages": {"pages", "id-token", "contents"},
        "gpu": {"contents", "pull-requests"},
        "release": {"contents"},
    }
    assert granted == wanted.get(path.stem, set())


def test_a_machine_of_ones_own_runs_only_what_its_owner_asked_for() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text("utf-8"))
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}  # `on` is a truth value in YAML
    own = [job for job in workflow["jobs"].values() if "self-hosted" in job["runs-on"]]
    (job,) = own
    assert "gpu" in job["runs-on"]
    assert job["if"] == "github.event_name == 'workflow_dispatch' || vars.GPU_RUNNER == 'true'"
    checkout = next(step for step in job["steps"] if "checkout" in step.get("uses", ""))
    assert checkout["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.stem)
def test_scripts_of_workflows_are_shell(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
    for script in (step["run"] for job in jobs for step in job["steps"] if "run" in step):
        assert "${{" not in script  # values come in as variables: none is taken for a command
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_what_is_kept_as_made_on_a_gpu_was_made_on_one() -> None:
    """A pretended GPU has no driver."""
    made = [*ROOT.glob("book/recorded/*.ipynb"), *ROOT.glob("benchmarks/recorded/*.json")]
    for path in made:
        said = json.loads(path.read_text("utf-8"))
        device = said.get("metadata", {}).get("shardlab", said)["device"]
        assert device["kind"] == "cpu" or device["driver"], path


def test_what_waits_for_the_whole_run_is_run_once_a_week() -> None:
    """Else it would be run by nobody."""
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text("utf-8")
    named = [word for line in re.findall(r"--whole (.*)'", weekly) for word in line.split()]
    asks = re.compile(r'getoption\("--whole"\)')
    for path in (ROOT / "tests").rglob("test_*.py"):
        if asks.search(path.read_text("utf-8")):
            place = path.relative_to(ROOT).as_posix()
            assert any(place == name or place.startswith(f"{name}/") for name in named), place
