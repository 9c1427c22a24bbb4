"""Speed of one rehearsed rank: eager and compiled, with the graphs that were made, and attention under context parallelism."""

from __future__ import annotations

from benchmarks.gpu.cases import Case
from benchmarks.gpu.memory import B8, CHECKPOINT, CUT, FSDP8, LONG, TP8, rehearsed

COMPILE = 'rules=["layers.*: compile"]'
TWELVE = "model.n_layers=12"


def _case(name: str, *words: str) -> Case:
    return Case(f"speed {name}", rehearsed, (0, *words), limit=170)


CASES = (
    _case("8B single 12 layers eager", B8, LONG, "train.batch_size=1", TWELVE),
    _case("8B fsdp8 12 layers eager", B8, FSDP8, LONG, "train.batch_size=8", TWELVE),
    _case("8B fsdp8 12 layers compiled", B8, FSDP8, LONG, "train.batch_size=8", TWELVE, COMPILE),
    _case("8B tp8 12 layers eager", B8, TP8, LONG, "train.batch_size=1", TWELVE),
    _case("8B tp8 12 layers compiled", B8, TP8, LONG, "train.batch_size=1", TWELVE, COMPILE),
    _case(
        "8B fsdp8_tp8 12 layers compiled",
        B8,
        "parallel=fsdp8_tp8",
        LONG,
        "train.batch_size=8",
        TWELVE,
        COMPILE,
    ),
    _case("8B cp2 8 layers eager", B8, "parallel.mesh.cp=2", LONG, "train.batch_size=1", CUT, CHECKPOINT),
)
