"""A page has no command line: `calculators.Options` takes in what commands declare."""

RawDescriptionHelpFormatter = None
