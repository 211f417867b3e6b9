"""Rules of the repository: pictures, pins, recordings. `make lint` checks the imports."""

import ast
import json
import re
import shutil
import tomllib
from contextlib import suppress
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
import yaml
from forked import run_figure_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
TOPICS = sorted(path.stem for path in ROOT.glob("lessons/*.md"))
PYTHONS = "3.11", "3.12", "3.13"


@pytest.mark.parametrize("topic", [*TOPICS, "notation"])
def test_a_script_draws_the_pictures_that_are_kept(topic: str, tmp_path: Path) -> None:
    for path in [ROOT / f"figures/{topic}.py", *ROOT.glob(f"figures/{topic}_*.json")]:
        shutil.copy(path, tmp_path)
    run_figure_script(tmp_path / f"{topic}.py")
    kept = {path.name for path in ROOT.glob(f"figures/{topic}_*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == kept


def test_constraints_pin_every_package_that_requirements_need() -> None:
    """constraints.txt has one version of each; the package's own dependencies are among them."""
    text = (ROOT / "constraints.txt").read_text("utf-8")
    lines = [line.partition(" #")[0].strip() for line in text.splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines}
    text = (ROOT / "requirements.txt").read_text("utf-8")
    assert "\n-c constraints.txt\n" in text
    todo = [Requirement(line) for line in text.splitlines() if re.match(r"\w", line)]
    needed: dict[str, set[str]] = {}  # by package: the extras that somebody wants
    free = set()  # packages that somebody wants without naming one version
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if not any(each.operator == "==" for each in one.specifier):
            free.add(name)
        if name in needed and one.extras <= needed[name]:
            continue
        wanted = needed.setdefault(name, set())
        wanted |= one.extras
        with suppress(PackageNotFoundError):  # only another Python needs it
            for other in map(Requirement, requires(name) or []):
                known = [{"extra": x, "python_version": v} for x in ("", *wanted) for v in PYTHONS]
                wants = not other.marker or any(map(other.marker.evaluate, known))
                if wants and not other.name.startswith(("cuda-", "nvidia-")):  # torch's choice
                    todo.append(other)
    assert free <= pinned <= set(needed)
    package = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {canonicalize_name(Requirement(line).name) for line in package["dependencies"]} <= pinned


def test_git_ignores_what_printed_commands_write() -> None:
    """The names that commands of pages and of the README write to, in the course's folder."""
    ignored = [line for line in (ROOT / ".gitignore").read_text("utf-8").splitlines() if line]
    written = (
        r"(?:--(?:into|start|folder|out|junitxml)|mkdir -p|cluster watch|(?<=\s)>) (\w[\w./-]*)"
    )
    found = set()
    for path in [*ROOT.glob("lessons/*.md"), *ROOT.glob("book/*.md"), ROOT / "README.md"]:
        text = path.read_text("utf-8")
        commands = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        commands += [
            line for line in re.findall(r"`([^`\n]+)`", text) if line.startswith("python ")
        ]
        found |= {name for each in commands for name in re.findall(written, each)}
    found -= {name for name in found if name.isupper()}  # a placeholder, such as FOLDER
    assert {"job", "jobs", "my_engine", "runs/a", "points.csv"} <= found
    tops = {f"/{name.partition('/')[0]}" + "/" * ("." not in name) for name in found}
    assert [top for top in sorted(tops) if not any(fnmatch(top, line) for line in ignored)] == []


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


def test_what_is_kept_as_made_on_a_gpu_was_made_on_one() -> None:
    """A pretended GPU has no driver."""
    made = [*ROOT.glob("book/recorded/*.ipynb"), *ROOT.glob("benchmarks/recorded/*.json")]
    for path in made:
        said = json.loads(path.read_text("utf-8"))
        device = said.get("metadata", {}).get("shardlab", said)["device"]
        assert device["kind"] == "cpu" or device["driver"], path


# No sentence that says what a function does begins with one of these.
NO_FIRST_WORDS = re.compile("(Of|What|Whether|How|Who|Whose|Which|Where|By|On|From|Its|Those|As)$")


def test_no_docstring_begins_with_a_word_that_leaves_out_its_subject() -> None:
    found = []
    for folder in ("code/shardlab", "code/shardtools", "code/shardcourse", "book/_ext", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    first = (ast.get_docstring(node) or "-").split()[0]
                    found += [f"{path}: {first}"] if NO_FIRST_WORDS.match(first) else []
    assert found == []
