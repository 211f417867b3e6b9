"""Small book in a temporary folder, with this course's configuration and extensions."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shutil
from pathlib import Path

import nbformat
from forked import run_forked

from shardcourse import build
from shardlab.common import show

# Imports of a build, half of its time, made once for all builds.
for _name in (
    *("jupyter_book.cli.main", "jupyter_book.sphinx", "sphinx.builders.dirhtml"),
    *("jupytext.myst", "myst_nb.sphinx_ext"),
    *("sphinx_book_theme", "sphinx_design.extension", "sphinx_exercise", "sphinx_thebe"),
    *("sphinx_external_toc.collectors", "sphinxcontrib.bibtex", "sphinx_togglebutton"),
):
    importlib.import_module(_name)

BUILD = str(show.ROOT / "book/_ext/build.py")
HEADER = """\
---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

"""
LESSON = """\
# A small lesson

Prose that says one thing.

![Two boxes](../figures/boxes.svg)

See [the code](../code/shardlab/first.py) and [the other page](../book/execution.md#about).
Save {download}`the code <../code/shardlab/first.py>`.

```{code-cell} ipython3
:tags: [hide-input]

from shardlab.first import answer
```

```{code-cell} ipython3
print("the answer is", answer())
```
"""
BOXES = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 4 2"><defs><g id="box">'
    '<path d="M0 0h1v1z" fill="currentColor"/></g></defs><use href="#box"/></svg>\n'
)
PAGES = {
    "_toc.yml": "format: jb-book\nroot: book/index\nchapters:\n"
    "  - file: lessons/small\n  - file: book/execution\n",
    "book/index.md": "# A book\n\nWith $x^2$ in it.\n\n![Two boxes](../figures/boxes.svg)\n",
    "book/execution.md": "# How\n\n## About\n\n```{executions}\n```\n",
    "book/references.bib": "",
    "figures/boxes.svg": BOXES,
    "lessons/small.md": HEADER + LESSON,
    # No torch and no ranks: a kernel starts in a second. The lesson imports `second` through
    # `first`, and `third` not at all.
    "code/shardlab/__init__.py": '"""A stand-in for the course\'s package."""\n',
    "code/shardlab/first.py": "from .second import VALUE\n\n\ndef answer():\n    return VALUE\n",
    "code/shardlab/second.py": "VALUE = 42\n",
    "code/shardlab/third.py": "VALUE = 43\n",
}


class Book:
    """Book in the folder `root`; `log` is the output of its last build."""

    def __init__(self, root: Path):
        self.root = root
        self.log = ""
        for name, text in PAGES.items():
            self.write(name, text)
        for name in ("_config.yml", "jupytext.toml"):
            shutil.copy(show.ROOT / name, root / name)
        shutil.copytree(show.ROOT / "book/static", root / "book/static")
        (root / "book/_ext").symlink_to(show.ROOT / "book/_ext")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace `old`, which must exist, in a file of the book."""
        text = (self.root / name).read_text("utf-8")
        assert old in text
        self.write(name, text.replace(old, new))

    def build(self, **environment: str) -> int:
        """Build the book as `make book` does; return the exit status.

        A fork of this process builds, without importing Jupyter Book again: a third of the time.
        """
        clean = {k: v for k, v in os.environ.items() if k not in ("RECORDED", "BOOK_REPOSITORY")}
        environment = {**clean, **environment}
        call = lambda: runpy.run_path(BUILD, run_name="__main__")  # noqa: E731
        status, self.log = run_forked(call, self.root, environment)
        return status

    def build_checked(self, **environment: str) -> Book:
        assert self.build(**environment) == 0, self.log
        return self

    @property
    def executed_lessons(self) -> list[str]:
        lines = re.findall(r"^executed \d+ of \d+: (\S+), \d+ s", self.log, re.MULTILINE)
        return sorted(lines)

    def read_page(self, name: str = "lessons/small") -> str:
        return (self.root / "_build/html" / f"{name}.html").read_text("utf-8")

    @property
    def recording(self) -> Path:
        return self.root / build.RECORDINGS_FOLDER / "small.ipynb"

    def record_lesson(self, device: str = "", output: str = "") -> nbformat.NotebookNode:
        """Record the lesson; then set `device` and replace the output of its last cell."""
        lesson = build.execute_page("small", self.root)
        about = lesson.metadata["shardlab"]
        if device:
            about["device"] = {"kind": "cuda", "name": device, "count": 2, "driver": "999.1"}
            about["ranks"] = [{"ranks": 4, "backend": "gloo", "device": "cuda", "runs": 3}]
        if output:
            lesson.cells[-1].outputs[0].text = output
        build.save_recording(lesson, self.recording)
        return lesson
