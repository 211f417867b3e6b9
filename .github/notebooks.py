"""Write the lessons as notebooks that Colab can open (Colab opens no .md).

    python .github/notebooks.py FOLDER REPOSITORY

Each notebook gets a first cell that fetches the course's code, and pictures addressed so that they
show without it. REPOSITORY is the address that readers clone.
"""

import re
import sys
from pathlib import Path

import jupytext
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parents[1]
PICTURE = re.compile(r"\]\(\.\./(figures/[\w.-]+)\)")
FETCH = """\
import os, subprocess, sys

if not os.path.isdir("/content/course"):
    clone = ["git", "clone", "-q", "--depth", "1", "{repository}", "/content/course"]
    subprocess.run(clone, check=True)
os.chdir("/content/course/lessons")
sys.path.insert(0, "/content/course/code")"""


def notebook(path: Path, repository: str):
    """The lesson in `path` with its first cell and its pictures' addresses."""
    book = jupytext.read(path, fmt="md:myst")
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = PICTURE.sub(rf"]({repository}/raw/main/\1)", cell.source)
    book.cells[:0] = [
        new_markdown_cell(
            "This notebook is made from a lesson. The next cell fetches the course's code."
        ),
        new_code_cell(FETCH.format(repository=repository)),
    ]
    book.metadata.pop("jupytext", None)
    return book


def main(folder: str, repository: str) -> None:
    """Write FOLDER/<topic>.ipynb for each lesson."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(ROOT.glob("lessons/*.md")):
        jupytext.write(notebook(path, repository), target / f"{path.stem}.ipynb", fmt="ipynb")


if __name__ == "__main__":
    main(*sys.argv[1:])
