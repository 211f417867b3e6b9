"""Functions with which lessons show source code, tables and pictures.

Each function works in the built page, in JupyterLab and in a plain script: it returns an object
with HTML and plain text. Pictures use the page's text colour, so one file serves light and dark
themes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import inspect
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.common import stale_code

from .timing import check_timing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_timing"]  # besides the functions defined here
ROOT = Path(__file__).resolve().parents[4]

# One colour per rank, the same on every page: Okabe and Ito's palette, which colour-blind readers
# can distinguish, in an order in which neighbours also differ in lightness.
RANK_COLORS = [
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#8C8C8C",
]
# Text and lines are drawn in this colour; the finished SVG has `currentColor` in its place.
INK = "#010203"
_MAX_UNFOLDED_LINES = 45  # lines of code that fit on a screen; longer sources are folded


class DisplayResult:
    """A result of a cell: HTML for a page or a notebook, text for everything else."""

    def __init__(self, html: str, text: str):
        self.html = html
        self.text = text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text


def in_notebook() -> bool:
    """Return True in a notebook, which displays the last value of a cell by itself."""
    kernel = sys.modules.get("IPython")
    return bool(kernel and kernel.get_ipython())


def _display(html: str, text: str, note: str | None = None) -> DisplayResult:
    if not in_notebook():
        print(text if note is None else note)
    return DisplayResult(html, text)


def source(*objects: Any, fold: int = _MAX_UNFOLDED_LINES) -> DisplayResult:
    """Show the source of functions, classes or modules, with a link to its file and line.

    Sources longer than `fold` lines are folded. A script prints one line for each object instead.
    """
    if not objects:
        raise ValueError("source(): must be given at least one function, class or module")
    stale_code.warn_stale_modules()
    pages, texts, notes = [], [], []
    for thing in map(inspect.unwrap, objects):
        try:
            lines, start = inspect.getsourcelines(thing)
        except TypeError:
            raise ValueError(f"{thing!r}: must be a function, a class or a module") from None
        code = inspect.cleandoc("\n" + "".join(lines)) if lines[0][:1].isspace() else "".join(lines)
        path = Path(inspect.getsourcefile(thing) or "").resolve()
        name = getattr(thing, "__qualname__", getattr(thing, "__name__", "source"))
        start = max(start, 1)
        where, link = _link_line(path, start)
        folded = code.count("\n") if len(lines) > fold else None
        # The summary of a fold is a button, so it cannot contain a link.
        caption = f"<code>{html.escape(name)}</code> in {link if folded is None else where}"
        pages.append(_highlight_code(code, "python", caption, folded, f"The whole file: {link}"))
        texts.append(f"# {_relative_path(path)}, line {start}\n{code.rstrip()}")
        notes.append(f"source: {_relative_path(path)}:{start} {name}")
    return _display("\n".join(pages), "\n\n".join(texts), "\n".join(notes))


def file(path: str | Path, language: str, fold: int = _MAX_UNFOLDED_LINES) -> DisplayResult:
    """Show a file that is not Python, such as a batch script. language: name of a pygments lexer.

    Files longer than `fold` lines are folded. A link below the file downloads it. A script prints
    one line instead.
    """
    path = Path(path).resolve()
    code, where = path.read_text("utf-8"), _relative_path(path)
    lines, name = code.count("\n"), html.escape(path.name)
    caption = html.escape(where.removeprefix("code/"))
    page = _highlight_code(code, language, caption, lines if lines > fold else None)
    data = base64.b64encode(code.encode()).decode()  # embedded in the page: the link cannot break
    save = f'<a href="data:text/plain;base64,{data}" download="{name}">{name}</a>'
    page += f'<p class="source-download">Download: {save}</p>'
    return _display(page, f"# {where}\n{code.rstrip()}", f"source: {where}:1 {path.name}")


def terminal(text: str, caption: str) -> DisplayResult:
    """Show a terminal session: commands after `$ `, and their output. caption: says when it ran."""
    return _display(
        _highlight_code(text, "console", html.escape(caption)), f"# {caption}\n{text.rstrip()}"
    )


def _highlight_code(
    text: str, language: str, caption: str, folded: int | None = None, below: str = ""
) -> str:
    """Highlight `text` under a caption. folded: its number of lines, to fold it with `below`."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    formatter = HtmlFormatter(cssclass="highlight", wrapcode=True)
    body = highlight(text, get_lexer_by_name(language), formatter)
    if folded is None:
        return f'<div class="shown-source"><p class="source-caption">{caption}</p>{body}</div>'
    summary = f"<summary>{caption} ({folded} lines)</summary>"
    below = f'<p class="source-caption">{below}</p>' if below else ""
    return f'<details class="shown-source">{summary}{below}{body}</details>'


def _relative_path(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _link_line(path: Path, line: int) -> tuple[str, str]:
    """Return the location of a line as text, and as a link if the file is the course's."""
    where = html.escape(f"{_relative_path(path).removeprefix('code/')}, line {line}")
    if not path.is_relative_to(ROOT):
        return where, where
    # The link works in JupyterLab; the book's extension redirects it to the book's copy.
    return where, f'<a class="source-link" href="../{_relative_path(path)}#L{line}">{where}</a>'


def table(
    rows: Iterable[Sequence[Any] | Mapping[str, Any]],
    head: Sequence[str] | None = None,
    caption: str = "",
) -> DisplayResult:
    """Show `rows` under `head`, with columns of numbers aligned right. Put units in the head.

    Rows are sequences, or mappings whose keys are the head. Cells are shown with str(), so format
    numbers first: f"{seconds:.3f}".
    """
    from tabulate import tabulate

    rows = list(rows)
    if head is None:
        if not rows or not isinstance(rows[0], Mapping):
            raise ValueError("head=None: must be a list of column names if rows are no mappings")
        head = list(rows[0])
    values = (row.values() if isinstance(row, Mapping) else row for row in rows)
    cells = [[str(value) for value in row] for row in values]
    for row in cells:
        if len(row) != len(head):
            raise ValueError(f"row={row}: must have {len(head)} cells, as the head has")
    right = [bool(cells) and all(_is_numeric(row[i]) for row in cells) for i in range(len(head))]
    align = ["right" if r else "left" for r in right]
    text = tabulate(cells, head, tablefmt="simple", colalign=align, disable_numparse=True)

    def format_row(tag: str, values: Iterable[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f'<{tag}{scope} class="text-{side}">{_escape_cell(value)}</{tag}>'
            for value, side in zip(values, align, strict=True)
        )

    body = "".join(f"<tr>{format_row('td', row)}</tr>" for row in cells)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    page = (
        f'<div class="shown-table"><table class="table">{title}'
        f"<thead><tr>{format_row('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return _display(page, f"{caption}\n{text}" if caption else text)


def _escape_cell(cell: str) -> str:
    """Escape a cell for HTML; allow words of over 20 characters to break after ., _ and -."""
    breakable = re.sub(r"\S{21,}", lambda word: re.sub(r"(?<=\w)([._-])", "\\1\0", word[0]), cell)
    return html.escape(breakable).replace("\0", "<wbr>")


def _is_numeric(cell: str) -> bool:
    return bool(
        re.fullmatch(r"[-+−]?[\d.,_ ]*\d[\d.,]*(e[-+]?\d+)?( ?[%×xA-Za-z/µ]{0,5})|[-–]?", cell)
    )


@lru_cache(1)
def set_style() -> None:
    """Configure matplotlib for the course's pictures: real text, no background, INK as colour."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",  # keep text as text: searchable, and in the page's font
            "font.family": "sans-serif",
            "font.size": 11,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": matplotlib.cycler(color=RANK_COLORS),
            **dict.fromkeys(
                ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"],
                INK,
            ),
            "legend.frameon": False,
        }
    )


def _render_svg(figure: Figure, name: str, alt: str) -> str:
    """Close the figure; return its SVG, reproducible byte by byte, with `currentColor` for INK."""
    import matplotlib
    import matplotlib.pyplot as plt

    if not alt.strip():
        raise ValueError("alt='': must describe the picture, for readers who cannot see it")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        unnamed = {"Date": None, "Creator": None}  # no metadata that changes from run to run
        figure.savefig(buffer, format="svg", metadata=unnamed, bbox_inches="tight", pad_inches=0.05)
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    # matplotlib's style sheet would apply to the whole page; the <svg> gets its rules below.
    text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.DOTALL)
    # Ids must be unique on a page: keep only referenced ids, with a suffix per picture.
    suffix = hashlib.sha256(name.encode()).hexdigest()[:6]
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(
        r' id="([^"]+)"', lambda m: f' id="{m[1]}-{suffix}"' if m[1] in used else "", text
    )
    text = re.sub(r'(url\(#|href="#)([^)"]+)', rf"\g<1>\g<2>-{suffix}", text)
    label = html.escape(alt, quote=True)
    head = f'<svg role="img" aria-label="{label}" stroke-linejoin="round" stroke-linecap="butt"'
    return text.replace("<svg", head, 1)


def save_svg(figure: Figure, path: str | Path, alt: str) -> Path:
    """Write `figure` to `path` as an SVG for light and dark themes, described by `alt`."""
    path = Path(path)
    text = _render_svg(figure, path.stem, alt)
    # A separate SVG file has no page that sets colour and font. `svg:root` matches the picture
    # then, and does not match if the picture is embedded in a page.
    rule = (
        "svg:root{color:#1f2328;font-family:sans-serif}"
        "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3}}"
    )
    text = re.sub(r"(<svg[^>]*>)", rf"\1<style>{rule}</style>", text, count=1)
    path.write_text(text, "utf-8")
    return path


def figure(figure: Figure, alt: str, name: str) -> DisplayResult:
    """Show `figure` in the page. alt: describes the picture; name: makes its ids unique."""
    page = f'<figure class="shown-figure">{_render_svg(figure, name, alt)}</figure>'
    return _display(page, f"[picture: {alt}]")
