"""Write the lessons as notebooks that Colab can open (Colab opens no .md).

    python .github/notebooks.py FOLDER REPOSITORY

Each notebook gets a first cell that fetches the course's code, and pictures addressed so that they
show without it. REPOSITORY is the address that readers clone.
"""

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "code"))

from shardcourse.build import list_lessons  # noqa: E402
from shardcourse.build.notebook_export import export_notebook, make_notebook  # noqa: E402

FETCH = """\
import os, subprocess, sys

if not os.path.isdir("/content/course"):
    clone = ["git", "clone", "-q", "--depth", "1", "{repository}", "/content/course"]
    subprocess.run(clone, check=True)
os.chdir("/content/course/lessons")
sys.path.insert(0, "/content/course/code")"""


def notebook(topic: str, repository: str) -> nbformat.NotebookNode:
    """Read a lesson, with its first cell and the addresses of its pictures."""
    book = export_notebook(
        topic, ROOT, picture=lambda path: f"{repository}/raw/main/{path.removeprefix('../')}"
    )
    words = "This notebook is made from a lesson. The next cell fetches the course's code."
    fetch = new_code_cell(FETCH.format(repository=repository))
    return make_notebook([new_markdown_cell(words), fetch, *book.cells])


def main(folder: str, repository: str) -> None:
    """Write FOLDER/<topic>.ipynb for each lesson."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for topic in list_lessons(ROOT):
        nbformat.write(notebook(topic, repository), target / f"{topic}.ipynb")


if __name__ == "__main__":
    main(*sys.argv[1:])
