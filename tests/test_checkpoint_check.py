"""The exercises of lesson `checkpoint` help with the wrong answers that readers give."""

import gc
import math
import os

import pytest

from shardlab.check import check


def wrong(answer, name, words):
    verdict = check(answer, name)
    assert not verdict.ok and words in verdict.message, verdict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (16 * 8.03e9, "Gradients are computed anew"),
        (4 * 8.03e9, "Those are the weights alone"),
        (12 * 8.03, "In bytes, please"),
        (12 * 8.03e9 / 8, "That is what one rank writes"),
        (1e9, "is too small"),
    ],
)
def test_bytes(answer, words):
    wrong(answer, "checkpoint_bytes", words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((90 * 180_000) ** 0.5, "A factor is missing under the root"),
        ((2 * 90 * 50) ** 0.5, "In seconds, please"),
        (180_000, "That is the time between failures"),
    ],
)
def test_interval(answer, words):
    wrong(answer, "checkpoint_interval", words)


def over_the_old_one(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def old_one_away_first(path, content):
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    path.unlink(missing_ok=True)
    os.rename(beside, path)


def no_fsync(path, content):
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    os.replace(beside, path)


def in_its_own_way(path, content):
    beside = path.with_suffix(".new")
    with open(beside, "xb") as file:
        file.write(content)
        os.fsync(file.fileno())
    os.replace(beside, path)


def does_nothing(path, content):
    pass


def with_a_helper(path, content):
    _flushed(path.with_suffix(".new"), content)
    os.replace(path.with_suffix(".new"), path)


def _flushed(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (over_the_old_one, "leaves a file of 0 bytes, neither the old content nor the new"),
        (old_one_away_first, "it leaves no file at all"),
        (no_fsync, "a machine that loses power can"),
        (in_its_own_way, "the next one raised FileExistsError"),
        (does_nothing, "does not leave the new content"),
    ],
)
def test_write(answer, words):
    wrong(answer, "my_write", words)


def test_kills_count_the_lines_of_the_answer_alone():
    """A collection has callbacks (Hypothesis's, IPython's) that run in the middle of the answer.

    Each process that is killed counts lines for itself. Were a callback's among them in one and
    not in the next, the one line at which this answer loses the file could be passed over.
    """

    def callback(_phase, _info):
        pass

    quiet = check(old_one_away_first, "my_write").message
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        assert check(old_one_away_first, "my_write").message == quiet
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)


def with_a_helper_inside(path, content):
    def flushed(name):
        with open(name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return name

    os.replace(flushed(f"{path}.new"), path)


@pytest.mark.parametrize("answer", [with_a_helper, with_a_helper_inside])
def test_write_with_a_helper_is_right(answer):
    verdict = check(answer, "my_write")
    assert verdict.ok and "killed at" in verdict.message, verdict


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda s, b, r, n: range(r * b // n, (r + 1) * b // n), "beginning of the data again"),
        (lambda s, b, r, n: range(s + r * b, s + r * b + b), "instead of 2: the batch is that of"),
        (lambda s, b, r, n: range(s, s + b // n), "Some windows go to two ranks"),
        (lambda s, b, r, n: None, "There is no answer yet"),
    ],
)
def test_share(answer, words):
    wrong(answer, "my_share", words)


def test_share_dealt_in_turn_is_right_too():
    assert check(lambda s, b, r, n: range(s + r, s + b, n), "my_share").ok


def pieces(theirs_from="theirs", directions=2, empty=False):
    """An answer to `my_pieces`, right unless told otherwise."""

    def answer(saved, offset, size):
        plan = []
        for file, corner, extent in saved:
            both = list(zip(offset, size, corner, extent, strict=True))
            cuts = [(max(a, b), min(a + n, b + m)) for a, n, b, m in both]
            for i in range(directions, 2):  # forgotten: takes all that there is
                cuts[i] = (offset[i], offset[i] + size[i])
            if all(low < high for low, high in cuts) or empty:
                start = {"theirs": corner, "whole": (0, 0), "mine": offset}[theirs_from]
                theirs = tuple(
                    slice(low - c, max(low, high) - c)
                    for (low, high), c in zip(cuts, start, strict=True)
                )
                mine = tuple(
                    slice(low - c, max(low, high) - c)
                    for (low, high), c in zip(cuts, offset, strict=True)
                )
                plan.append((file, theirs, mine))
        return plan

    return answer


def first_rows(saved, offset, size):
    """As many rows and columns as are wanted, but always the first of each file."""
    return [
        (file, tuple(slice(0, s.stop - s.start) for s in theirs), mine)
        for file, theirs, mine in pieces()(saved, offset, size)
    ]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (pieces(empty=True), "nothing in 2.pt is of use: leave it out"),
        (pieces("whole"), "is nothing of 1.pt, whose box begins at (2, 0)"),
        (pieces("mine"), "is nothing of 1.pt, whose box begins at (2, 0): is it counted from"),
        (pieces(directions=1), "have not the same size: each is counted from the corner"),
        (lambda *given: pieces()(*given)[:1], "numbers are not read"),
        (first_rows, "other numbers than those of the whole matrix"),
        (lambda *_: None, "There is no answer yet"),
        (lambda saved: [], "raised TypeError"),
    ],
)
def test_pieces(answer, words):
    wrong(answer, "my_pieces", words)


def test_pieces_in_any_order_are_right():
    right = pieces()
    assert check(lambda *given: right(*given)[::-1], "my_pieces").ok


def every(hold, wait=lambda size, write: size / write, root=2):
    """An answer to `my_save_interval` from what it takes for the hold-up and the shortest wait."""

    def answer(size, ranks, copy, write, mtbf):
        return max(math.sqrt(root * hold(size, ranks, copy, write) * mtbf), wait(size, write))

    return answer


def own_share(size, ranks, copy, write):
    return size / ranks / copy


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (every(own_share, lambda size, write: 0), "there is a shortest interval, too"),
        (lambda size, ranks, copy, write, mtbf: size / write, "more often than it pays"),
        (every(lambda size, ranks, copy, write: size / copy), "Each rank copies its own share"),
        (every(lambda size, ranks, copy, write: size / write), "only the copy holds it up"),
        (every(own_share, root=1), "A factor is missing under the root"),
        (every(own_share, root=2 / 64), "that of the whole job already"),
        (every(own_share, root=3), "is too large"),
        (lambda *_: "often", "should be a number of seconds"),
        (lambda size: size, "raised TypeError"),
    ],
)
def test_save_interval(answer, words):
    wrong(answer, "my_save_interval", words)


def test_save_interval_is_youngs_or_what_storage_takes():
    assert check(every(own_share), "my_save_interval").ok
