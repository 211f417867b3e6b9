"""A page has no files: none exists, and none can be read."""


class Path:
    """Where a file would be."""

    def __init__(self, *given):
        self.parent = self

    def __truediv__(self, name):
        return self

    def exists(self):
        """No."""
        return False

    def read_text(self, encoding):
        """Raises OSError."""
        raise FileNotFoundError(2, "a page has no files")
