"""Tools that a practitioner runs beside the library: planner, parity, doctor, command line."""
