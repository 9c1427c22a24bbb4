"""`python -m tests.hostile`: exit status 1 when an attack does anything but be refused."""

from __future__ import annotations

import sys

from tests.hostile.report import probed, summary


def main() -> int:
    """Run every attack and print what came of them."""
    results = probed()
    text, failed = summary(results)
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
