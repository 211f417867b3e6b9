"""Checks of the course's exercises, and tools that execute its pages and record their outputs."""
