"""The device that a dry run is of, where only `hardware` says it."""

from __future__ import annotations

from parallelizer.configuration.setup import Setup


def hardware_device(setup: Setup) -> list[str]:
    """The override for a GPU that `hardware` names while `device` is `auto`: what is planned for an H100 is a step on CUDA, on
    machines without a GPU too. Empty where nothing is to be added.
    """
    from parallelizer.simulate.time.machine import machine_of

    machine = machine_of(setup.hardware) if setup.device_choice == "auto" else None
    return ["device=cuda"] if machine is not None and not machine.measured else []
