"""Small modules that the whole course shares: arguments, devices, shapes, text, pictures."""

PACKAGES = (
    "shardlab",
    "shardtools",
    "shardcourse",
)  # by which the course knows its own files
