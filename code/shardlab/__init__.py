"""One Model, Many GPUs: the code of the course."""

__version__ = "0.1.0"
