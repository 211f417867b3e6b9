"""Commands that print the library's own figures: memory, mesh, schedule."""
