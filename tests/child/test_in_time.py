"""A child that is given so many seconds, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallelizer.child.in_time import Failed, NotInTime, in_time


def test_the_result_comes_back_however_large() -> None:
    assert in_time(lambda: {"a": "x" * 10**6}, 20) == {"a": "x" * 10**6}
    assert in_time(lambda: None, 20) is None


def test_what_it_raises_is_told_in_one_line() -> None:
    def fails() -> None:
        raise ValueError("the first line\nand more")

    with pytest.raises(Failed, match=r"^ValueError: the first line$"):
        in_time(fails, 20)
    with pytest.raises(Failed, match="SystemExit: 3"):
        in_time(lambda: sys.exit(3), 20)
    with pytest.raises(Failed, match="status -9"):
        in_time(lambda: os.kill(os.getpid(), 9), 20)
    with pytest.raises(Failed):  # a result that does not pickle
        in_time(lambda: lambda: 1, 20)


def test_after_its_time_it_is_gone_and_what_it_started(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def hangs() -> None:
        sleeper = subprocess.Popen(["sleep", "60"])
        noted.write_text(str(sleeper.pid))
        time.sleep(60)

    with pytest.raises(NotInTime, match=r"not done after 0\.5 s"):
        in_time(hangs, 0.5)
    until = time.monotonic() + 5
    while _lives(int(noted.read_text())) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _lives(int(noted.read_text()))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_it_writes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    in_time(lambda: (print("out"), os.write(2, b"err")), 20)
    assert capfd.readouterr() == ("", "")
