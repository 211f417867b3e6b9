"""Stub of contextlib: `contextmanager` decorates code that measures, which no page runs."""


def contextmanager(function):
    """Return the function unchanged; no page uses it."""
    return function


class suppress:
    """Context manager that suppresses these errors."""

    def __init__(self, *errors):
        self.errors = errors

    def __enter__(self):
        return None

    def __exit__(self, kind, error, traceback):
        return kind is not None and issubclass(kind, self.errors)
