"""Two nodes, or why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes.network import Nodes, missing


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes that reach each other. Skips where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    made = Nodes(2)
    try:
        made.make()
        yield made
    finally:
        made.remove()
