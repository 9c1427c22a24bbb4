"""What a search is asked for: the configuration without a mesh, the GPUs, and the limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.hardware_device import hardware_device
from parallelizer.configuration.read_setup import from_config, from_overrides
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import Plan
from parallelizer.propose.search.candidate import Candidate
from parallelizer.propose.search.preset import differing, run_overrides
from parallelizer.propose.search.setups import float8_rules
from parallelizer.propose.search.within import Within, read_within
from parallelizer.report.capacity import COMFORTABLE
from parallelizer.simulate.time.machine import Machine, machine_of

NAME = "found"
"""The name of a preset that has no file yet."""


@dataclass(frozen=True)
class SearchTask:
    """`base` is the configuration on one rank, from `overrides`, which a run of a found preset repeats, and from what is `given`
    of the key `parallel`, which stands in every preset. `memory` are the bytes that a rank may hold; `traced` is the number of
    candidates that are traced whole, if that is no long work, and `asked` those that are in any case. With `front`, so are some
    that are slower and hold less.
    """

    base: Setup
    overrides: tuple[str, ...]
    given: Mapping[str, Any]
    gpus: int
    machine: Machine
    memory: int
    within: Within
    config_dir: str | None = None
    config_name: str = "train"
    traced: int = 10
    asked: int = 2
    front: bool = False

    def setup_of(self, text: str, candidate: Candidate) -> Setup:
        """The setup of a run with the preset `text`, composed as every command does. Raises PlanError."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "parallel" / f"{NAME}.yaml"
            file.parent.mkdir()
            file.write_text(text)
            own = [folder, *([self.config_dir] if self.config_dir else [])]
            overrides = [*self.overrides, f"parallel={NAME}", *run_overrides(candidate)]
            return from_config(*compose_config(overrides, own, self.config_name))


def read_task(
    overrides: Sequence[str],
    *,
    within: Sequence[str] = (),
    memory: int | None = None,
    config_dir: str | None = None,
    config_name: str = "train",
    front: bool = False,
    asked: int | None = None,
) -> SearchTask:
    """The task of a command line. `overrides` are those of a run, and `gpus=N`; `memory` are the bytes that a rank may hold,
    by default nine tenths of the device's; `front` and `asked` as in `SearchTask`, `asked` 2 to 10. Raises PlanError.
    """
    limits, rest = read_within(within, overrides)
    gpus, rest = _gpus(rest)
    _refuse_preset(rest)
    base = from_overrides(rest, config_dir=config_dir, config_name=config_name)
    if limits.sets("precision"):
        _refuse_precision(base.plan)
    machine = machine_of(base.hardware)
    if machine is None:
        raise _mistake(
            "search-hardware",
            "the speed of the hardware is not known",
            "add hardware=h100, or another of `parallelizer/configs/hardware`; hardware=this measures this machine",
        )
    if added := hardware_device(base):
        rest += added
        base = from_overrides(rest, config_dir=config_dir, config_name=config_name)
    run = [one for one in rest if not _of_preset(one)]
    given = _parallel(rest, config_dir, config_name)
    given = differing(given, _parallel([*run, "parallel=base"], config_dir, config_name))
    _refuse_pipeline(given.get("pipeline", {}))
    return SearchTask(
        base,
        tuple(run),
        given,
        gpus,
        machine,
        memory or _memory(base, machine, gpus),
        limits,
        config_dir,
        config_name,
        front=front,
        asked=min(max(asked or 0, SearchTask.asked), SearchTask.traced),
    )


def _gpus(overrides: Sequence[str]) -> tuple[int, list[str]]:
    """The number of GPUs, and the other overrides."""
    said = [one.partition("=")[2] for one in overrides if one.startswith("gpus=")]
    rest = [one for one in overrides if not one.startswith("gpus=")]
    if not said or not said[-1].isdecimal() or int(said[-1]) < 1:
        message = f"gpus={said[-1]} is no number of GPUs" if said else "the number of GPUs is not given"
        raise _mistake("search-gpus", message, "add gpus=<number of GPUs>, as in gpus=64")
    return int(said[-1]), rest


def _refuse_preset(overrides: Sequence[str]) -> None:
    """A preset is what is searched for."""
    chosen = next((one for one in overrides if one.lstrip("+~").startswith("parallel=")), None)
    if chosen is not None:
        raise _mistake(
            "search-preset",
            f"{chosen} chooses a preset, which is what the search looks for",
            "leave it out; to fix a part of it, set that key, as in parallel.mesh.tp=8 or --within mesh.tp=1..8",
        )


def _refuse_pipeline(given: Mapping[str, Any]) -> None:
    """Of a pipeline only a list of layers can be given: a word chooses how layers are cut, and a file the whole schedule."""
    for key in ("balance", "csv"):
        value = given.get(key)
        if isinstance(value, str):
            raise _mistake(
                "search-preset",
                f"parallel.pipeline.{key}={value} chooses what the search looks for",
                "leave it out, or give the number of layers of each stage, as in parallel.pipeline.balance=[7,9]",
            )


def _refuse_precision(plan: Plan) -> None:
    """The rules of a plan with float8 name the modules whose precision is searched for, unless no preset can change them."""
    rules = float8_rules(plan)
    late = next((rule for rule in rules if rule.span.file.startswith("<override rules")), None)
    if late is not None:
        raise PlanError(
            [
                Diagnostic(
                    "search-within",
                    f"no preset can change the precision of {late.key}: a rule of the command line wins over it",
                    late.span,
                    "write the rule into the plan",
                )
            ]
        )
    if not rules:
        raise _mistake(
            "search-within",
            "precision has a limit, and no rule of the plan has the style float8",
            "name the linears in the plan, as in `layers.*.feed_forward.w[123]: float8`, or leave precision out",
        )


def _of_preset(override: str) -> bool:
    return override.lstrip("+~").startswith("parallel.")


def _parallel(overrides: Sequence[str], config_dir: str | None, config_name: str) -> dict[str, Any]:
    """The key `parallel` of a configuration, with its interpolations as they are written."""
    config, _ = compose_config(overrides, config_dir, config_name)
    plain: Any = OmegaConf.to_container(config.parallel, resolve=False)
    return {key: value for key, value in plain.items() if key != "mesh"}


def _memory(base: Setup, machine: Machine, gpus: int) -> int:
    """The bytes that a rank may hold: those that `plan` calls comfortable; on this machine the ranks share its memory."""
    total = base.hardware.get("memory_gib")
    if total:
        return int(COMFORTABLE * float(total) * 2**30)
    if machine.measured:
        return int(COMFORTABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // gpus
    raise _mistake(
        "search-hardware", f"the memory of {machine.name} is not known", "add --memory, as in --memory 72GiB"
    )


def _mistake(code: str, message: str, advice: str) -> PlanError:
    return PlanError([Diagnostic(code, message, None, advice)])
