"""What makes pages light: styles, drawings and listings lose what does not show, and no more."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from docutils import nodes
from hypothesis import given
from hypothesis import strategies as st

from shardlab import show


@pytest.fixture(scope="module")
def modules():
    """The extension's modules, imported as Sphinx does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(show.ROOT / "book/_ext"))
        import slim
        import slim_css
        import slim_svg

        yield SimpleNamespace(page=slim, css=slim_css, svg=slim_svg)


CSS = """
@charset "utf-8";
.a, .b > p { color: red } /* .b is in no page { */
.b { color: blue }
#one:not(.b)::before { content: "} .b {"; }
p[class*=".b"] { margin: 0 }
@media (width > 3px) { .b { color: red } .a:is(.b, .c) { color: blue } }
@media print { .b { color: red } }
.d\\:wide { width: 1px }
@keyframes turn { to { rotate: 1turn } }
@keyframes jump { to { top: 0 } }
.a { animation: turn 1s }
"""


def test_styles_keep_what_can_match(modules):
    css = modules.css.purge(re.sub(r"/\*.*?\*/", "", CSS), {"a", "one", "d:wide"})
    css = modules.css.tight(modules.css.without_idle(css))
    assert css == (
        '@charset "utf-8";.a{color: red}#one:not(.b)::before{content: "} .b {"}'
        'p[class*=".b"]{margin: 0}@media (width > 3px){.a:is(.b, .c){color: blue}}'
        ".d\\:wide{width: 1px}@keyframes turn{to{rotate: 1turn}}.a{animation: turn 1s}"
    ).replace("(.b, .c)", "(.b,.c)")


def test_imported_styles_stand_in_place_and_addresses_are_seen_from_the_folder(modules, tmp_path):
    (tmp_path / "styles").mkdir()
    (tmp_path / "styles/theme.css").write_text('@import "../basic.css";\na{b:url(../x/y.png)}')
    (tmp_path / "basic.css").write_text("i{b:url(z.png)} u{b:url(data:image/png;base64,AA)}")
    css = modules.css.read(tmp_path, "styles/theme.css")
    assert 'i{b:url("z.png")}' in css
    assert 'a{b:url("x/y.png")}' in css
    assert "data:image/png;base64,AA" in css
    assert "@import" not in css


def points(d: str) -> list[tuple[float, float]]:
    numbers = [float(word) for word in re.findall(r"-?[\d.]+", d)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def passes(corner: tuple[float, float], line: list[tuple[float, float]]) -> bool:
    """Whether a point lies on a line made of level and upright pieces."""
    return any(
        min(a[0], b[0]) <= corner[0] <= max(a[0], b[0])
        and min(a[1], b[1]) <= corner[1] <= max(a[1], b[1])
        and (a[0] == b[0] or a[1] == b[1])
        for a, b in zip(line, line[1:], strict=False)
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=6, max_size=40))
def test_shorter_path_is_the_same_line(modules, steps):
    x = y = 0
    corners = [(0, 0)]
    for level, length in steps:
        x, y = (x + length, y) if level else (x, y + length)
        corners.append((x, y))
    d = " \n".join(f"{'L' if i else 'M'} {a}.000001 {b}.000001" for i, (a, b) in enumerate(corners))
    short = points(modules.svg.path(d, 2))
    assert short[0] == corners[0] and short[-1] == corners[-1]
    assert set(short) <= set(corners)
    # Every turn is still there, and no two points more than the turns need.
    assert all(passes(corner, short) or len(set(corners)) == 1 for corner in corners)


def test_stairs_of_a_thousand_points_become_three(modules):
    d = "M 0 0 " + " ".join(f"L {i / 10} 0.000000" for i in range(1, 1000)) + " L 99.9 5 z"
    assert modules.svg.path(d, 2) == "M 0 0 L 99.9 0 L 99.9 5 z"


def test_drawing_loses_groups_without_meaning_and_no_text(modules):
    svg = (
        '<svg viewBox="0 0 200 100" role="img"><g>\n <g clip-path="url(#c)">\n'
        '  <g><path d="M 1.234567 2.345678 \nC 1 2 3 4 5 6"/></g></g></g>\n'
        '<g><text x="1.23456" transform="rotate(-0 1 2)">two <tspan>words</tspan> here</text>'
        "</g></svg>"
    )
    assert modules.svg.slim(svg) == (
        '<svg viewBox="0 0 200 100" role="img"><g clip-path="url(#c)">'
        '<path d="M 1.23 2.35 C 1 2 3 4 5 6"/></g>'
        '<text x="1.23">two <tspan>words</tspan> here</text></svg>'
    )


def test_large_drawing_says_its_proportions(modules):
    svg = f'<svg viewBox="0 0 200 100" style="width: 7px">{"<path/>" * 60}</svg>'
    opening = modules.svg.far(svg).partition(">")[0]
    assert opening.endswith('style="width: 7px; aspect-ratio: 200 / 100" class="afar"')
    assert modules.svg.far(modules.svg.far(svg)) == modules.svg.far(svg)
    small = '<svg viewBox="0 0 200 100"><path/></svg>'
    assert modules.svg.far(small) == small


PYGMENTS = """
html[data-theme="light"] .highlight { background: #fefefe; color: #080808 }
html[data-theme="light"] .highlight .n { color: #080808 } /* Name */
html[data-theme="light"] .highlight .p { color: #080808 } /* Punctuation */
html[data-theme="light"] .highlight .gs { color: #080808; font-weight: bold }
html[data-theme="dark"] .highlight { background: #2b2b2b; color: #f8f8f2 }
html[data-theme="dark"] .highlight .n { color: #F8F8F2 }
html[data-theme="dark"] .highlight .p { color: #ffd900 }
html[data-theme="dark"] .highlight .gs { color: #f8f8f2; font-weight: bold }
"""


def test_code_keeps_what_has_a_colour_in_any_theme(modules):
    plain = modules.svg.plain(PYGMENTS)
    assert plain == {"n"}
    code = '<span class="n">x</span><span class="p">(</span>'
    page = f'<div class="highlight"><pre>{code}</pre></div>'
    assert modules.svg.listings(page, plain) == page.replace('<span class="n">x</span>', "x")


def test_long_listing_says_how_many_lines_it_has(modules):
    code = "<span></span>" + '<span class="k">if</span> x:\n' * 9
    page = f'<div class="highlight"><pre>{code}</pre></div>'
    assert '<pre class="afar" style="--lines: 9">' in modules.svg.listings(page, set())


def test_description_is_the_first_words_of_the_page(modules):
    section = nodes.section("", nodes.title("", "Title"), nodes.paragraph("", "After this you can"))
    items = [
        nodes.list_item("", nodes.paragraph("", f"do things {'well ' * 9}{i}")) for i in "abcde"
    ]
    section += nodes.bullet_list("", *items)
    document = SimpleNamespace(findall=section.findall)
    text = modules.page.first_words(document, 155)
    assert text.startswith("After this you can do things well")
    assert 77 < len(text) <= 155
    section += nodes.paragraph("", "word " * 99)
    del section[1:3]
    text = modules.page.first_words(document, 155)
    assert 140 < len(text) <= 155
    assert text.endswith(" word…")
