"""A page has no terminal."""
