"""`python -m tests.hostile`: exit status 1 when an attack does anything but be refused."""

from __future__ import annotations

import argparse
import sys

from tests.hostile.report import probed, summary


def main() -> int:
    """Run every attack and print what came of them."""
    parser = argparse.ArgumentParser("python -m tests.hostile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each attack in one place only")
    results = probed(thorough=not parser.parse_args().quick)
    text, failed = summary(results)
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
