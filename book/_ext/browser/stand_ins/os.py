"""A page has no files: what options do with them, none of a calculator's does."""
