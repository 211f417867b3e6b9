"""What makes pages light: styles, drawings and listings lose what does not show, and no more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from docutils import nodes

from shardlab.common import show


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
@media (width > 3px) { .b { color: red } .a:is(.a, .b) { color: blue } }
@media print { .b { color: red } }
.d\\:wide { width: 1px }
@keyframes turn { to { rotate: 1turn } }
@keyframes jump { to { top: 0 } }
.a { animation: turn 1s }
"""


def test_styles_keep_what_can_match(modules):
    css = modules.css.purge(CSS, {"a", "one", "d:wide"})
    assert css == (
        '.a,.b>p{color:red}#one:not(.b):before{content:"} .b {"}p[class*=\\.b]{margin:0}'
        "@media not (max-width:3px){.a:is(.a,.b){color:#00f}}"
        ".d\\:wide{width:1px}@keyframes turn{to{rotate:1turn}}.a{animation:1s turn}"
    )


def test_imported_styles_stand_in_place_and_addresses_are_seen_from_the_folder(modules, tmp_path):
    (tmp_path / "styles").mkdir()
    (tmp_path / "styles/theme.css").write_text('@import "../basic.css";\na{b:url(../x/y.png)}')
    (tmp_path / "basic.css").write_text("i{b:url(z.png)} u{b:url(data:image/png;base64,AA)}")
    css = modules.css.read(tmp_path, "styles/theme.css")
    assert 'i{b:url("z.png")}' in css
    assert 'a{b:url("x/y.png")}' in css
    assert "data:image/png;base64,AA" in css
    assert "@import" not in css


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
