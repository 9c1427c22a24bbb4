"""Speed of one rehearsed rank: eager and compiled, with the graphs that were made, attention under context parallelism, and each
recipe of float8 beside bfloat16.
"""

from __future__ import annotations

from benchmarks.gpu.cases import Case
from benchmarks.gpu.memory import B8, CHECKPOINT, CUT, FSDP8, LONG, TP8, rehearsed
from parallelizer.styles.float8.recipes import TORCHAO_NAMES

COMPILE = 'rules=["layers.*: compile"]'
TWELVE = "model.n_layers=12"


def _case(name: str, *words: str) -> Case:
    return Case(f"speed {name}", rehearsed, (0, *words), limit=170)


def _float8(recipe: str, *, gathered: bool = False) -> Case:
    """A rank of the compiled fsdp8 with all linears of its layers in float8; with `gathered`, fsdp gathers them so."""
    linears = "layers.*.{attention.w[qkvo],feed_forward.w[123]}"
    rules = ["layers.*: compile", f"{linears}: {{style: float8, recipe: {recipe}}}"]
    rules += ["layers.*: {style: fsdp, gather: float8}"] if gathered else []
    name = f"8B fsdp8 12 layers compiled float8 {recipe}{' gathered' if gathered else ''}"
    written = f"rules=[{','.join(map(repr, rules))}]"
    return _case(name, B8, FSDP8, LONG, "train.batch_size=8", TWELVE, written)


CASES = (
    _case("8B single 12 layers eager", B8, LONG, "train.batch_size=1", TWELVE),
    _case("8B fsdp8 12 layers eager", B8, FSDP8, LONG, "train.batch_size=8", TWELVE),
    _case(
        "8B fsdp8 12 layers compiled without float8", B8, FSDP8, LONG, "train.batch_size=8", TWELVE, COMPILE
    ),
    *map(_float8, TORCHAO_NAMES),
    _float8("tensorwise", gathered=True),
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
