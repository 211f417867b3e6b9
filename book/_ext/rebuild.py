"""What Sphinx forgets when it builds only what changed.

- A build that failed on a warning would succeed the second time, for the page is not read again.
- A changed style sheet, or a changed source file, is not copied when no page changed.
- Pages stay as an older version of these extensions made them.
- The page of a removed document stays.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from code_pages import sources
from search import SYNONYMS
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def notice(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Build the first page again, and so copy all files, when a file of no page changed."""
    for docname in removed:
        Path(app.builder.get_outfilename(docname)).unlink(missing_ok=True)
    root = Path(app.srcdir)
    static = sorted(path for path in (root / "book/static").rglob("*") if path.is_file())
    now = _hash([*(root / path for path in sources(root)), *static, SYNONYMS])
    before = getattr(env, "other_files", now)
    env.other_files = now
    return [app.config.root_doc] if now != before else []


def _hash(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(str(f).encode() + f.read_bytes() for f in files)).hexdigest()


def forget(app: Sphinx, exception: Exception | None) -> None:
    """After a build with warnings that count as errors, let the next one read all pages."""
    strict = app.warningiserror or app.keep_going  # the latter alone with `-W --keep-going`
    if exception or (strict and app._warncount):
        Path(app.doctreedir, "environment.pickle").unlink(missing_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the extension."""
    app.connect("env-get-outdated", notice)
    app.connect("build-finished", forget, priority=999)
    # Sphinx starts from nothing when this number is not what it was.
    extensions = int(_hash(sorted(Path(__file__).parent.glob("*.py")))[:12], 16)
    return {"env_version": extensions}
