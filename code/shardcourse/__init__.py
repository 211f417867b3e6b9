"""What makes the course: its exercises' checks, and how its pages are executed and kept."""
