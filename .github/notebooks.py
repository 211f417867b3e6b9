"""Write the lessons as notebooks that Colab can open (Colab opens no .md).

    python .github/notebooks.py FOLDER REPOSITORY

Each notebook begins with a line that installs the course's package and what the lesson imports
beside it; pictures are addressed so that they show without the course's folder. REPOSITORY is the
address that readers clone.
"""

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "code"))

from shardcourse.build import list_lessons  # noqa: E402
from shardcourse.build.notebook_export import (  # noqa: E402
    export_notebook,
    format_install,
    make_notebook,
)


def notebook(topic: str, repository: str) -> nbformat.NotebookNode:
    """Read a lesson, with its first cell and the addresses of its pictures."""
    book = export_notebook(
        topic, ROOT, picture=lambda path: f"{repository}/raw/main/{path.removeprefix('../')}"
    )
    code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
    install = format_install(code, f"shardlab{{}} @ git+{repository}")
    return make_notebook([new_code_cell(f"!{install}"), *book.cells])


def main(folder: str, repository: str) -> None:
    """Write FOLDER/<topic>.ipynb for each lesson."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for topic in list_lessons(ROOT):
        nbformat.write(notebook(topic, repository), target / f"{topic}.ipynb")


if __name__ == "__main__":
    main(*sys.argv[1:])
