"""Tests that the default run leaves out beside those that are marked `slow`: those that left_out.txt names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")


def read(text: str) -> dict[str, dict[str, int]]:
    """By file, how many cases stay of the tests that are named: none, or the first of a function."""
    found: dict[str, dict[str, int]] = {}
    file = ""
    for line in text.splitlines():
        if line.startswith(" "):
            name = line.strip()
            if "[" not in name:  # an id may have a sign of equality too
                name, _, number = name.partition(" = ")
                found[file][name] = int(number or 0)
            else:
                found[file][name] = 0
        elif line and not line.startswith("#"):
            file = line
            found[file] = {}
    return found


def mark(items: list[pytest.Item]) -> None:
    """Mark them `slow`."""
    named = read(LIST.read_text())
    seen: Counter[tuple[str, str]] = Counter()
    for item in items:
        file, _, name = item.nodeid.partition("::")
        function = name.partition("[")[0]
        of_file = named.get(file, {})
        stay = of_file.get(function)
        if stay == 0 or any("[" in one and name.startswith(one) for one in of_file):
            item.add_marker(pytest.mark.slow)
        elif stay is not None and not item.get_closest_marker("slow"):
            seen[file, function] += 1
            if seen[file, function] > stay:
                item.add_marker(pytest.mark.slow)
