"""A page has no command line: `calculators.Options` takes in what commands declare."""

RawDescriptionHelpFormatter = None


class ArgumentParser:
    """What `shardtools.options.Parser` is made from; no page has one."""
