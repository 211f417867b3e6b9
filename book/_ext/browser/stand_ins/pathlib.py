"""Stub of pathlib: a page has no files, so that no path exists and none can be read."""


class Path:
    """Path of a file that does not exist."""

    def __init__(self, *given):
        self.parent = self

    def __truediv__(self, name):
        return self

    def exists(self):
        """Return False."""
        return False

    def read_text(self, encoding):
        """Raise FileNotFoundError."""
        raise FileNotFoundError(2, "a page has no files")
