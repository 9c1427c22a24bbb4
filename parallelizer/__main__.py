"""`python -m parallelizer`."""

import sys

from parallelizer.cli import main

sys.exit(main())
