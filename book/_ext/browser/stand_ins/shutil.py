"""Stub of shutil: a page has no terminal."""
