"""Commands that show the library's own figures: memory, mesh, schedule."""
