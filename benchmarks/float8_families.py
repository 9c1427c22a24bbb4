"""Over all shipped models: which linears and experts a step computes in float8, against those that the plan names.

    python -m benchmarks.float8_families [--only MODEL]

The linears and the stacked experts of a model's layers are named in two halves, one after the other, so that each is named once
and left out once. The step of the small model is traced on two ranks of tp (of fsdp where tp is refused, since the model sees
the shard of a weight alone), and each cast to float8 is counted for the module whose forward makes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from benchmarks.proofs.families import DESIGNED_WITH, families
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.proof.tiny import shrink
from parallelizer.simulate.record.operators import Operator
from parallelizer.simulate.record.trace import trace
from parallelizer.styles.float8.recipes import stacked_weights

MODELS = (*DESIGNED_WITH, *families())


@dataclass(frozen=True)
class Count:
    """The linears and experts of one model that a plan names, and those that a step casts."""

    preset: str
    named: frozenset[str]
    cast: frozenset[str]

    @property
    def unnamed(self) -> frozenset[str]:
        """In float8 though no rule names them."""
        return self.cast - self.named

    @property
    def skipped(self) -> frozenset[str]:
        """Not in float8 though a rule names them."""
        return self.named - self.cast


def linears(model: nn.Module) -> list[str]:
    """The linears of the repeated layers that a forward calls, of nn.Linear or a class that has its forward."""
    only_read = nn.modules.linear.NonDynamicallyQuantizableLinear  # an attention of torch reads its weight
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, only_read)
        and any(part.isdigit() for part in path.split("."))
    ]


def experts(model: nn.Module) -> list[str]:
    """The modules of the repeated layers that hold the weights of many experts."""
    return [
        path
        for path, module in model.named_modules()
        if stacked_weights(module) and any(part.isdigit() for part in path.split("."))
    ]


def counts(name: str) -> list[Count]:
    """Both halves of a model's linears and experts; nothing for a model without any in its layers."""
    model = _small(name, "tp2").build_model()
    found = [*linears(model), *experts(model)]
    return [_count(name, frozenset(half)) for half in (found[::2], found[1::2]) if half]


def _count(name: str, named: frozenset[str]) -> Count:
    stacked = experts(_small(name, "tp2").build_model())
    recipes = {path: "rowwise" if path in stacked else "tensorwise" for path in sorted(named)}
    rules = ",".join(
        repr(f"{path}: {{style: float8, recipe: {recipe}, emulate: true}}")
        for path, recipe in recipes.items()
    )
    preset, setup = "tp2", _small(name, "tp2", f"rules=[{rules}]")
    try:
        setup.compile(setup.build_model())
    except PlanError as error:
        if {one.code for one in error.diagnostics} != {"precision-local-scale"}:
            raise
        preset, setup = "fsdp2", _small(name, "fsdp2", f"rules=[{rules}]")
    model = setup.build_model()
    line = trace(setup.compile(model), model, setup.recipe()).line
    cast = frozenset(o.module for o in line if isinstance(o, Operator) and o.casts)
    return Count(preset, named, cast)


def _small(name: str, preset: str, *overrides: str) -> Setup:
    asked = [f"model={name}", f"parallel={preset}", *overrides]
    return shrink(from_config(*compose_config(asked)))[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Count for every model, or for one. 0 when nothing is in float8 or skipped against the plan."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.float8_families", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", metavar="MODEL", choices=MODELS, help="one model")
    options = parser.parse_args(argv)
    models = [options.only] if options.only else list(MODELS)
    named = unnamed = skipped = 0
    print(f"{'model':<24}{'mesh':>8}{'named':>8}{'not named, cast':>18}{'named, not cast':>18}")
    for name in models:
        halves = counts(name)
        figures = [sum(len(getattr(c, what)) for c in halves) for what in ("named", "unnamed", "skipped")]
        mesh = ", ".join(sorted({c.preset for c in halves})) or "-"
        print(f"{name:<24}{mesh:>8}{figures[0]:>8}{figures[1]:>18}{figures[2]:>18}", flush=True)
        named, unnamed, skipped = named + figures[0], unnamed + figures[1], skipped + figures[2]
    counted = f"{len(models)} models, {named} linears and modules of experts"
    print(f"\n{counted}: {unnamed} in float8 that no rule names, {skipped} skipped")
    return 1 if unnamed or skipped else 0


if __name__ == "__main__":
    raise SystemExit(main())
