"""`python -m tests.halves`: the suite in two processes side by side, tests that start ranks and tests that do not.

The first kind waits for processes much of the time, the second is alone on its core. What the second prints follows when
both have ended. Arguments are pytest's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile


def main() -> int:
    """The exit status of the half that failed; 0 if none did."""
    command = [sys.executable, "-m", "pytest", *sys.argv[1:], "-m"]
    with tempfile.TemporaryFile() as out:
        beside = subprocess.Popen([*command, "not slow and not ranks"], stdout=out, stderr=subprocess.STDOUT)
        try:
            status = subprocess.run([*command, "not slow and ranks"]).returncode
            other = beside.wait()
        except KeyboardInterrupt:
            beside.send_signal(signal.SIGINT)
            other = beside.wait()
            status = 130
        out.seek(0)
        sys.stdout.buffer.write(out.read())
        sys.stdout.buffer.flush()
    return status or other


if __name__ == "__main__":
    sys.exit(main())
