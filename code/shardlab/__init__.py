"""One Model, Many GPUs: the library that the lessons show."""

__version__ = "0.1.0"
