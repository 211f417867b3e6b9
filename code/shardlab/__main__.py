"""Same as `python -m shardtools`: the command line that the course's pages print."""

import sys

from shardtools.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
