"""`contextmanager` decorates what measures; a page measures nothing."""


def contextmanager(function):
    """The function, of which no page makes use."""
    return function
