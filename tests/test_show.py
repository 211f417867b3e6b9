"""Source, tables and pictures, for the page, the notebook and the script."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt

from shardlab.common import show, text


def test_source_links_to_its_file_and_line(root):
    shown = show.source(text.get_batch)
    lines = (root / "code/shardlab/common/text.py").read_text().splitlines()
    line = next(i for i, text_ in enumerate(lines, 1) if text_.startswith("def get_batch"))
    assert f'href="../code/shardlab/common/text.py#L{line}"' in shown.html
    assert f"text.py, line {line}" in shown.html
    assert "def get_batch(" in shown.text and 'class="highlight"' in shown.html


def test_files_that_are_not_python_and_what_a_terminal_said(tmp_path):
    path = tmp_path / "job.sbatch"
    path.write_text("#SBATCH --nodes=2\nsrun python a.py && echo '<done>'\n")
    shown = show.file(path, "bash")
    assert "&lt;done&gt;" in shown.html and "<details" not in shown.html
    assert "srun python a.py" in shown.text
    assert "<details" in show.file(path, "bash", fold=1).html
    said = show.terminal("$ sinfo -N\nnode1 <idle>\n", "recorded today")
    assert "recorded today" in said.html and "&lt;idle&gt;" in said.html
    assert said.text.endswith("$ sinfo -N\nnode1 <idle>")


def test_a_table_aligns_numbers_and_escapes(capsys):
    shown = show.table([["a<b", "1.5", "10 %"], ["c", "-22", "5 %"]], ["what", "n", "share"])
    assert "a&lt;b" in shown.html
    assert shown.html.count('class="text-right"') == 6  # two columns, head included
    assert "what" in capsys.readouterr().out


def draw_picture():
    show.set_style()
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot([1, 2, 3], [1, 4, 2])
    axes.fill_between([1, 2], [1, 2])
    axes.set_title("bytes & seconds")
    return figure


def test_a_picture_takes_its_ink_from_the_page():
    shown = show.figure(draw_picture(), "A line that rises & falls.", "one")
    assert "currentColor" in shown.html and show.INK not in shown.html
    assert 'aria-label="A line that rises &amp; falls."' in shown.html
    assert "<text" in shown.html  # text stays text
    assert "<style" not in shown.html  # no style that would affect the rest of the page
    ElementTree.fromstring(shown.html)


def test_the_same_picture_is_the_same_bytes_and_two_share_no_id():
    first, again = (show.figure(draw_picture(), "A line.", "one").html for _ in range(2))
    other = show.figure(draw_picture(), "A line.", "two").html
    assert first == again

    def list_ids(page: str) -> set[str]:
        return {e.get("id") for e in ElementTree.fromstring(page).iter() if e.get("id")}

    assert list_ids(first) and not list_ids(first) & list_ids(other)


def test_a_picture_file_follows_the_mode(tmp_path):
    path = show.save_svg(draw_picture(), tmp_path / "line.svg", "A line.")
    written = path.read_text()
    assert "prefers-color-scheme:dark" in written and "svg:root" in written
    ElementTree.fromstring(written)
