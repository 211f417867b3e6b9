"""Command `python -m rehearsal`: see `lessons`."""

import sys

from .lessons import main

sys.exit(main())
