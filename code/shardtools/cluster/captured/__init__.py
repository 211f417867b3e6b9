"""Three jobs that hang, and what was seen of each: `capture` runs them and writes the texts."""

from pathlib import Path

FOLDER = Path(__file__).parent


def log(name: str) -> str:
    """What was captured of the job `name`: "uneven", "order" or "tensor"."""
    path = FOLDER / f"{name}.txt"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.txt")))
        raise ValueError(f"name={name!r}: allowed are {known}")
    return path.read_text("utf-8")
