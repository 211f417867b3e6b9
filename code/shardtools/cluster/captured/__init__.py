"""Three jobs that hang, with captured output: `capture` runs them and writes the texts."""

from pathlib import Path

FOLDER = Path(__file__).parent


def read_log(name: str) -> str:
    """Return the captured text of the job `name`: "uneven", "order" or "tensor"."""
    return (FOLDER / f"{name}.txt").read_text("utf-8")
