"""A script that grows: one source holds all its steps, and each step is derived from it.

    script = Growing("code/shardlab/train/core.py")
    script.changes("ddp")            # what is new in this step, for a page
    script.load("ddp").main()        # the step as a module

The source's first lines name the steps in order. Any other belongs to all of them, unless it is
marked: at its own end, or by a mark on a line before it, which holds until the next such mark.

    #: steps plain ranks ddp fsdp2
    model = GPT(config)                       no mark: in all steps
    model = DistributedDataParallel(model)    #: ddp -fsdp2     comes with ddp, goes with fsdp2
    #: ddp                                    all that follows comes with ddp
    #: end                                    what follows is in all steps again
"""

from __future__ import annotations

import ast
import difflib
import html
import linecache
import re
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from . import ROOT, Shown, _below_root, _shown

_MARK = re.compile(r"^(?P<code>.*?)\s*#: (?P<mark>-?\w+(?: -\w+)?)$")
_TINT = {"+": "rgba(0,158,115,.16)", "-": "rgba(213,94,0,.16)", " ": "transparent"}


class Growing:
    """The steps of the source at `path`. Raises ValueError for a step that it does not name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lines = self.path.read_text("utf-8").splitlines()
        self.steps = [
            name for line in self.lines if line[:9] == "#: steps " for name in line[9:].split()
        ]
        assert self.steps, f"{path}: its first lines have to name the steps"

    @lru_cache  # noqa: B019 - a handful of sources live as long as the process
    def numbers(self, step: str) -> tuple[int, ...]:
        """The source's lines that `step` has, counted from 1."""
        self._check(step)
        found, around = [], "end"
        for number, line in enumerate(self.lines, 1):
            if line.startswith("#: steps "):
                continue
            match = _MARK.match(line)
            own = match["mark"] if match else "end"
            if match and not match["code"].strip():
                around = own
            elif self._holds(around, step) and self._holds(own, step):
                found.append(number)
        return tuple(found)

    def text(self, step: str) -> str:
        """The whole script of `step`."""
        return "\n".join(self._code(n) for n in self.numbers(step)) + "\n"

    @lru_cache  # noqa: B019
    def load(self, step: str) -> ModuleType:
        """The script of `step` as a module; tracebacks show its lines."""
        code, name = self.text(step), f"{self.path.parent.name}_{step}"
        module = ModuleType(name)
        module.__file__ = f"<{self.path.parent.name}.py, step {step}>"
        linecache.cache[module.__file__] = len(code), None, code.splitlines(True), module.__file__
        exec(compile(code, module.__file__, "exec"), module.__dict__)
        return module

    def show(self, step: str, *names: str) -> Shown:
        """Functions and classes of `step`, as they are in it; the whole script without names."""
        return self._page([(" ", n) for n in self.seen(step, *names)], f"step {step}")

    def changes(self, step: str, *names: str, context: int = 1) -> Shown:
        """What differs from the step before: in functions and classes of these names, or all."""
        return self._page(self._changed(step, names, context), f"new in step {step}")

    def seen(self, step: str, *names: str, changes: bool = False) -> list[int]:
        """The source's lines that `show` puts on a page, or `changes`."""
        if changes:
            return [n for sign, n in self._changed(step, names, 1) if n and sign != "-"]
        wanted = self._within(step, names)
        return [n for n in self.numbers(step) if n in wanted]

    def _changed(self, step: str, names: tuple[str, ...], context: int) -> list[tuple[str, int]]:
        """Signs and numbers of the lines of a difference; number 0 for lines left out between."""
        self._check(step)
        if step == self.steps[0]:
            raise ValueError(f"step={step!r}: it is the first; allowed are those behind it")
        old = self.numbers(self.steps[self.steps.index(step) - 1])
        new = self.numbers(step)
        wanted = self._within(step, names)
        found: list[tuple[str, int]] = []
        texts = [self._code(n) for n in old], [self._code(n) for n in new]
        matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
        for group in matcher.get_grouped_opcodes(context):
            lines: list[tuple[str, int]] = []
            for kind, a, b, c, d in group:
                if kind == "equal":
                    lines += [(" ", n) for n in new[c:d]]
                else:
                    lines += [("-", n) for n in old[a:b]] + [("+", n) for n in new[c:d]]
            lines = [(sign, n) for sign, n in lines if n in wanted]
            if any(sign != " " for sign, _ in lines):
                found += [(" ", 0)] * bool(found) + lines
        return found

    def _within(self, step: str, names: tuple[str, ...]) -> set[int]:
        """The source's lines of these definitions, in `step` or any other; all without names."""
        if not names:
            return set(range(1, len(self.lines) + 1))
        mine, numbers = set(), self.numbers(step)
        defined = {}
        for node in ast.parse(self.text(step)).body:
            key = getattr(node, "name", "end" if isinstance(node, ast.If) else "")
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            defined.setdefault(key, []).append((numbers[first - 1], numbers[node.end_lineno - 1]))
        for name in names:
            if name not in defined:
                raise ValueError(
                    f"name={name!r}: step {step} has {', '.join(filter(None, defined))}"
                )
            for first, last in defined[name]:
                mine |= set(range(first, last + 1))
        return mine

    def _holds(self, mark: str, step: str) -> bool:
        if mark == "end":
            return True
        here = self.steps.index(step)
        for word in mark.split():
            name = word.removeprefix("-")
            assert name in self.steps, f"{self.path}: the mark {mark!r} names no step"
            if (here < self.steps.index(name)) != word.startswith("-"):
                return False
        return True

    def _check(self, step: str) -> None:
        if step not in self.steps:
            raise ValueError(f"step={step!r}: allowed are {', '.join(self.steps)}")

    def _code(self, number: int) -> str:
        match = _MARK.match(self.lines[number - 1])
        return match["code"] if match else self.lines[number - 1]

    def _page(self, lines: list[tuple[str, int]], what: str) -> Shown:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        first = next((n for sign, n in lines if n and sign != " "), lines[0][1] if lines else 1)
        marks, codes = [], []
        for sign, n in lines:
            code = self._code(n) if n else "⋯"
            if codes and codes[-1].startswith(" ") and re.match("@|class |def ", code):
                marks, codes = [*marks, " "], [*codes, ""]  # what stood between was left out
            marks, codes = [*marks, sign], [*codes, code]
        signs = any(sign != " " for sign in marks)
        margin = min((len(c) - len(c.lstrip()) for c in codes if c not in ("", "⋯")), default=0)
        codes = [code[margin:] if code != "⋯" else code for code in codes]
        marked = highlight("\n".join(codes), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
        body, plain = [], []
        for sign, code, page in zip(marks, codes, marked.split("\n"), strict=False):
            mark = f"{sign} " if signs else ""
            style = f"display:inline-block;min-width:100%;background:{_TINT[sign]}"
            page = page if code != "⋯" else "⋯"
            page = f'<span style="{style}">{mark}{page}</span>' if signs else page
            body.append(page)
            plain.append(f"{mark}{code}".rstrip())
        caption = f"{_below_root(self.path).removeprefix('code/')}, line {first}"
        if self.path.is_relative_to(ROOT):
            target = f"../{_below_root(self.path)}#L{first}"
            caption = f'<a class="source-link" href="{target}">{html.escape(caption)}</a>'
        lined = "\n".join(body)
        page = (
            f'<div class="shown-source"><p class="source-caption">{html.escape(what)}, from '
            f'{caption}</p><div class="highlight"><pre>{lined}</pre></div></div>'
        )
        text = "\n".join([f"# {what}, from {_below_root(self.path)}", *plain])
        return _shown(page, text, f"{what}: {_below_root(self.path)}:{first}")
