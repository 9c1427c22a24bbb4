"""A layout that is not there: the nearest one is named, or the placement that was meant."""

from __future__ import annotations

import pytest

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.layout_names import unknown_layout
from parallelizer.language.plan import Placement


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("straem", "did you mean stream? the layouts are stream"),
        ("replicat", "did you mean replicate? the layouts are stream"),
        ("partail", "did you mean partial? the layouts are stream"),
        ("shrad1", "did you mean shard(1)? the layouts are stream"),
        ("shrad", "did you mean shard(<dimension>)? the layouts are stream"),
        ("other", "the layouts are stream"),
    ],
)
def test_the_nearest_name_is_told(name: str, meant: str) -> None:
    assert unknown_layout(Placement("layout", name=name), ["stream"], Span("f")).help == meant
