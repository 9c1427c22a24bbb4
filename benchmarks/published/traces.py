"""The dry runs of published runs, kept in a folder while constants are fitted."""

from __future__ import annotations

import functools
import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.compose import CONF, Composed
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record import trace_classes as recording
from parallelizer.simulate.record.action_lines import PipelineLines
from parallelizer.simulate.record.operators import Moment
from parallelizer.simulate.record.trace_classes import trace_classes


@dataclass(frozen=True)
class Traced:
    """The time line of a step, and the peaks of its memory in bytes: of the whole step, and around the loss. A pipeline has the
    lines of its actions, and is seen from its last stage, as torchtitan logs it.
    """

    line: tuple[Moment, ...]
    peak: int
    mesh: Mesh
    pipeline: PipelineLines | None = None
    loss_peak: int = 0


@functools.cache
def _recorded_by() -> str:
    """The code whose change makes kept dry runs useless: what records them, and the models of this benchmark."""
    files = [*Path(recording.__file__).parent.glob("*.py"), *CONF.rglob("*.yaml"), CONF.parent / "gpt.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def file_of(composed: Composed, folder: Path) -> Path:
    """Where the dry run of a configuration is kept, whatever the folder of this repository."""
    said = [one for one in composed.overrides if not one.startswith("hydra.searchpath")]
    return folder / f"{hashlib.sha256(repr((said, _recorded_by())).encode()).hexdigest()[:16]}.pickle"


def traced(composed: Composed, folder: Path | None = None) -> Traced:
    """The dry run of a configuration; from `folder`, if it is there. Raises PlanError."""
    file = file_of(composed, folder) if folder is not None else None
    if file is not None and file.is_file():
        found: Traced = pickle.loads(file.read_bytes())
        return found
    setup = from_config(*compose_config(list(composed.overrides)))
    model = setup.build_model()
    stages = setup.mesh.size("pp")
    last = (stages - 1) * (setup.mesh.world_size // stages)
    step = trace_classes(setup.compile(model), model, setup.recipe(), last)
    loss = [
        p.total for p in step.memory.course if p.phase == "loss" or (p.phase, p.module) == ("backward", "")
    ]
    made = Traced(step.line, step.memory.peak, setup.mesh, step.pipeline, max(loss, default=0))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(made))
    return made
