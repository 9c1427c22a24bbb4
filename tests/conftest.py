"""What holds for every test."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch._dynamo  # which every rank would import after its fork: half a second each, spent once here
from hypothesis import settings

# Tests fork ranks, and a process that forks must not have run OpenMP threads: before the first operation.
torch.set_num_threads(1)

# Tables are as wide as what they are written to; a runner that starts workers may have set a width for them.
os.environ.pop("COLUMNS", None)

# What an example does is bounded by its test; how long it takes is up to the machine, which is shared.
settings.register_profile("parallelizer", deadline=None)
settings.load_profile("parallelizer")

gc.disable()  # until all is collected: modules and tests are no garbage


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """How pytest-xdist deals tests to its processes, under `--dist loadgroup`.

    Tests that start ranks stay together, one after another in one process: two at once would starve each other of
    cores until a collective runs out of time. The tests of a file share its fixtures, so they stay together too.
    """
    for item in items:
        group = "ranks" if item.get_closest_marker("ranks") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: nobody looks for garbage in it, here or in a fork."""
    gc.freeze()
    gc.enable()
