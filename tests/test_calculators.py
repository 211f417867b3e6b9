"""Calculators: the HTML of the directive, the bundled modules, and the answers of their Python."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re

import pytest
from throwaway import Book

from shardlab.common import PACKAGES, show
from shardtools.__main__ import main
from shardtools.strategy import MACHINES, usable_memory

EXT = show.ROOT / "book/_ext"
PYTHON = "_build/html/_static/python/python.js"


def import_file(path):
    spec = importlib.util.spec_from_file_location(f"tried_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculators = import_file(EXT / "browser/calculators.py")


def run_form(kind: str, **given: str | bool) -> dict:
    return json.loads(calculators.answer_question(json.dumps({"kind": kind, "given": given})))


# --- Answers of their Python ------------------------------------------------------------------


def run_json(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert main([*line.removeprefix("python -m shardlab ").split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_memory_is_what_the_command_says(capsys) -> None:
    found = run_form("memory", model="llama-3-8b", dp="64", zero="3", sequence_parallel=True)
    assert found["command"] == (
        "python -m shardlab memory --model llama-3-8b --dp 64 --zero 3 --sequence-parallel"
    )
    bytes_ = run_json(capsys, found["command"])
    rows = dict(found["rows"])
    assert rows["activations"] == f"{bytes_['activations'] / 1e9:.2f} GB"
    assert rows["most at one moment"] == f"{bytes_['peak'] / 1e9:.2f} GB"
    assert rows["most at one moment"] in found["summary"]
    room = found["summary"].partition("GPUs with room for it: ")[2].rstrip(".").split(", ")
    assert set(room) == {m.name for m in MACHINES.values() if usable_memory(m) >= bytes_["peak"]}
    gib = run_form("memory", model="llama-3-8b", dp="64", zero="3", unit="GiB")
    assert dict(gib["rows"])["activations"] == f"{bytes_['activations'] / 2**30:.2f} GiB"


def test_a_schedule_is_what_the_command_says(capsys) -> None:
    found = run_form("schedule", name="zb-h1", stages="4", microbatches="8", forward="1,1,1,1.5")
    facts = run_json(capsys, found["command"])
    assert found["picture"] == {"spans": facts["timeline"], "chunks": 1}
    rows = dict(found["rows"])
    assert rows["bubble"] == f"{100 * facts['bubble']:.2f} % of the cost"
    assert rows["cost"] == f"{facts['cost']:.6g}"


def test_a_mesh_is_what_the_command_says(capsys) -> None:
    found = run_form("mesh", dp="2", tp="2", node="2", order="tp,pp,dp")
    facts = run_json(capsys, found["command"])
    assert facts["groups"] == {"dp": [[0, 1], [2, 3]], "tp": [[0, 2], [1, 3]]}
    assert found["rows"] == [
        ["data", "0 1"],
        ["data", "2 3"],
        ["tensor", "0 | 2"],
        ["tensor", "1 | 3"],
    ]
    assert "tensor: 2 × 2 ranks, all leave their node." in found["summary"]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("memory", {"model": "llama-3-8b", "dp": "0"}),
        ("strategy", {"model": "llama-3-405b", "gpu": "h100", "gpus": "8"}),
        ("mesh", {"dp": "3", "node": "2"}),
        ("schedule", {"name": "1f1b", "stages": "four", "microbatches": "8"}),
    ],
)
def test_bad_values_get_the_command_s_message(capsys, kind, given) -> None:
    said = run_form(kind, **given)
    assert main(calculators.command_line(kind, given).split()[3:]) == 2
    assert capsys.readouterr().err == f"python -m shardlab: {said.pop('error')}\n"
    assert said == {"command": calculators.command_line(kind, given)}


def test_a_strategy_is_what_the_command_says(capsys) -> None:
    given = {"model": "llama-3-8b", "gpu": "h100", "gpus": "8", "tokens": "1e12", "zero": "1"}
    found = run_form("strategy", **given)
    best = run_json(capsys, found["command"])["best"]
    assert [row[0] for row in found["rows"]] == [one["layout"] for one in best]
    assert [float(row[4]) for row in found["rows"]] == [
        pytest.approx(one["seconds"], rel=1e-3) for one in best
    ]
    assert found["summary"].startswith(f"First is {best[0]['layout']}, ")
    assert all(len(row) == len(found["head"]) for row in found["rows"])


# --- The directive, and its bundle --------------------------------------------------------------

GOOD = """
:::{calculator} memory
:model: gpt-2
:dp: 8
:zero: 1
:::

:::{calculator} schedule
:name: zb-h1
:stages: 4
:microbatches: 8
:::

:::{calculator} strategy
:model: gpt-2
:gpu: a100
:gpus: 8
:::

:::{calculator} mesh
:dp: 2
:tp: 2
:node: 2
:order: tp,pp,dp
:::
"""
WRONG = {
    "calculator=weather": "{calculator} weather\n",
    "model=gpt-9": "{calculator} memory\n:model: gpt-9\n",
    "weather": "{calculator} memory\n:model: gpt-2\n:weather: fair\n",
    "dp=0: ": "{calculator} memory\n:model: gpt-2\n:dp: 0\n",
}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """Return the small book: calculators on its first page, wrong ones on its last, none else."""
    book = Book(tmp_path_factory.mktemp("calculators"))
    book.write("book/index.md", "# A book\n" + GOOD)
    text = (book.root / "book/execution.md").read_text("utf-8")
    book.write("book/execution.md", text + "".join(f"\n:::{w}:::\n" for w in WRONG.values()))
    book.status = book.build()
    return book


def test_form_shows_its_command_without_javascript(book: Book) -> None:
    forms = re.findall(r'<form class="calculator".*?</form>', book.read_page("book/index"), re.S)
    assert len(forms) == 4
    lines = [re.search(r'calculator-command">(.*?)</pre>', form) for form in forms]
    assert lines[0][1] == "python -m shardlab memory --model gpt-2 --dp 8 --zero 1"
    assert lines[3][1] == "python -m shardlab mesh --dp 2 --tp 2 --node 2 --order tp,pp,dp"
    for form in forms:
        assert re.search(r'aria-label="\w+ \w+', form)
        fields = re.findall(r"<(?:input|select) ", form)
        assert len(fields) == form.count("<label>") == form.count("</label>") >= 5
        assert '<div class="calculator-fields" hidden>' in form
    first = re.search(r'<script type="application/json">(.*?)</script>', forms[0])
    assert json.loads(first[1]) == run_form("memory", model="gpt-2", dp="8", zero="1")


def test_pages_without_a_calculator_load_nothing_for_one(book: Book) -> None:
    page = book.read_page("book/index")
    assert re.search(r'<script [^>]*data-python="python/python\.js\?v=\w{8}"', page)
    assert "python.js" not in re.sub(r"data-python=\S*", "", page), "Python waits until asked for"
    assert "calculator" not in book.read_page()


def test_python_is_half_a_megabyte_and_holds_the_course_as_it_is(book: Book) -> None:
    text = (book.root / PYTHON).read_text("utf-8")
    assert len(gzip.compress(text.encode(), 6)) < 500_000
    worker = json.loads(
        text[text.index("self.coursePython = ") :].partition(" = ")[2].rstrip(";\n")
    )
    held = worker[worker.rindex("update_VFS(") + len("update_VFS(") :]
    modules, _ = json.JSONDecoder().raw_decode(held)
    assert "shardlab.memory.core" in modules and "shardtools.strategy.plan" in modules
    for name, (_, source, *_) in modules.items() if modules.pop("$timestamp") == 0 else ():
        if name.partition(".")[0] in PACKAGES:
            path = show.ROOT.joinpath("code", *name.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert source == path.read_text("utf-8"), name
    assert "torch" not in modules and "shardlab.pipeline.core" not in modules
    for notice in ("Copyright (c) 2012, Pierre Quentel", "Python Software Foundation"):
        assert notice in text[:6_000]


def test_unknown_fields_are_refused(book: Book) -> None:
    assert book.status != 0
    errors = [line for line in book.log.splitlines() if "ERROR" in line or "WARNING" in line]
    assert len(errors) == len(WRONG), errors
    for complaint, error in zip(WRONG, errors, strict=True):
        assert re.search(r"book/execution\.md:\d+: ", error)
        assert complaint in error
