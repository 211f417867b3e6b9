"""Smaller drawings and code listings that look the same.

matplotlib writes six decimals, one line for each point and a group around each mark; a fill between
two curves has a point for every step, however many of them lie on one straight line.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)([\w:-]+)((?:[^\"'>]|\"[^\"]*\"|'[^']*')*?)(/?)>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_GEOMETRY = re.compile(r'(\s(?:d|points|x|y|x1|y1|x2|y2|cx|cy|r|width|height)=")([^"]+)(")')
_POLYGON = re.compile(r"[MLz\d\s.eE+-]+")
_NO_TURN = re.compile(r' transform="rotate\(-?0 [^)]*\)"')
# With a drawing's proportions and a listing's height known, a browser leaves them without layout
# while they are far away, and nothing moves when the reader comes near (`afar`, in the styles).
_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_PRE = re.compile(r"(<div class=\"highlight\">\s*)?<pre>(.*?)</pre>", re.DOTALL)
_SPAN = re.compile(r'<span class="(\w+)">([^<]*)</span>')
LINES = 6  # a listing of at least so many lines is laid out when the reader comes near it;
MARKS = 40  # and so is a drawing of at least so many tags


def number(text: str, digits: int) -> str:
    """A decimal number with at most `digits` decimals."""
    short = f"{float(text):.{digits}f}".rstrip("0").rstrip(".")
    return "0" if short in ("-0", "") else short


def path(d: str, digits: int) -> str:
    """A path's data on one line; of lines alone, without the points between that show nothing."""
    d = _NUMBER.sub(lambda match: number(match[0], digits), d)
    if not _POLYGON.fullmatch(d) or d.count("L") < 4:
        return " ".join(d.split())
    pieces = []
    for command, numbers in re.findall(r"([MLz])([^MLz]*)", d):
        here = tuple(numbers.split())
        if command == "L" and len(here) == 2:
            if len(pieces) > 1 and pieces[-1] == (command, here):
                continue
            if (
                len(pieces) > 1
                and pieces[-1][0] == "L"
                and pieces[-2][0] in "ML"
                and len(pieces[-2][1]) == 2
                and _between(pieces[-2][1], pieces[-1][1], here)
            ):
                pieces.pop()
        pieces.append((command, here))
    return " ".join(" ".join((command, *here)) for command, here in pieces)


def _between(a: tuple[str, ...], b: tuple[str, ...], c: tuple[str, ...]) -> bool:
    """Whether b lies between a and c on one horizontal or vertical line."""
    for same, other in ((0, 1), (1, 0)):
        if a[same] == b[same] == c[same]:
            low, high = sorted((float(a[other]), float(c[other])))
            return low <= float(b[other]) <= high
    return False


def slim(svg: str) -> str:
    """The drawing `svg`, an element of a page, with fewer bytes and fewer elements."""
    box = re.search(r'viewBox="([^"]+)"', svg)
    if not box or "<foreignObject" in svg:
        return svg
    wide = float(box[1].replace(",", " ").split()[2])
    digits = 2 if wide >= 100 else 5

    def shorter(match: re.Match[str]) -> str:
        if match[1].endswith('d="') and not match[1].endswith('id="'):
            return match[1] + path(match[2], digits) + match[3]
        return match[1] + _NUMBER.sub(lambda m: number(m[0], digits), match[2]) + match[3]

    pieces: list[str] = []
    groups: list[bool] = []  # of the groups that are open: whether they stay
    last = 0
    text = False
    for match in _TAG.finditer(svg):
        between = svg[last : match.start()]
        pieces.append(between if text or between.strip() else "")
        last = match.end()
        closing, name, attributes, empty = match.groups()
        if name in ("text", "tspan", "title", "desc", "style", "a"):
            text = not closing or name == "tspan"
        if name == "g" and not empty:
            stays = groups.pop() if closing else bool(attributes.strip())
            if not closing:
                groups.append(stays)
            if not stays:
                continue
        tag = match[0] if last == match.end() and name == "svg" else _NO_TURN.sub("", match[0])
        if name != "svg":
            tag = _GEOMETRY.sub(shorter, tag)
        pieces.append(re.sub(r"\s*\n\s*", " ", tag))
    return re.sub(r"<defs></defs>", "", "".join(pieces)) + svg[last:]


def far(svg: str) -> str:
    """The drawing with its proportions as a style: it need not be laid out to have its height."""
    end = svg.index(">")
    opening, rest = svg[:end], svg[end:]
    box = re.search(r'viewBox="([^"]+)"', opening)
    if not box or rest.count("<") < MARKS or "aspect-ratio" in opening:
        return svg
    wide, high = box[1].replace(",", " ").split()[2:]
    for name, value, between in (
        ("class", "afar", " "),
        ("style", f"aspect-ratio: {wide} / {high}", "; "),
    ):
        there = re.search(rf'\s{name}="([^"]*?);?\s*"', opening)
        both = f' {name}="{there[1] + between if there else ""}{value}"'
        opening = opening.replace(there[0], both, 1) if there else opening + both
    return opening + rest


def drawings(page: str) -> str:
    """The page with its drawings slimmed."""
    return _SVG.sub(lambda match: far(slim(match[0])), page)


def plain(pygments: str) -> set[str]:
    """The classes of code that look like code without a class, in every theme of a style sheet."""
    base: dict[str, str] = {}
    look: dict[str, dict[str, str]] = {}
    rule = re.compile(r"^(.*?)\.highlight(?: \.(\w+))? \{([^}]*)\}", re.MULTILINE)
    for theme, name, style in rule.findall(pygments):
        color = re.search(r"(?:^|[;\s])color:\s*(#\w+)", style)
        if not name:
            if color:
                base[theme] = color[1].lower()
        else:
            only = re.fullmatch(r"\s*color:\s*#\w+;?\s*", style)
            look.setdefault(name, {})[theme] = color[1].lower() if color and only else "other"
    return {name for name, themes in look.items() if base and themes == base}


def listings(page: str, plain: set[str]) -> str:
    """The page with fewer elements in its code, and with the height of its long listings.

    With the height known, a browser can leave a listing that is far away without layout, and
    nothing moves when it comes near. Lines do not wrap, so lines are all that the height needs.
    """

    def shorter(match: re.Match[str]) -> str:
        inner = _SPAN.sub(lambda m: m[2] if m[1] in plain else m[0], match[2])
        text = re.sub(r"<[^>]*>", "", inner)
        lines = text.rstrip("\n").count("\n") + (not inner.startswith("\n"))
        if not match[1] or lines < LINES or 'id="L' in inner:
            return f"{match[1] or ''}<pre>{inner}</pre>"
        return f'{match[1]}<pre class="afar" style="--lines: {lines}">{inner}</pre>'

    return _PRE.sub(shorter, page)
