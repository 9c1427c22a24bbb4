"""Sizes of axes from a configuration: what is left for -1, and the number of ranks that they must make."""

from __future__ import annotations

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_mesh import read_mesh
from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.language.plan import Mesh


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def mesh(*overrides: str) -> Mesh:
    reading = Reading(*compose_config([f"parallel.mesh.{o}" if o[0] != "w" else o for o in overrides]))
    read = read_mesh(reading)
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return read


def above_1(mesh: Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.sizes.items() if size > 1}


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (["dp_shard=-1", "world_size=8"], {"dp_shard": 8}),
        (["tp=2", "cp=-1", "world_size=8"], {"cp": 4, "tp": 2}),
        (["tp=8", "dp_shard=-1", "world_size=8"], {"tp": 8}),
        (["tp=2", "dp_shard=2", "world_size=4"], {"dp_shard": 2, "tp": 2}),
        (["world_size=1"], {}),
    ],
)
def test_an_axis_takes_what_the_others_leave(overrides: list[str], sizes: dict[str, int]) -> None:
    assert above_1(mesh(*overrides)) == sizes


def test_torchrun_tells_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 6, "MASTER_ADDR": "here", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert above_1(mesh("tp=2", "dp_shard=-1")) == {"dp_shard": 3, "tp": 2}
    # What is asked for goes before what has been started: the recipe compares the two.
    assert above_1(mesh("tp=2", "dp_shard=-1", "world_size=4")) == {"dp_shard": 2, "tp": 2}


@pytest.mark.parametrize(
    ("overrides", "code", "message", "help_text"),
    [
        (["dp_shard=-1"], "mesh-rest-unknown", "needs the number of ranks, which is not known", "world_size=<number"),
        (["dp_shard=-1", "tp=-1", "world_size=8"], "mesh-rest-twice", "dp_shard and tp are both -1", "all of them but one"),
        (["tp=3", "dp_shard=-1", "world_size=8"], "world-size", "8 ranks do not divide by 3 (tp=3)", "can be 1, 2, 4, 8"),
        (["tp=2", "world_size=8"], "world-size", "the mesh has 2 ranks (tp=2), but world_size is 8", "one axis can be -1"),
        (["tp=2", "world_size=0"], "wrong-type", "world_size is 0", "a whole number from 1"),
        (["tp=-2"], "wrong-type", "the size of tp is -2", "a whole number from 1"),
        (["tp=0"], "wrong-type", "the size of tp is 0", "a whole number from 1"),
    ],
)  # fmt: skip
def test_what_does_not_make_a_mesh(overrides: list[str], code: str, message: str, help_text: str) -> None:
    with pytest.raises(PlanError) as caught:
        mesh(*overrides)
    [found] = caught.value.diagnostics
    assert found.code == code and message in found.message and help_text in (found.help or "")
    assert found.span is not None and found.span.file.startswith("<override ")
