"""Source, tables and pictures, for the page, the notebook and the script."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from shardlab.common import show, text
from shardlab.common.show import drawing
from shardlab.measure import count


def test_source_links_to_its_file_and_line(root):
    shown = show.source(text.batch)
    lines = (root / "code/shardlab/common/text.py").read_text().splitlines()
    line = next(i for i, text_ in enumerate(lines, 1) if text_.startswith("def batch"))
    assert f'href="../code/shardlab/common/text.py#L{line}"' in shown.html
    assert f"text.py, line {line}" in shown.html
    assert "def batch(" in shown.text and 'class="highlight"' in shown.html


def test_decorated_functions_show_their_own_source():
    assert "def sent(" in show.source(count.sent).text


def test_long_source_is_folded_and_short_is_not():
    assert "<details" in show.source(text.Windows, fold=5).html
    assert "<details" not in show.source(text.batch).html


def test_files_that_are_not_python_and_what_a_terminal_said(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text("#SBATCH --nodes=2\nsrun python a.py && echo '<done>'\n")
    shown = show.file(path, "bash")
    assert "&lt;done&gt;" in shown.html and "<details" not in shown.html
    assert "srun python a.py" in shown.text
    assert "<details" in show.file(path, "bash", fold=1).html
    saved = re.search(r'href="data:text/plain;base64,(.*?)" download="job.sbatch"', shown.html)
    assert base64.b64decode(saved[1]).decode() == path.read_text()
    said = show.terminal("$ sinfo -N\nnode1 <idle>\n", "recorded today")
    assert "recorded today" in said.html and "&lt;idle&gt;" in said.html
    assert said.text.endswith("$ sinfo -N\nnode1 <idle>")


def test_methods_stand_at_the_left_margin():
    assert show.source(text.Windows.__len__).text.splitlines()[1].startswith("def __len__")


def test_a_script_prints_one_line(capsys):
    show.source(text.batch)
    out = capsys.readouterr().out
    assert out.startswith("source: code/shardlab/common/text.py:") and out.count("\n") == 1


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


def test_words_on_a_colour_are_legible():
    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert drawing.on("#000000") == "#ffffff" and drawing.on("#ffffff") == "#000000"
    for color in show.RANK_COLORS:
        pair = sorted(luminance(c) for c in (color, drawing.on(color)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) > 4.5  # WCAG 2.1, AA


def test_a_cell_has_a_stripe_for_each_rank_in_it():
    figure, axes = drawing.canvas(2, 1)
    drawing.board(axes, 0.1, 0.1, [[(0, 1, 2)], [()]], new={(0, 0)}, labels=[["sum"], [""]])
    colors = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches[:3]]
    assert colors == show.RANK_COLORS[:3]
    assert len(axes.patches) == 3 + 2  # and two outlines
    assert axes.patches[3].get_linewidth() > axes.patches[4].get_linewidth()
    assert [text.get_text() for text in axes.texts] == ["sum"]
    plt.close(figure)
