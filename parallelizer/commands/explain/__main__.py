"""`python -m parallelizer.commands.explain > docs/diagnostics.md`."""

import sys

from parallelizer.commands.explain.page import page

if __name__ == "__main__":
    sys.stdout.write(page())
