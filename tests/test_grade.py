"""Right engines pass the grader's suite, and wrong ones fail it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import run_main
from grade_mutants import MUTANTS

from shardlab.common.show import ROOT
from shardlab.ranks import RankError
from shardtools.grade import core
from shardtools.grade.command import PARTS

RIGHT = Path(__file__).parent / "grade_right"
SUITES = {part: importlib.import_module(f"shardtools.grade.test_{part}") for part in PARTS}
CASES = {part: suite.PART.draw_cases(11) for part, suite in SUITES.items()}
ALL = [(part, number) for part, mutants in MUTANTS.items() for number in range(len(mutants))]


def is_failing(part: str, file: Path, case: core.Case) -> bool:
    try:
        core.run_case(SUITES[part].check_engine, file, case)
    except RankError:
        return True
    return False


def write_mutant(part: str, number: int, folder: Path) -> Path:
    old, new = MUTANTS[part][number]
    text = (RIGHT / f"plain/{part}.py").read_text("utf-8")
    assert old in text, old
    file = folder / f"{part}.py"
    file.write_text(text.replace(old, new, 1), "utf-8")
    return file


@pytest.mark.parametrize("file", sorted(RIGHT.rglob("*.py")), ids=lambda f: f.parent.name + f.stem)
def test_a_right_engine_passes(file, request):
    cases = CASES[file.stem] if request.config.getoption("--weekly") else CASES[file.stem][5:7]
    for case in cases:
        core.run_case(SUITES[file.stem].check_engine, file, case)


@pytest.mark.parametrize(("part", "number"), ALL)
def test_a_mutant_is_killed(part, number, tmp_path, request):
    if number and not request.config.getoption("--weekly"):
        pytest.skip("up to 14 times two to four ranks")
    file = write_mutant(part, number, tmp_path)
    assert any(is_failing(part, file, case) for case in CASES[part]), MUTANTS[part][number]


@pytest.mark.parametrize("part", PARTS)
def test_cases_are_drawn_from_the_seed(part):
    first, again, other = (SUITES[part].PART.draw_cases(seed) for seed in (1, 1, 2))
    assert first == again
    assert [c for c in first if not c.hidden] == [c for c in other if not c.hidden]
    assert all(a.seed != b.seed for a, b in zip(first, other, strict=True) if a.hidden)


@pytest.mark.weekly("grades five parts")
def test_start_files_are_written_once_and_get_no_points(tmp_path, capsys):
    folder = tmp_path / "engine"
    status, out, _ = run_main(capsys, "grade", "--start", str(folder))
    assert status == 0 and out.count("wrote") == len(PARTS)
    mine = folder / "zero.py"
    mine.write_text(f"{mine.read_text('utf-8')}\nMINE = 1\n", "utf-8")
    status, out, _ = run_main(capsys, "grade", "--start", str(folder))
    assert status == 0 and f"kept {mine}" in out and "MINE" in mine.read_text("utf-8")
    (folder / "pipeline.py").write_bytes((RIGHT / "plain/pipeline.py").read_bytes())
    (folder / "experts.py").unlink()
    grades = tmp_path / "grades.xml"
    command = [sys.executable, "-m", "shardlab", "grade", str(folder), "--junitxml", str(grades)]
    done = subprocess.run(command, cwd=ROOT / "code", capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "zero: 0 of 14 points" in done.stdout and "pipeline: 14 of 14 points" in done.stdout
    assert "case 1 (2 ranks)" in done.stdout and "NotImplementedError" in done.stdout
    assert "there is no experts.py" in done.stdout
    suite = ElementTree.parse(grades).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("70", "56")
    program = re.search(r"<< 'END'\n(.*?)\nEND\n", (ROOT / "book/project.md").read_text(), re.S)[1]
    table = subprocess.run([sys.executable, "-c", program, grades], capture_output=True, text=True)
    assert table.stdout.splitlines() == ["name," + ",".join(PARTS), "grades,0,0,0,14,0"]
