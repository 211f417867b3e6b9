"""Source, tables and pictures, for the page, the notebook and the script."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import pytest

from shardlab import count, show, text


def test_source_links_to_its_file_and_line(root):
    shown = show.source(text.batch)
    lines = (root / "code/shardlab/text.py").read_text().splitlines()
    line = next(i for i, text_ in enumerate(lines, 1) if text_.startswith("def batch"))
    assert f'href="../code/shardlab/text.py#L{line}"' in shown.html
    assert f"text.py, line {line}" in shown.html
    assert "def batch(" in shown.text and 'class="highlight"' in shown.html


def test_decorated_functions_show_their_own_source():
    assert "def sent(" in show.source(count.sent).text


def test_long_source_is_folded_and_short_is_not():
    assert "<details" in show.source(text.Windows, fold=5).html
    assert "<details" not in show.source(text.batch).html


def test_methods_stand_at_the_left_margin():
    assert show.source(text.Windows.__len__).text.splitlines()[1].startswith("def __len__")


def test_a_script_prints_one_line(capsys):
    show.source(text.batch)
    out = capsys.readouterr().out
    assert out.startswith("source: code/shardlab/text.py:") and out.count("\n") == 1


def test_source_of_something_without():
    with pytest.raises(ValueError, match="3 has no source"):
        show.source(3)
    with pytest.raises(ValueError, match="at least one"):
        show.source()


def test_a_table_aligns_numbers_and_escapes(capsys):
    shown = show.table([["a<b", "1.5", "10 %"], ["c", "-22", "5 %"]], ["what", "n", "share"])
    assert "a&lt;b" in shown.html
    assert shown.html.count('class="text-right"') == 6  # two columns, head included
    assert "what" in capsys.readouterr().out


def test_a_table_of_mappings():
    shown = show.table([{"ranks": 2, "bytes": 10}, {"ranks": 4, "bytes": 15}], caption="Sent")
    assert "<caption>Sent</caption>" in shown.html and "ranks" in shown.text


def test_bad_tables():
    with pytest.raises(ValueError, match="a row has 1 cells, its head has 2"):
        show.table([["a"]], ["x", "y"])
    with pytest.raises(ValueError, match="needs head="):
        show.table([["a"]])


def picture():
    show.style()
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot([1, 2, 3], [1, 4, 2])
    axes.fill_between([1, 2], [1, 2])
    axes.set_title("bytes & seconds")
    return figure


def test_a_picture_takes_its_ink_from_the_page():
    shown = show.figure(picture(), "A line that rises & falls.", "one")
    assert "currentColor" in shown.html and show.INK not in shown.html
    assert 'aria-label="A line that rises &amp; falls."' in shown.html
    assert "<text" in shown.html  # text stays text
    assert "<style" not in shown.html  # nothing that would reach the rest of the page
    ElementTree.fromstring(shown.html)


def test_the_same_picture_is_the_same_bytes_and_two_share_no_id():
    first, again = (show.figure(picture(), "A line.", "one").html for _ in range(2))
    other = show.figure(picture(), "A line.", "two").html
    assert first == again

    def ids(page: str) -> set[str]:
        return {e.get("id") for e in ElementTree.fromstring(page).iter() if e.get("id")}

    assert ids(first) and not ids(first) & ids(other)


def test_a_picture_file_follows_the_mode(tmp_path):
    path = show.svg(picture(), tmp_path / "line.svg", "A line.")
    written = path.read_text()
    assert "prefers-color-scheme:dark" in written and "svg:root" in written
    ElementTree.fromstring(written)


def test_a_picture_needs_a_description():
    with pytest.raises(ValueError, match="describe the picture"):
        show.figure(picture(), " ", "one")
