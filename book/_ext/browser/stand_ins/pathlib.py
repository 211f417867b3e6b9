"""A page has no files."""

Path = None
