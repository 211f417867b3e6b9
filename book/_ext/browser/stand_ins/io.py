"""A page has no files."""
