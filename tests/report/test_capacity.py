"""Whether a step fits is judged by the rank that needs most, in the same words everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import parallelizer
from parallelizer.report.capacity import capacity
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.rank_classes import RankClass
from parallelizer.simulate.record.trace import Trace

GIB = 1 << 30


def step(*peaks: int | None) -> Trace:
    """Of rank 0, and of as many classes as peaks are given."""
    classes = tuple(RankClass(4 * i, 4, 0, None if p is None else p * GIB) for i, p in enumerate(peaks))
    return Trace(0, (), Usage((peaks[0] or 0) * GIB, "", "", {}), classes=classes)


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ((6,), "X, 8.0 GiB: fits, 2.0 GiB (25%) to spare"),
        ((8,), "X, 8.0 GiB: tight, 0 B (0%) to spare"),
        ((6, 9), "X, 8.0 GiB: does not fit, 1.0 GiB too much on rank 4"),
        ((6, None, 7), "X, 8.0 GiB: fits, 1.0 GiB (12%) to spare on rank 8"),
        ((9, 6), "X, 8.0 GiB: does not fit, 1.0 GiB too much"),
    ],
)
def test_the_class_that_needs_most_decides(peaks: tuple[int | None, ...], said: str) -> None:
    found = capacity(step(*peaks), {"name": "X", "memory_gib": 8})
    assert str(found) == said and found is not None and found.fits == ("does not" not in said)


@pytest.mark.parametrize(
    ("peak", "said"), [(7.1, "fits"), (7.3, "tight"), (8.0, "tight"), (8.1, "does not fit")]
)
def test_above_nine_tenths_of_the_memory_a_step_is_tight(peak: float, said: str) -> None:
    trace = Trace(0, (), Usage(int(peak * GIB), "", "", {}))
    found = capacity(trace, {"name": "X", "memory_gib": 8})
    assert found is not None and found.verdict == said


def test_a_capacity_has_a_fraction_of_a_gib() -> None:
    found = capacity(step(6), {"name": "X", "memory_gib": 7.5})
    assert found is not None and found.total == 7 * GIB + GIB // 2


def test_shipped_capacities_are_below_the_names_on_the_boxes() -> None:
    """A process gets what the driver leaves of the memory: 79.1 GiB of an H100 of 80 GB."""
    folder = Path(parallelizer.__file__).parent / "configs" / "hardware"
    found = {path.stem: OmegaConf.load(path).get("memory_gib") for path in folder.glob("*.yaml")}
    assert found == {
        "a100": 79.1,
        "h100": 79.1,
        "h200": 139.7,
        "b200": 178.3,
        "gb200": 184.0,
        "gb300": 277.0,
        "auto": None,
        "this": None,
    }


def test_without_a_known_memory_there_is_no_verdict() -> None:
    assert capacity(step(1), {"name": "auto"}) is None
