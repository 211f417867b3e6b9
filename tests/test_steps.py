"""Pictures in steps: the HTML of the directive, and that lessons show all pictures."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from throwaway import Book

from shardlab import context_parallel, pipeline
from shardlab.common import show

FOLDER = show.ROOT / "figures/steps"
TOPICS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "sheet")
SERIES = sorted({path.stem.rpartition("_")[0] for path in FOLDER.glob("*.svg")})
ITEM = "{0}. ![Two boxes, {0}](../figures/boxes.svg)\n\n   Sentence {0} says why.\n"
STEPS = "\n:::{step-through} A & B\n" + "\n".join(map(ITEM.format, (1, 2, 3))) + ":::\n"


def number(path: Path) -> int:
    """Return the step's number in `zero_10.svg`."""
    return int(path.stem.rpartition("_")[2])


# --- The pictures -----------------------------------------------------------------------------


def list_steps(series: str) -> list[Path]:
    """Return the pictures of a series, in order: a topic's own, or `pipeline_naive`."""
    return sorted(FOLDER.glob(f"{series}_[0-9]*.svg"), key=number)


@pytest.mark.parametrize("series", SERIES)
def test_lessons_show_all_steps_in_order_and_describe_what_is_drawn(series: str) -> None:
    topic = next(topic for topic in TOPICS if series.startswith(topic))
    lesson = (show.ROOT / f"lessons/{topic}.md").read_text("utf-8")
    blocks = re.findall(r"^:::\{step-through\} \S.*?^:::$", lesson, re.DOTALL | re.MULTILINE)
    files = list_steps(series)
    (block,) = (block for block in blocks if f"/{files[0].name})" in block)
    items = re.findall(
        r"^(\d+)\. !\[(.*?)\]\(\.\./figures/steps/(\w+\.svg)\)$", block, re.MULTILINE
    )
    assert [name for _, _, name in items] == [path.name for path in files]
    assert [int(step) for step, _, _ in items] == [number(path) for path in files]
    for (_, alt, _), path in zip(items, files, strict=True):
        label = re.search(r'aria-label="([^"]*)"', path.read_text("utf-8"))[1]
        assert alt == unescape(label)


def test_what_the_sentences_of_1f1b_say() -> None:
    whole = pipeline.simulate(pipeline.make_schedule("1f1b", 4, 6))
    assert (whole.step_time, set(whole.busy_times)) == (27, {18})
    assert whole.bubble == pytest.approx(3 / 9)
    gpipe = pipeline.simulate(pipeline.make_schedule("gpipe", 4, 6))
    assert gpipe.bubble == pytest.approx(whole.bubble)
    assert whole.peak_activations == (4, 3, 2, 1)
    # From 10 to 18 no stage idles.
    for spans in whole.spans:
        inside = [min(s.end, 18) - max(s.begin, 10) for s in spans if s.begin < 18 and s.end > 10]
        assert sum(inside) == 8


def test_what_the_sentences_of_the_zig_zag_say() -> None:
    tokens = 2**14  # so many that half a square plus half its diagonal rounds to half a square
    turns = context_parallel.count_pairs_by_turn("zigzag", 8 * tokens, 4)
    squares = [[pairs / tokens**2 for pairs in rank] for rank in turns]
    assert squares == [pytest.approx([2] * 4, rel=1e-3)] * 4


# --- The directive ----------------------------------------------------------------------------


WRONG = {
    "must contain one ordered list alone, not paragraph": "Words.\n",
    "must have at least two steps": ITEM.format(1),
    "step 2 must begin with ![description](…)": ITEM.format(1) + "2. Words.\n",
    "step 2 has a picture and no sentence": ITEM.format(1) + "2. ![a](../figures/boxes.svg)\n",
}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """Return the small book: steps on its first page, wrong ones on its last, else none."""
    book = Book(tmp_path_factory.mktemp("steps"))
    book.write("book/index.md", "# A book\n" + STEPS + "\nBetween.\n" + STEPS)
    wrong = [f"\n:::{{step-through}} Title\n{content}:::\n" for content in WRONG.values()]
    text = (book.root / "book/execution.md").read_text("utf-8")
    book.write("book/execution.md", text + "".join(wrong))
    book.status = book.build()
    return book


def test_steps_are_a_list_that_reads_without_a_script(book: Book) -> None:
    page = book.read_page("book/index")
    groups = re.findall(r'<div class="steps".*?</ol>\s*</div>', page, re.DOTALL)
    assert len(groups) == 2
    for group in groups:
        assert group.startswith('<div class="steps" role="group" aria-label="A &amp; B, in steps">')
        assert '<p class="steps-title">A &amp; B</p>' in group
        assert re.findall(r'aria-label="(Two boxes, \d)"', group) == [
            f"Two boxes, {step}" for step in (1, 2, 3)
        ]
        assert re.findall(r"Sentence \d", group) == ["Sentence 1", "Sentence 2", "Sentence 3"]
        assert not re.search(r"<button|hidden", group)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_what_is_no_list_of_pictures_is_refused(book: Book) -> None:
    assert book.status != 0
    errors = [line for line in book.log.splitlines() if "ERROR" in line or "WARNING" in line]
    assert len(errors) == len(WRONG)
    for complaint, error in zip(WRONG, errors, strict=True):
        assert re.search(r"book/execution\.md:\d+: ", error)
        assert complaint in error
