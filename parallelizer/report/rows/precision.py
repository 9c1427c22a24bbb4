"""What of a step is in float8: linears, products, casts, and the bytes that travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import full_name
from parallelizer.simulate.record.operators import GEMM
from parallelizer.simulate.record.trace import Trace
from parallelizer.simulate.time.price_gemm import EIGHT_BITS
from parallelizer.styles.application import Application, Program, tensor_placements
from parallelizer.styles.float8.recipes import casts_inputs, recipe_of, weights_in_float8


@dataclass(frozen=True)
class Precision:
    """`linears` are the modules in float8, folded, by recipe; `number` counts them, `experts` those that hold stacked experts;
    `full` are the linears that are not.

    The rest is of a step of one rank. `gathered` are the bytes that fsdp gathers in float8, `gathers` all that it gathers;
    `inputs_gathered` and `inputs_gathers` are those of tensors that are gathered over tp.
    `reductions` are the all-reduces of largest values, which send `reduced_bytes`. `kept` are the bytes of activations when
    there are most, and `kept_without` those of the plan without float8, if its step was traced. `products` are those by kernels
    for float8. They and `casts` are None without a traced step.
    """

    linears: Mapping[str, tuple[str, ...]]
    full: tuple[str, ...]
    number: int
    gathered: int = 0
    gathers: int = 0
    inputs_gathered: int = 0
    inputs_gathers: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    kept: int = 0
    kept_without: int | None = None
    products: int | None = None
    casts: int | None = None
    experts: int = 0

    def as_json(self) -> dict[str, Any]:
        """The documented form."""
        return {
            **vars(self),
            "linears": {k: list(v) for k, v in self.linears.items()},
            "full": list(self.full),
        }


def precision(
    program: Program, model: nn.Module, trace: Trace | None, plain: Trace | None = None
) -> Precision | None:
    """What a plan puts in float8, and what it costs and saves in a step; None for a plan without. `plain` is the traced step of
    the plan without float8.
    """
    applications = program.of_slot("precision")
    if not applications:
        return None
    by_recipe: dict[str, list[str]] = {}
    for a in applications:
        by_recipe.setdefault(recipe_of(a), []).append(a.module)
    named = {a.module for a in applications}
    full = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in named]
    found = Precision(
        {recipe: tuple(fold_paths(paths)) for recipe, paths in by_recipe.items()},
        tuple(fold_paths(full)),
        len(applications),
        experts=sum(bool(a.stacked) for a in applications),
    )
    if trace is None:
        return found
    of_step = _of_step(found, program, model, trace, named)
    return of_step if plain is None else dataclasses.replace(of_step, kept_without=_kept(plain))


def _of_step(
    found: Precision, program: Program, model: nn.Module, trace: Trace, named: Iterable[str]
) -> Precision:
    units = {unit.module: unit for unit in program.of_slot("fsdp")}
    gathers = [
        e
        for e in trace.ledger
        if e.kind == "all_gather" and e.module in units and {*e.axis.split("+")} <= {*units[e.module].axes}
    ]
    bytes_of = {path: _gathered_bytes(unit, program, model) for path, unit in units.items()}
    casting = {a.module for a in program if casts_inputs(a)}
    inputs = [e for e in trace.ledger if e.kind == "all_gather" and e.axis == "tp"]
    largest = [e for e in trace.ledger if e.largest and (e.module in {*named, *units, *casting})]
    operators = list(trace.operators())
    return Precision(
        found.linears,
        found.full,
        found.number,
        sum(bytes_of[e.module] for e in gathers),
        sum(e.payload_bytes for e in gathers),
        sum(e.payload_bytes for e in inputs if e.module in casting and e.dtype == "uint8"),
        sum(e.payload_bytes for e in inputs),
        len(largest),
        sum(e.wire_bytes for e in largest),
        _kept(trace),
        products=sum(times for o, times in operators if o.kind == GEMM and o.dtype in EIGHT_BITS),
        casts=sum(o.casts * times for o, times in operators),
        experts=found.experts,
    )


def _kept(trace: Trace) -> int:
    """The bytes of activations when there are most."""
    return max((point.by_category.get("activations", 0) for point in trace.memory.course), default=0)


def _gathered_bytes(unit: Application, program: Program, model: nn.Module) -> int:
    """The bytes of the weights that a unit gathers in float8, with the rows that fill the last rank's shard."""
    tensor = tensor_placements(program.applications)
    total = 0
    for name in weights_in_float8(unit, program):
        path = full_name(unit.module, name)
        shape = list(model.get_parameter(path).shape)
        for axis, placement in tensor.get(path, {}).items():
            if placement.dim is not None:
                shape[placement.dim] //= program.mesh.sizes[axis]
        (placed,) = unit.params[name].values()
        ranks = program.mesh.size(*(a for a in unit.axes if a != "dp_replicate"))
        if placed.dim == 0:
            shape[0] = -(-shape[0] // ranks) * ranks
        total += shape[0] * shape[1]
    return total
