"""The device that a dry run is of, where only `hardware` says it."""

from __future__ import annotations

import dataclasses

import pytest

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.hardware_device import hardware_device
from parallelizer.configuration.read_setup import from_config
from parallelizer.report.diff import of_overrides
from parallelizer.simulate.time import machine


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        (["hardware=h100"], ["device=cuda"]),
        (["hardware=h100", "device=cpu"], []),
        (["hardware=h100", "device=cuda"], []),
        ([], []),
    ],
)
def test_the_hardware_of_a_gpu_says_that_a_step_on_cuda_is_planned(
    overrides: list[str], added: list[str]
) -> None:
    assert hardware_device(from_config(*compose_config(overrides))) == added


def test_what_is_measured_here_is_planned_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = from_config(*compose_config(["hardware=h100"]))
    known = machine.machine_of(setup.hardware)
    assert known is not None
    monkeypatch.setattr(machine, "machine_of", lambda hardware: dataclasses.replace(known, measured=True))
    assert hardware_device(setup) == []


def test_both_sides_of_a_comparison_are_planned_for_it() -> None:
    model = ["model.n_layers=1", "parallel=fsdp2"]
    with_it, without, on_cpu = (
        of_overrides([*model, *more], None, "train", 0).figures
        for more in (["hardware=h100", "device=cuda"], ["hardware=h100"], ["hardware=h100", "device=cpu"])
    )
    assert with_it == without != on_cpu
