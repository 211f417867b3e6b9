"""Write each lesson's script, code/lessons/<topic>.py, from its notebook, lessons/<topic>.md.

    python -m shardlab pairs            # write what is out of step
    python -m shardlab pairs --check    # only say what is; exit status 1 when something is

One way, always: the notebook is the source. jupytext's own two-way synchronisation believes the
younger file, and in a fresh clone that can be the wrong one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import course, lessons

SCRIPTS = Path("code/lessons")


def script(topic: str, root: Path) -> str:
    """The lesson as a plain script: prose as comments, cells as they are."""
    import jupytext
    from jupytext.config import load_jupytext_config

    source = root / "lessons" / f"{topic}.md"
    config = load_jupytext_config(str(source))
    book = jupytext.reads(source.read_text("utf-8"), fmt="md:myst", config=config)
    return jupytext.writes(book, fmt="py:percent", config=config)


def out_of_step(root: Path) -> dict[Path, str | None]:
    """The scripts that differ from their lesson, with what they should hold (None: no lesson)."""
    topics = lessons(root)
    wanted: dict[Path, str | None] = {root / SCRIPTS / f"{t}.py": script(t, root) for t in topics}
    for path in (root / SCRIPTS).glob("*.py"):
        wanted.setdefault(path, None)
    return {
        path: text
        for path, text in wanted.items()
        if text is None or not path.is_file() or path.read_text("utf-8") != text
    }


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `pairs` to the command line."""
    parser = commands.add_parser(
        "pairs",
        help="write code/lessons/*.py from lessons/*.md",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    parser.set_defaults(command=_main)


def _main(options: argparse.Namespace) -> int:
    root = course()
    late = out_of_step(root)
    for path, text in late.items():
        name = path.relative_to(root)
        if options.check:
            why = "has no lesson" if text is None else f"differs from lessons/{path.stem}.md"
            print(f"{name} {why}: run `make pairs`")
        elif text is None:
            path.unlink()
            print(f"removed {name}, which has no lesson")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"wrote {name}")
    return 1 if options.check and late else 0
