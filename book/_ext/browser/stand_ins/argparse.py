"""Stub of argparse: a page has no command line, and `calculators.Options` collects the options."""

RawDescriptionHelpFormatter = None


class ArgumentParser:
    """Stub of the base class of `shardtools.options.Parser`, which no page uses."""
