"""Rates are fitted in a terminal; a page computes with those that are known."""


def median(values):
    """The middle one of them, or between the two."""
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
