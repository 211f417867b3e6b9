"""A page shows every character."""
