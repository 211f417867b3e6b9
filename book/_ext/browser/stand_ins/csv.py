"""A page reads no tables from files."""
