"""The house keeps its own rules: floors, rooms, sizes, pins."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import shardlab

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "code/shardlab"
TOPICS = sorted(path.stem for path in ROOT.glob("lessons/*.md"))

FLOORS = {
    0: "shapes model text ranks link count show options",
    1: "memory collectives gemm check record",
    2: "data_parallel zero pipeline tensor_parallel sequence_parallel experts",
    3: "mesh checkpoint train deepspeed_engine",
    4: "strategy",
    9: "__main__",  # the door, over all of these
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
# The lesson on the whole subject uses every module; the one that it brings is the choice.
BRINGS = {"model_parallelism": "strategy"}


def unit(parts: list[str]) -> str | None:
    """The floor plan's name for the module shardlab.<parts>; None for shardlab itself."""
    if parts[:1] == ["check"] and len(parts) > 1 and (PACKAGE / f"check/{parts[1]}.py").exists():
        return f"check.{parts[1]}"
    return parts[0] if parts else None


def floor(name: str) -> float:
    """The checks of a topic stand half a floor above the topic."""
    if name.startswith("check."):
        topic = name.removeprefix("check.")
        return max(FLOOR_OF[BRINGS.get(topic, topic)], FLOOR_OF["check"]) + 0.5
    return FLOOR_OF[name]


def imported(path: Path) -> set[str]:
    """The units of the package that the file imports, wherever in it the import stands."""
    inside = list(path.relative_to(PACKAGE).with_suffix("").parts)
    package = inside[:-1]  # of a module and of an __init__ alike: the folder that it stands in
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ["shardlab", *package[: len(package) - node.level + 1]]
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [[*(node.module or "").split("."), alias.name] for alias in node.names]
        else:
            continue
        found |= {unit(name[1:]) for name in names if name[0] == "shardlab"} - {None}
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_a_module_imports_only_from_the_floors_below(path: Path) -> None:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    own = unit([part for part in parts if part != "__init__"])
    if own is None:
        assert not imported(path), "shardlab/__init__.py imports nothing: every floor imports it"
        return
    known = FLOOR_OF.keys() | BRINGS.keys()
    assert own.removeprefix("check.") in known, f"{own} has no floor: see CONTRIBUTING.md"
    for other in imported(path) & (FLOOR_OF.keys() | {unit(["check", t]) for t in TOPICS}):
        same = other == own or floor(other) == floor(own) == 0
        assert same or floor(other) < floor(own), f"{own} must not import {other}"


def test_no_module_is_longer_than_300_lines() -> None:
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in MODULES}
    assert {name: n for name, n in lengths.items() if n > 300} == {}


def test_code_is_no_package() -> None:
    assert not (ROOT / "code/__init__.py").exists()  # it would hide the standard library's `code`


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_has_all_its_rooms(topic: str) -> None:
    module = BRINGS.get(topic, topic)
    assert (PACKAGE / f"{module}.py").exists() or (PACKAGE / module / "__init__.py").exists()
    for room in (
        f"code/lessons/{topic}.py",
        f"code/shardlab/check/{topic}.py",
        f"figures/{topic}.py",
        f"tests/test_{module}.py",
    ):
        assert (ROOT / room).exists(), f"{room} is missing"
    assert list(ROOT.glob(f"figures/{topic}_*.svg"))


@pytest.mark.parametrize("topic", [*TOPICS, "index", "notation"])  # the map, the legend
def test_pictures_are_what_their_script_draws(topic: str, tmp_path: Path) -> None:
    for path in [ROOT / f"figures/{topic}.py", *ROOT.glob(f"figures/{topic}_*.json")]:
        shutil.copy(path, tmp_path)
    subprocess.run([sys.executable, tmp_path / f"{topic}.py"], check=True, cwd=tmp_path)
    kept = {path.name: path.read_text("utf-8") for path in ROOT.glob(f"figures/{topic}_*.svg")}
    assert {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.svg")} == kept


def test_lessons_stand_in_the_contents_and_on_the_map() -> None:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    files = [chapter["file"] for part in contents["parts"] for chapter in part["chapters"]]
    assert sorted(f for f in files if f.startswith("lessons/")) == [f"lessons/{t}" for t in TOPICS]
    landing = (ROOT / "book/index.md").read_text("utf-8")
    here = [row for row in landing.splitlines() if row.startswith("|") and "**here**" in row]
    assert sorted(re.search(r"lessons/(\w+)\.md", row)[1] for row in here) == TOPICS


def test_the_map_leads_to_the_lessons_that_are_here() -> None:
    text = (ROOT / "figures/index_map.svg").read_text("utf-8")
    assert sorted(re.findall(r'href="\.\./lessons/(\w+)\.html"', text)) == TOPICS


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
    granted = {
        k: v for job in workflow["jobs"].values() for k, v in job.get("permissions", {}).items()
    }
    wanted = {"pages": "write", "id-token": "write", "contents": "write"}
    assert granted == (wanted if path.stem == "pages" else {})


def test_no_page_invents_an_address_of_this_repository() -> None:
    pages = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CITATION.cff", "_config.yml")
    ]
    pages += [ROOT / "pyproject.toml", *ROOT.glob("book/*.md")]
    hosts = re.compile(r"(github|gitlab|bitbucket)\.(com|io|org)/|codeberg\.org/")
    assert [p.name for p in pages if hosts.search(p.read_text("utf-8"))] == []


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert str(citation["version"]) == shardlab.__version__


def test_every_make_target_says_what_it_does() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    assert {"book", "test", "lab", "serve", "record", "pairs", "lint", "clean"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:.* ## \S", text, re.MULTILINE), target


def test_the_script_for_clusters_runs_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "book/setup.md").read_text("utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.search(r":caption: train\.py\n\n(.*?)```", page, re.DOTALL)[1], "utf-8")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d): loss", done.stdout, re.MULTILINE) == list("01234")
