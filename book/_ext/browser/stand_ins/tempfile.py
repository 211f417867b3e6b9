"""Stub of tempfile: a page has no files, and no calculator uses options that need them."""
