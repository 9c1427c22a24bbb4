"""`python -m tests.side_by_side`: the suite in three processes, which is what two cores like: tests that start ranks wait for
processes much of the time.

What the second and the third print follows when all have ended. Arguments are pytest's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from typing import IO

FOLDERS = [
    f"tests/{name}" for name in ("checks", "codes", "fuzz", "hostile", "mutation", "recipes", "show", "typos")
]
"""They make a third of the time: those that compile plans and start no ranks but for a few, and the recipe's, which do."""

OTHERS = ["tests", *(f"--ignore={folder}" for folder in FOLDERS)]

PARTS = (
    ["-m", "not slow and ranks", *OTHERS],
    ["-m", "not slow", *FOLDERS],
    ["-m", "not slow and not ranks", *OTHERS],
)
"""Each test is in one part; they take about as long as each other."""


def main() -> int:
    """The exit status of a part that failed; 0 if none did."""
    first, *others = PARTS
    running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    status = 130
    try:
        for part in others:
            out = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            running.append((subprocess.Popen(_command(part), stdout=out, stderr=subprocess.STDOUT), out))
        status = subprocess.run(_command(first)).returncode
        status = next((s for s in [status, *(process.wait() for process, _ in running)] if s), 0)
    except KeyboardInterrupt:
        for process, _ in running:
            process.send_signal(signal.SIGINT)
    for process, out in running:
        process.wait()
        out.seek(0)
        sys.stdout.buffer.write(out.read())
    sys.stdout.buffer.flush()
    return status


def _command(part: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *sys.argv[1:], *part]


if __name__ == "__main__":
    sys.exit(main())
