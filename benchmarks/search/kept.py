"""Outcomes in a file of JSON lines: a long measurement goes on where it ended."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelizer.propose.search.found import SearchResult


class Kept:
    """Outcomes by name, each with git's hash of the package that it was measured with; without a file they are forgotten. `stale`
    has the names of those from another package than the one that is checked out.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.package = path, _package()
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        read = [json.loads(line) for line in lines]
        self.found: dict[str, Any] = {name: outcome for name, outcome, _ in read}
        self.stale = [name for name, _, package in read if package != self.package]

    def of(self, name: str, make: Callable[[], Any]) -> Any:
        """The outcome of that name: the one in the file, or that of `make`, which is plain data."""
        if name not in self.found:
            self.found[name] = made = make()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([name, made, self.package]) + "\n")
        return self.found[name]


def _package() -> str:
    """The hash of `parallelizer/` in the commit that is checked out; empty outside of a clone."""
    command = ["git", "rev-parse", "--short", "HEAD:parallelizer"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return made.stdout.strip()


def uninterrupted(found: SearchResult) -> SearchResult:
    """A search that came to its end. Ctrl-C ends a search with the best so far, and has to end the measurement too."""
    if not found.complete:
        raise KeyboardInterrupt
    return found
