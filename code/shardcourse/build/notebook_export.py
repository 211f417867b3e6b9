"""Page as a notebook for any notebook application: plain Markdown, and foldable cells.

    >>> book = reading("zero", root)

Boxes keep their titles, exercises are numbered, a citation is an author and a year. Cells with the
tag hide-input, solutions and answers are folded, as on the site. JupyterLab shows the first line of
a folded cell, which says what the cell holds.
"""

from __future__ import annotations

import ast
import base64
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardlab import __version__
from shardlab.common import show

from . import quizzes
from .kernel import KERNELSPEC
from .key import get_source_path, has_cells, load_notebook

if TYPE_CHECKING:
    from nbformat import NotebookNode

_MARK = re.compile(  # start or end of an exercise or a solution, or a section's heading
    r"^```\{(exercise|solution)-(start|end)\}[ \t]*(.*)\n(?::.*\n)*```[ \t]*(?:\n|\Z)|^## +(.*)$",
    re.M,
)
_ANSWER = re.compile(r'^<details class="answer"><summary>(.*)</summary>$|^</details>$', re.M)
_FENCE = re.compile(r"(`{3,}|:{3,})(?:\{([\w-]+)\}[ \t]*)?(.*)")
_INLINE = re.compile(
    r"\{(?P<role>[\w:-]+)\}`(?P<said>[^`]*)`"
    r"|(?P<code>(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<to>[^()\s]*)\)"
    r"|^\((?P<label>[\w-]+)\)=$\n?",
    re.M | re.S,
)
_NEEDS = """\
*To run this notebook you need Jupyter and `{package}`, the course's package, version {version}.
You need no GPU. The page Set-up of the course says how to install the package.*"""
_BOXES = {"admonition", "attention", "caution", "danger", "dropdown", "error", "hint", "important"}
_BOXES |= {"note", "seealso", "tip", "warning"}
_COLOURS = {"warning": "warning", "caution": "warning", "danger": "danger"}
_COLOURS |= {"true": "success", "only-if": "warning", "false": "danger"}
# A title of a box that judges a claim: 'False: "…"', 'Only if the tensor is large: "…"'.
VERDICT = re.compile(r"(True|False|Only if [^:]+): (?=[\"“])")


def classify_verdict(title: str) -> str:
    """Return the class of a judged claim: "true", "false" or "only-if". Raises ValueError."""
    if not (found := VERDICT.match(title)):
        raise ValueError(f'{title!r}: must begin with "True: ", "False: " or "Only if …: "')
    return found[1].lower() if found[1] in ("True", "False") else "only-if"


class Part(NamedTuple):
    """Cell of a page, or a part of a text cell."""

    place: str  # "lesson", "between" the exercises, "exercise" or "solution"
    kind: str  # "markdown", "code", or the "title" of a section, an exercise or a solution
    text: str
    cell: NotebookNode | None = None  # for code


def split_parts(book: NotebookNode) -> Iterator[Part]:
    """Yield the page in order; exercises, solutions and sections begin new text parts."""
    place = outside = "lesson"
    for cell in book.cells:
        if cell.cell_type != "markdown":
            yield Part(place, "code", cell.source, cell)
            continue
        # The text before the first mark; then each mark's four groups and the text that follows.
        pieces = iter(["", "", "", "", *_MARK.split(_ANSWER.sub(_as_solution, cell.source))])
        for what, edge, title, section, text in zip(*[pieces] * 5, strict=True):
            if section:
                place = outside = "between" if section.startswith("Exercises") else "lesson"
                yield Part(place, "title", section.strip())
            elif what:
                place = what if edge == "start" else outside
                if edge == "start":
                    yield Part(place, "title", title.strip())
            if text.strip():
                yield Part(place, "markdown", text.strip())


def _as_solution(answer: re.Match[str]) -> str:
    """Return an answer of a page of questions, marked as a lesson marks a solution."""
    return f"```{{solution-{'start' if answer[1] else 'end'}}} {answer[1] or ''}\n```"


class MarkdownWriter:
    """Converter of the page `name` of the course in `root` to plain Markdown.

    beside: the text is in a folder of the course, so that links lead to its files, and for pages to
        their notebooks. Elsewhere only a link's text is kept, and pictures are embedded.
    picture: maps the address of a picture to another one.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        beside: bool = False,
        picture: Callable[[str], str] | None = None,
    ):
        self.folder, self.root = get_source_path(name, root).parent, root
        self.papers = root / "book/references.bib"
        text = get_source_path(name, root).read_text("utf-8")
        self.labels = set(re.findall(r"(?m)^\(([\w-]+)\)=$", text))
        self.beside = beside
        self.picture = picture or (
            str if beside else lambda path: embed_picture(self.folder / path)
        )

    def convert_text(self, text: str) -> str:
        """Convert MyST to Markdown. Raises ValueError for a directive that has no plain form."""
        done: list[str] = []
        prose: list[str] = []
        lines = iter(text.split("\n"))
        for line in lines:
            fence = _FENCE.fullmatch(line)
            if not fence:
                prose.append(line)
                continue
            ticks, name, title = fence.groups()
            body = []
            for line in lines:
                if line.startswith(ticks) and not line.strip(ticks[0]).strip():
                    break
                body.append(line)
            box = self._convert_directive(ticks, name, title.strip(), body)
            done += [self._convert_prose(prose), box]
            prose = []
        return "\n".join(filter(None, [*done, self._convert_prose(prose)]))

    def _convert_prose(self, lines: list[str]) -> str:
        return _INLINE.sub(self._convert_inline, "\n".join(lines))

    def _convert_directive(self, ticks: str, name: str | None, title: str, body: list[str]) -> str:
        if name is None:
            return "\n".join([ticks + title, *body, ticks])
        options = {}
        while body and (option := re.fullmatch(r":([\w-]+):(.*)", body[0])):
            options[option[1]] = option[2].strip()
            body = body[1:]
        text = "\n".join(body).strip("\n")
        if name in ("code-block", "code"):
            return f"```{title}\n{text}\n```"
        if name == "math":
            return f"$$\n{text}\n$$"
        if name == "calculator":  # a form on the site, a command here
            place = options.pop("name", "")
            given = [f"--{option} {value}" for option, value in options.items()]
            line = " ".join(filter(None, ["python -m shardlab", title, place, *given]))
            return f"In a terminal:\n\n```bash\n{line}\n```"
        if name == "quiz":
            return self.convert_text(quizzes.format_quiz(quizzes.read_quizzes(self.root)[title]))
        text = self.convert_text(text)
        if name == "predict":  # the site hides the text below it until a number is entered
            return f"**Predict first.** {text}"
        if name in ("grid", "grid-item"):
            return text
        if name in ("card", "grid-item-card"):
            card = self._convert_prose([f"[{title}]({options['link']}.md)"])
            return f"- {card}: {text}"
        if name == "step-through":
            return f"**{title}**\n\n{text}"
        if name not in _BOXES:
            raise ValueError(
                f"{{{name}}}: no plain form; add it to shardcourse/build/notebook_export.py"
            )
        title = self._convert_prose([title or name.capitalize()])
        kinds = [name, *options.get("class", "").split()]
        kinds += [classify_verdict(title)] if "checked" in kinds else []
        if "dropdown" in kinds:
            return fold_text(title, text)
        colour = next((_COLOURS[kind] for kind in kinds[::-1] if kind in _COLOURS), "info")
        return f'<div class="alert alert-{colour}">\n\n**{title}**\n\n{text}\n\n</div>'

    def _convert_inline(self, found: re.Match[str]) -> str:
        role, said, text, to = found["role"], found["said"], found["text"], found["to"]
        if role == "download":  # `text <path>`
            role, (text, _, to) = None, said.removesuffix(">").rpartition(" <")
        if found["code"]:
            return found["code"]
        if found["label"]:
            return f'<a id="{found["label"]}"></a>\n\n'
        if role in ("cite", "cite:p", "cite:t"):
            form = "{} ({})" if role == "cite:t" else "{}, {}"
            keys = map(str.strip, said.split(","))
            words = "; ".join(format_citation(self.papers, key, form) for key in keys)
            return words if role == "cite:t" else f"({words})"
        if role:
            return f"${said}$" if role == "math" else re.sub(r"\s*<[^>]*>$", "", said)
        if found["picture"]:
            to = to if "://" in to else self.picture(to)
            if to.startswith("data:"):  # VS Code needs this form
                return f'<img src="{to}" alt="{escape(text)}">'
            return f"![{text}]({to})"
        text = self._convert_prose([text])
        path, _, label = to.partition("#")
        if "://" in to or (not path and label in self.labels):
            return f"[{text}]({to})"
        if not (self.beside and path and (self.folder / path).exists()):
            return text
        return f"[{text}]({Path(path).stem}.ipynb)" if self._is_page(path) else f"[{text}]({path})"

    def _is_page(self, path: str) -> bool:
        return path.endswith(".md") and has_cells(self.folder / path)


def fold_text(title: str, text: str) -> str:
    """Return text that is folded below its title."""
    return f"<details><summary><b>{title}</b></summary>\n\n{text}\n\n</details>"


def embed_picture(path: Path) -> str:
    """Return a picture as a data address: dark on white, in any theme of the notebook.

    JupyterLab 4 shows no SVG that is attached to a cell.
    """
    text = re.sub(r"@media\(prefers-color-scheme:dark\)\{[^}]*\}\}", "", path.read_text("utf-8"))
    text = text.replace("svg:root{", "svg:root{background:#fff;", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"


@lru_cache(1)
def _load_papers(path: Path, _changed: int) -> dict:
    from pybtex.database import parse_file

    return dict(parse_file(str(path), "bibtex").entries)


def format_citation(path: Path, key: str, form: str) -> str:
    """Return a paper of the file `path` in short, authors and year, with a link if it has one."""
    from pybtex.richtext import Text

    entry = _load_papers(path, path.stat().st_mtime_ns)[key]
    names = [
        str(Text.from_latex(" ".join(person.prelast_names + person.last_names))) or "others"
        for person in entry.persons["author"]
    ]
    short = names[0] if len(names) == 1 else f"{names[0]} and {names[1]}"
    if len(names) > 2 or names[-1] == "others":
        short = f"{names[0]} et al."
    links = {"url": "{}", "doi": "https://doi.org/{}", "eprint": "https://arxiv.org/abs/{}"}
    fields = entry.fields
    link = next((form.format(fields[name]) for name, form in links.items() if name in fields), "")
    words = form.format(short, fields["year"])
    return f"[{words}]({link})" if link else words


def export_notebook(
    name: str,
    root: Path,
    book: NotebookNode | None = None,
    beside: bool = False,
    picture: Callable[[str], str] | None = None,
    needs: str = "",
) -> NotebookNode:
    """Return the page `name` (see `key`) as a notebook to read and to run.

    book: the page as a notebook with the outputs to show; without outputs if None.
    beside, picture: see `MarkdownWriter`.
    needs: the page's prerequisites, which go below its title (`index.assumed`).
    """
    import nbformat

    writer = MarkdownWriter(name, root, beside, picture)
    cells = [cell for _, cell in convert_cells(book or load_notebook(name, root), writer)]
    if needs:
        title_line, _, rest = cells[0].source.partition("\n")
        cells[0].source = f"{title_line}\n\n{writer.convert_text(needs)}\n{rest}"
    if not beside and not picture:
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        words = _NEEDS.format(package=f"shardlab{list_extras(code)}", version=__version__)
        cells.insert(1, nbformat.v4.new_markdown_cell(words))
    return make_notebook(cells)


def convert_cells(book: NotebookNode, writer: MarkdownWriter) -> list[tuple[str, NotebookNode]]:
    """Return the cells of a page to read and to run, each with its place (see `Part`)."""
    import nbformat

    new = nbformat.v4
    cells: list[tuple[str, NotebookNode]] = []
    number, title, begins = 0, "", False
    for place, kind, text, cell in split_parts(book):
        if kind == "title":
            heading = place != "solution"
            number += place == "exercise"
            # A solution's mark has the address of its exercise; an answer's mark has its title.
            title = text if heading or " " in text else f"Solution to exercise {number}"
            if heading:
                asked = f"### Exercise {number}: " if place == "exercise" else "## "
                cells.append((place, new.new_markdown_cell(asked + writer.convert_text(text))))
                begins = True
            continue
        if kind == "code":
            tags = cell.metadata.get("tags", [])
            made = new.new_code_cell(
                text, outputs=cell.outputs, execution_count=cell.execution_count
            )
            made.metadata = nbformat.from_dict({"tags": tags} if tags else {})
            if place == "solution":
                made.source = f"# {title}\n{text}"
                made.metadata["jupyter"] = {"source_hidden": True, "outputs_hidden": True}
            elif "hide-input" in tags:
                made.metadata["jupyter"] = {"source_hidden": True}
            cells.append((place, made))
        else:
            plain = writer.convert_text(text)
            plain = fold_text(title, plain) if place == "solution" else plain
            if begins:  # the heading and the text share one cell
                cells[-1][1].source += f"\n\n{plain}"
            else:
                cells.append((place, new.new_markdown_cell(plain)))
        begins = False
    return cells


def list_extras(code: str) -> str:
    """Return the extras of the package that a page's code needs: "[deepspeed,lightning]", or "".

    A page needs the packages that it imports, and those that the course's modules import which the
    page imports itself.
    """
    names = _find_imports(code)
    files = {path for name in names for path in _find_module_files(name)}
    names = names.union(*(_find_imports(path.read_text("utf-8")) for path in files))
    tops = {name.partition(".")[0].replace("_", "-") for name in names}
    project = tomllib.loads((show.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    wanted = [extra for extra, packages in extras if tops & {p.replace("_", "-") for p in packages}]
    return f"[{','.join(wanted)}]" if wanted else ""


@lru_cache(None)  # lessons import the same modules
def _find_imports(code: str) -> set[str]:
    """Return the names that code imports, as package.module.name; not those of relative imports."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _find_module_files(name: str) -> list[Path]:
    """Return the files of the course's module that an imported name is, or is in; [] for others."""
    path = show.ROOT / "code" / name.replace(".", "/")
    for folder in (path, path.parent):
        if folder.parent == show.ROOT / "code":  # a whole package
            break
        if folder.is_dir():
            return sorted(folder.rglob("*.py"))
        if (file := folder.with_suffix(".py")).is_file():
            return [file]
    return []


def format_install(code: str, source: str) -> str:
    """Return the command that installs the package for a page's code; source: has {} for extras."""
    extras = list_extras(code)
    before = "DS_BUILD_OPS=0 " if "deepspeed" in extras else ""  # compiles nothing
    return f'{before}pip install "{source.format(extras)}"'


def make_notebook(cells: list[NotebookNode]) -> NotebookNode:
    """Return a notebook of `cells`, with ids that do not change from run to run."""
    import nbformat

    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"  # not random
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})
