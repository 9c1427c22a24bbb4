"""`python -m parallelizer`."""

import sys

from parallelizer.diagnostics import interrupts


def run() -> int:
    """The command line, from before its imports on. Returns the exit status."""
    interrupts.end_at_once()
    from parallelizer.commands.main import main

    interrupts.raise_again()
    return main()


if __name__ == "__main__":
    sys.exit(run())
