"""Right engines pass, wrong ones do not, and whoever is told learns which case, not the answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from commands import ran
from grade_mutants import MUTANTS

from shardlab.common.show import ROOT
from shardtools.grade import core, report
from shardtools.grade.command import PARTS

RIGHT = Path(__file__).parent / "grade_right"
ENGINES = sorted(path.name for path in RIGHT.iterdir())
# Of each part: a case that the plain engine passes each day, and mutants that another one finds.
DAILY = {
    "data_parallel": (13, {10: 2, 6: 7, 17: 11}),
    "zero": (6, {22: 1, 14: 12, 23: 1}),
    "tensor_parallel": (10, {16: 1, 17: 9}),
    "pipeline": (13, {16: 4, 14: 12, 17: 4}),
    "experts": (8, {12: 6, 13: 3}),
}
ALL = [(part, number) for part, mutants in MUTANTS.items() for number in range(len(mutants))]


def mutant(part: str, number: int, folder: Path) -> Path:
    old, new = MUTANTS[part][number]
    text = (RIGHT / f"plain/{part}.py").read_text("utf-8")
    assert old in text, old
    file = folder / f"{part}.py"
    file.write_text(text.replace(old, new, 1), "utf-8")
    return file


@pytest.mark.parametrize("part", PARTS)
def test_a_right_case_passes(part, monkeypatch):
    monkeypatch.setitem(sys.modules, part, ModuleType(part))  # another one, imported before
    case = PARTS[part].cases(7)[DAILY[part][0] - 1]
    result = core.judge(PARTS[part], RIGHT / f"plain/{part}.py", case)
    assert result.passed, result.message
    assert 0 < result.bytes[0] <= result.bytes[1] and 0 < result.messages[0] <= result.messages[1]


@pytest.mark.parametrize(
    ("part", "number", "case"),
    [(p, *one) for p, (_, ones) in DAILY.items() for one in ones.items()],
)
def test_a_mutant_fails_the_case_that_is_for_it(part, number, case, tmp_path):
    case = PARTS[part].cases(7)[case - 1]
    assert not core.judge(PARTS[part], mutant(part, number, tmp_path), case).passed


def test_a_share_may_be_reduced_to_its_owner(tmp_path):
    text = (RIGHT / "plain/zero.py").read_text("utf-8")
    scatter = "dist.reduce_scatter_tensor(share.grad, self.flat(kind, own), group=self.group)\n"
    assert scatter in text
    reduce = """for owner, piece in enumerate(self.flat(kind, own).chunk(n)):
                dist.reduce(piece, group_dst=owner, group=self.group)
                if owner == self.group.rank():
                    share.grad.copy_(piece)
"""
    file = tmp_path / "zero.py"
    file.write_text(text.replace(scatter, reduce), "utf-8")
    result = core.judge(PARTS["zero"], file, PARTS["zero"].cases(7)[1])
    assert result.passed, result.message


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_right_engine_passes_all(engine, part, request):
    if not request.config.getoption("--whole"):
        pytest.skip("a dozen times two to four ranks")
    grade = core.grade(PARTS[part], RIGHT / engine / f"{part}.py", seed=11)
    assert [one.message for one in grade.results if not one.passed] == []


@pytest.mark.parametrize(("part", "number"), ALL)
def test_a_mutant_is_killed(part, number, tmp_path, request):
    if not request.config.getoption("--whole"):
        pytest.skip("up to a dozen times two to four ranks")
    file = mutant(part, number, tmp_path)
    cases = PARTS[part].cases(11)
    assert core.unfit(PARTS[part], file) or any(
        core.judge(PARTS[part], file, case).message for case in cases
    ), MUTANTS[part][number]


def test_there_are_fifty_mutants_and_five_engines():
    assert len(ALL) >= 50 and len(set(ALL)) == len(ALL) and len(ENGINES) >= 5
    assert all((RIGHT / engine / f"{part}.py").is_file() for engine in ENGINES for part in PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_cases_are_drawn_from_the_seed(part):
    first, again, other = (PARTS[part].cases(seed) for seed in (1, 1, 2))
    assert first == again
    assert [c for c in first if not c.hidden] == [c for c in other if not c.hidden]
    assert all(a.seed != b.seed for a, b in zip(first, other, strict=True) if a.hidden)


def test_empty_files_are_written_once_and_fail(tmp_path, capsys):
    folder = tmp_path / "engine"
    status, out, _ = ran(capsys, "grade", "--start", str(folder))
    assert status == 0 and out.count("wrote") == len(PARTS)
    mine = folder / "data_parallel.py"
    empty = mine.read_text("utf-8")
    mine.write_text(f"{empty}\nMINE = 1\n", "utf-8")
    status, out, _ = ran(capsys, "grade", "--start", str(folder))
    assert (
        status == 0 and f"kept {mine}" in out and mine.read_text("utf-8") == f"{empty}\nMINE = 1\n"
    )
    options = ["--part", "data_parallel", "--json", "o.json", "--junit", "o.xml"]
    paths = [str(tmp_path / word) if word.startswith("o.") else word for word in options]
    status, out, _ = ran(capsys, "grade", str(folder), *paths)
    assert status == 1 and "case 1 (2 ranks): " in out and "NotImplementedError" in out
    found = json.loads((tmp_path / "o.json").read_text("utf-8"))
    total = found["total"]
    assert found["passed"] == 0 and len(found["parts"][0]["cases"]) == total > 5
    assert all(case["message"] for case in found["parts"][0]["cases"])
    suite = ElementTree.parse(tmp_path / "o.xml").getroot().find("testsuite")
    assert suite.get("tests") == suite.get("failures") == str(total) == str(len(suite))


def test_what_ranks_raise_alike_is_said_once_without_the_graders_lines():
    work = "  at grade/tensor_parallel.py, line 104, in work: (3 * loss).backward()"
    inner = "  at count/traffic.py, line 96, in __torch_dispatch__: return func(*args)"
    mine = "  at mine/zero.py, line 7, in step: dist.reduce(g)"
    both = "\n".join(f"rank {rank} of 3 raised E: e\n{work}\n{mine}\n{inner}" for rank in (0, 2))
    rest = "Rank 1 was stopped."
    assert core.told(f"{both}\n{rest}") == f"ranks 0, 2 of 3 raised E: e\n{mine}\n{rest}"
    # A result that no backward can follow: where the file has no line, the grader's says more.
    assert core.told(f"rank 1 of 2 raised E: e\n{work}") == f"rank 1 of 2 raised E: e\n{work}"
    unlike = "rank 0 of 2 raised E: [3, 4]\nrank 1 of 2 raised E: [3, 5]"
    assert core.told(unlike) == unlike


ONE, TWO = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])


@pytest.mark.parametrize(
    ("got", "want", "said"),
    [
        ([TWO, TWO], [ONE, ONE], "x differs by 2: it is 2 times as large on all ranks"),
        ([ONE, TWO], [ONE, ONE], "x differs by 2: it is 2 times as large on rank 1; the other"),
        ([3 * ONE, TWO], [ONE, ONE], "x differs by 4 on all ranks, and on each differently"),
        ([2 * ONE, 2 * TWO], [ONE, TWO], "x differs by 2: it is 2 times as large on all ranks"),
        ([2 * ONE, 3 * TWO], [ONE, TWO], "x differs by 2 on all ranks"),
        ([1.0003 * ONE] * 2, [ONE, ONE], "x differs by 0.0006 on all ranks"),
        ([1.0001 * ONE] * 2, [ONE, ONE], "x differs by 0.0002 on all ranks"),
        ([0 * ONE] * 2, [ONE, ONE], "x differs by 2: it is 0 on all ranks"),
        ([TWO, TWO], [None, None], "x should be None, and is a tensor on all ranks"),
    ],
)
def test_what_differs_is_said_as_it_is(got, want, said):
    case = PARTS["zero"].cases(0)[0]
    found = core.differs([{"x": t} for t in got], [{"x": t} for t in want], case)
    assert found.startswith(said) and "differently" not in found.removeprefix(said)


def test_a_case_that_fails_like_the_one_before_is_named():
    first, second, third = PARTS["zero"].cases(0)[:3]
    results = [core.Result(case, f"no\n{i}") for i, case in ((1, first), (1, second), (2, third))]
    said = list(report.lines(core.Grade("zero", results)))[1:]
    assert [line.split("): ")[-1].strip() for line in said] == [
        "no",
        "1",
        "case 2: the same",
        "no",
        "2",
    ]


def test_what_cannot_be_imported_is_said_once(tmp_path):
    part, file = PARTS["data_parallel"], tmp_path / "data_parallel.py"
    assert core.unfit(part, file) == "there is no data_parallel.py in this folder"
    file.write_text("class DataParallel: pass\n", "utf-8")
    assert core.unfit(part, file) == "data_parallel.py does not define joined_loss"
    file.write_text("import tochr\n", "utf-8")
    grade = core.grade(part, file, 0)
    assert grade.passed == 0 and "No module named 'tochr'" in grade.results[0].message
    assert len(list(report.lines(grade))) < 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\ufeff# Größe\r\nclass DataParallel: pass\r\njoined_loss = 1\r\n", ""),
        ("from .zero import flat\n", "it raised ImportError: attempted relative import"),
        ("class DataParallel\n", "it raised SyntaxError: expected ':' (data_parallel.py, line 1)"),
        ("import sys\nsys.exit(0)\n", "it called sys.exit(0)"),
    ],
)
def test_of_a_file_its_own_lines_are_said(text, said, tmp_path):
    file = tmp_path / "data_parallel.py"
    file.write_bytes(text.encode())
    found = core.unfit(PARTS["data_parallel"], file)
    assert (said in found) if said else not found
    assert "core.py" not in found and "rank" not in found


def test_the_page_s_table_has_a_row_for_each_person(tmp_path):
    program = re.search(r"<< 'END'\n(.*?)\nEND\n", (ROOT / "book/project.md").read_text(), re.S)[1]
    results = [core.Result(case) for case in PARTS["zero"].cases(0)]
    files = [tmp_path / "ada l.json", tmp_path / "bob.json"]
    for file in files:
        file.write_text(report.as_json([core.Grade("zero", results)]), "utf-8")
        results = [core.Result(one.case, "wrong") for one in results]
    command = [sys.executable, "-c", program, *map(str, files)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split("\n") == ["name,zero", "ada l,14", "bob,0", ""]


def test_a_report_holds_what_xml_cannot():
    case = PARTS["data_parallel"].cases(0)[0]
    result = core.Result(case, "an \x1b[31m error & <more>\nof two lines")
    (failure,) = ElementTree.fromstring(report.as_junit([core.Grade("zero", [result])])).iter(
        "failure"
    )
    assert failure.get("message") == "an ?[31m error & <more>" and failure.text.endswith(
        "two lines"
    )
