"""The offline text and its loader."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from shardlab.common import text


def test_it_is_real_text_and_the_same_in_every_process():
    data = text.load_corpus()
    assert data.dtype == torch.uint8 and len(data) > 2_000_000
    assert b"def " in bytes(data[:50_000].tolist())
    program = "from shardlab.common import text; import hashlib;"
    program += "print(hashlib.sha256(text.load_corpus().numpy().tobytes()).hexdigest())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == hashlib.sha256(data.numpy().tobytes()).hexdigest()


def test_targets_are_the_next_tokens():
    windows = text.TokenWindows(32)
    tokens_S, targets_S = windows[5]
    assert tokens_S.dtype == torch.int64 and tokens_S.shape == (32,)
    assert torch.equal(tokens_S[1:], targets_S[:-1])
    assert targets_S[-1] == windows[6][0][0]  # windows overlap by the target
    assert int(tokens_S.max()) < 256


def test_the_last_window_still_has_its_target(tmp_path):
    path = tmp_path / "tiny.txt"
    for size in range(5, 14):
        path.write_bytes(bytes(range(size)))
        windows = text.TokenWindows(4, path)
        text.load_corpus.cache_clear()
        assert len(windows) == (size - 1) // 4
        assert windows[len(windows) - 1][1].shape == (4,)
        with pytest.raises(IndexError):
            windows[len(windows)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: text.load_corpus("/no/such/file"), "source='/no/such/file': must be 'stdlib'"),
        (lambda: text.TokenWindows(0), "seq=0: must be from 1 to"),
        (lambda: text.get_batch(8, -1), "size=-1: must lie within windows 0 to"),
    ],
)
def test_bad_input(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
