"""The cluster that these tests share, or why there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, missing


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running Slurm of two nodes. Skips where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    # Not pytest's folder, which is kept and whose path may be too long for a socket.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
