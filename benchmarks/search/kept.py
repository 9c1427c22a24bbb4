"""Outcomes in a file of JSON lines: a long measurement goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelizer.propose.search.found import SearchResult


class Kept:
    """Outcomes by name; without a file they are forgotten."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        self.found: dict[str, Any] = dict(json.loads(line) for line in lines)

    def of(self, name: str, make: Callable[[], Any]) -> Any:
        """The outcome of that name: the one in the file, or that of `make`, which is plain data."""
        if name not in self.found:
            self.found[name] = made = make()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([name, made]) + "\n")
        return self.found[name]


def uninterrupted(found: SearchResult) -> SearchResult:
    """A search that came to its end. Ctrl-C ends a search with the best so far, and has to end the measurement too."""
    if not found.complete:
        raise KeyboardInterrupt
    return found
