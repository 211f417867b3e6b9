"""Measurements of bytes held and sent, FLOP and seconds; and an emulated slow link."""
