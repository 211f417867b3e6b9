"""Stub of io: a page has no files."""
