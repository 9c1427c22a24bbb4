"""Functions for the processes of cases, which import this file: it imports neither torch nor the parts."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.gpu.cases import Row, Where


def failing(where: Where) -> Iterator[Row]:
    yield {"a": 1}
    raise ValueError("on purpose")


def sleeping(where: Where, seconds: float) -> Iterator[Row]:
    time.sleep(seconds)
    yield {"slept": seconds}
