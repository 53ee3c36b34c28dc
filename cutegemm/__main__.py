"""`python -m cutegemm ...`: see cli.py."""

import sys

from cutegemm.cli import main

if __name__ == "__main__":
    sys.exit(main())
