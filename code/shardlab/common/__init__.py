"""Small modules that the whole package shares: arguments, devices, shapes, text, pictures."""

PACKAGES = ("shardlab", "shardtools", "shardcourse")  # the course's own packages
