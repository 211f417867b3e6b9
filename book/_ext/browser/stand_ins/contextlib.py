"""`contextmanager` decorates what measures; a page measures nothing."""


def contextmanager(function):
    """The function, of which no page makes use."""
    return function


class suppress:
    """Goes on behind the block where one of these errors ended it."""

    def __init__(self, *errors):
        self.errors = errors

    def __enter__(self):
        return None

    def __exit__(self, kind, error, traceback):
        return kind is not None and issubclass(kind, self.errors)
