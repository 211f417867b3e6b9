"""Stub of fractions: formulas with fractions are imported, but no calculator evaluates them."""


class Fraction:
    """Stub that cannot be instantiated."""

    def __init__(self, *given):
        raise NotImplementedError("the calculators of a page know no fractions")
