"""Lessons as notebooks: their text, their folder, and execution without the course."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from throwaway import HEADER

from shardcourse import build
from shardcourse.build import lab
from shardcourse.build.notebook_export import export_notebook
from shardlab.common import PACKAGES

CELL = "```{code-cell} ipython3\n:tags: [hide-input]\n\n# Sets up\nx = 1\n```\n"
LESSON = """\
# A lesson

See [above](#here), [elsewhere](other.md#there), [the code](../code/a.py), [none](../code/b.py).
Save {download}`a file <../code/a.py>`.
It is old {cite}`one2001, two2002`, says {cite:t}`three2003`.
A {term}`rank <ranks>`; `{cite}` stays.

![A box [a]](../figures/box.svg)

````{admonition} False: "it is so"
:class: checked

It is **not**.

```python
x = {1: "{cite}`one2001`"}
```
````

(here)=
## Exercises

:::{step-through} Two steps
1. ![One](../figures/box.svg)

   First.
:::

:::{calculator} schedule
:name: 1f1b
:stages: 4
:microbatches: 8
:::

```{exercise-start} Count (easy)
:label: ex-count
```

How many?

```{code-cell} ipython3
answer = ...
```

```{exercise-end}
```

```{solution-start} ex-count
:label: sol-count
:class: dropdown
```

Two.

```{code-cell} ipython3
answer = 2
```

```{solution-end}
```

After it.
"""
BIB = """\
@article{one2001, author = {M{\\"u}ller, A. and others}, year = {2001}, url = {https://a.b/1}}
@article{two2002, author = {van Dam, B. and Doe, C.}, year = {2002}, eprint = {2.2}}
@book{three2003, author = {{ACME}}, year = {2003}}
"""
TOPICS = """\
parts:
  - part: One
    topics:
      - {topic: one, title: One, able: do one}
      - {topic: other, title: Other, able: do other}
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    box = "<svg><style>svg:root{color:#111}@media(prefers-color-scheme:dark){svg:root{color:#eee}}"
    files = {
        "lessons/one.md": HEADER + LESSON + "\n" + CELL,
        "lessons/other.md": HEADER + "# Another\n\n## There\n\n" + CELL,
        "book/references.bib": BIB,
        "book/topics.yml": TOPICS,
        "figures/box.svg": f"{box}</style></svg>",
        "code/a.py": "",
        "_toc.yml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def list_texts(book: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == "markdown"]


def test_a_lesson_in_plain_markdown(course):
    book = export_notebook("one", course, beside=True)
    nbformat.validate(book)
    first, exercises, asked, solved, after = list_texts(book)
    assert "[above](#here), [elsewhere](other.ipynb), [the code](../code/a.py), none." in first
    assert "Save [a file](../code/a.py)." in first
    assert "([Müller et al., 2001](https://a.b/1); [van Dam and Doe, 2002](" in first
    assert "https://arxiv.org/abs/2.2" in first and "says ACME (2003).\nA rank; `{cite}`" in first
    assert "![A box [a]](../figures/box.svg)" in first
    box = '<div class="alert alert-danger">\n\n**False: "it is so"**\n\nIt is **not**.\n\n'
    assert box in first and 'x = {1: "{cite}`one2001`"}\n```\n\n</div>' in first
    assert '<a id="here"></a>' in first
    assert exercises.startswith("## Exercises\n\n**Two steps**\n\n1. ![One](../figures/box.svg)")
    line = "python -m shardlab schedule 1f1b --stages 4 --microbatches 8"
    assert exercises.endswith(f"In a terminal:\n\n```bash\n{line}\n```")
    assert asked == "### Exercise 1: Count (easy)\n\nHow many?"
    words = "<details><summary><b>Solution to exercise 1</b></summary>\n\nTwo.\n\n</details>"
    assert solved == words and after == "After it."


def test_what_is_folded(course):
    asked, solved, setup = (
        cell for cell in export_notebook("one", course).cells if cell.cell_type == "code"
    )
    assert asked.source == "answer = ..." and "jupyter" not in asked.metadata
    assert solved.source == "# Solution to exercise 1\nanswer = 2"
    assert solved.metadata.jupyter == {"source_hidden": True, "outputs_hidden": True}
    assert setup.source.startswith("# Sets up")
    assert setup.metadata.jupyter == {"source_hidden": True}


def test_a_notebook_that_is_sent_away_holds_its_pictures_and_leads_nowhere(course):
    text = "\n".join(list_texts(export_notebook("one", course)))
    assert "See [above](#here), elsewhere, the code, none." in text and "`shardlab`" in text
    assert text.count('src="data:image/svg+xml;base64,') == 2 and "figures/" not in text
    colab = export_notebook("one", course, picture=lambda path: f"https://a.b/{path}")
    assert "![One](https://a.b/../figures/box.svg)" in "\n".join(list_texts(colab))


def test_a_directive_without_a_plain_form_is_named(course):
    (course / "lessons/one.md").write_text(HEADER + "# T\n\n```{mermaid}\nx\n```\n")
    with pytest.raises(ValueError, match="{mermaid}: no plain form"):
        export_notebook("one", course)


def test_no_page_keeps_what_only_the_site_understands(root):
    for name in build.list_pages(root):
        if name == "book/index":  # cards and columns; the lab has its own table of contents
            continue
        book = export_notebook(name, root, beside=True)
        nbformat.validate(book)
        for text in list_texts(book):
            prose = re.sub(r"(?ms)^```\w*$.*?^```$", "", text)
            assert not re.search(r"\{[a-z:-]+\}`|^(```|:::)|^\([\w-]+\)=$", prose, re.M), name
            for path in re.findall(r"\]\((\.\./[^)#]*)", prose):
                assert (root / "lab" / path).resolve().exists(), (name, path)


# --- The folder lab/ --------------------------------------------------------------------------


def test_lab_is_written_once_and_anew_when_a_lesson_changes(course):
    assert lab.write_notebooks(course) == [
        f"wrote lab/{n}.ipynb" for n in ("contents", "one", "other")
    ]
    contents, one = (nbformat.read(course / f"lab/{n}.ipynb", 4) for n in ("contents", "one"))
    assert "- [A lesson](one.ipynb)\n- [Another](other.ipynb)" in contents.cells[0].source
    assert "Next: [Another](other.ipynb)" in one.cells[-1].source
    assert lab.write_notebooks(course) == []
    with (course / "lessons/other.md").open("a") as file:
        file.write("\nMore.\n")
    assert lab.write_notebooks(course) == ["wrote lab/other.ipynb"]
    assert not (course / "lab/kept").exists()


def test_nothing_that_a_reader_did_is_lost(course):
    lab.write_notebooks(course)
    path = course / "lab/other.ipynb"
    book = nbformat.read(path, 4)
    book.cells[1].outputs = [nbformat.v4.new_output("stream", text="mine\n")]
    nbformat.write(book, path)
    mine = path.read_text()
    assert lab.write_notebooks(course) == [] and path.read_text() == mine  # the lesson is unchanged
    with (course / "lessons/other.md").open("a") as file:
        file.write("\nMore.\n")
    (said,) = lab.write_notebooks(course)
    assert "More." in path.read_text()
    (kept,) = (course / "lab/kept").glob("*.ipynb")
    assert str(kept.relative_to(course)) in said and kept.read_text() == mine


# --- Outside of the course --------------------------------------------------------------------


def list_imports(path: Path) -> set[str]:
    """Return the packages that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {*PACKAGES}


ELSEWHERE = {"datasets", "pynvml", "job", "pytest"}  # optional packages of the reader


def test_what_lessons_import_is_declared(root):
    """`pip install` of the package has to install all that a downloaded notebook needs."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def list_names(listed: list[str]) -> set[str]:
        plain = (re.split(r"[<>=]", entry)[0] for entry in listed)
        return {{"pyyaml": "yaml"}.get(name, name.replace("-", "_")) for name in plain}

    record_packages = list_names(extras.pop("record"))
    allowed = list_names([*project["dependencies"], *sum(extras.values(), [])]) | ELSEWHERE
    for path in (root / "code").rglob("*.py"):
        build = root / "code/shardcourse/build" in path.parents
        assert list_imports(path) <= allowed | (record_packages if build else set()), path


@pytest.mark.parametrize(
    ("topic", "extras"),
    [
        ("model_parallelism", "[deepspeed]"),  # shardlab.deepspeed_engine imports it
        ("memory", "[deepspeed]"),  # shardtools.hub imports transformers
        ("tensor_types", "[spmd_types]"),  # which the lesson imports; it only speaks of DeepSpeed
        ("trainers", "[deepspeed,lightning]"),
        ("strategy", ""),
    ],
)
def test_a_notebook_for_colab_begins_by_installing_what_it_imports(root, topic, extras):
    made = runpy.run_path(str(root / ".github/notebooks.py"))["notebook"](topic, "https://g.it/a/b")
    before = "DS_BUILD_OPS=0 " if "deepspeed" in extras else ""
    line = f'!{before}pip install "shardlab{extras} @ git+https://g.it/a/b"'
    assert (made.cells[0].cell_type, made.cells[0].source) == ("code", line)


def test_no_page_reads_what_only_the_course_has(root):
    finder = build.DependencyFinder(root)
    for name in build.list_pages(root):
        files = build.compute_key(name, root, finder=finder).files
        assert [path for path in files if not path.startswith("code/shard")] == [], name
        cells = "\n".join(cell.source for cell in build.code_cells(build.load_notebook(name, root)))
        assert "show.ROOT" not in cells and "runpy" not in cells, name
