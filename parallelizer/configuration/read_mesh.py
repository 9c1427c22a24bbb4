"""The sizes of a preset's axes, one of which may be -1: what the others leave of the ranks that there are."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import Related
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.plan import AXES, EXPERT, MESH_KEYS, REPLICA_AXES, Mesh

REST = -1
"""The size of an axis that takes what is left."""


def read_mesh(reading: Reading) -> Mesh:
    """The mesh of `parallel.mesh`; what is wrong with it is reported.

    With `world_size` the product of the axes must be that number. An axis of -1 is worked out from it, or from
    the number of ranks that torchrun or Slurm has started this process among.
    """
    sizes: dict[str, int] = {}
    for entry, _ in reading.mapping("parallel.mesh", resolve=False):
        axis, key = entry.text, f"parallel.mesh.{entry.text}"
        if axis not in MESH_KEYS:
            help_text = did_you_mean(axis, MESH_KEYS, "the axes are")
            reading.unknown("unknown-axis", f"there is no axis {axis!r}", key, help_text)
        elif reading.get(key) == REST and axis != EXPERT:
            sizes[axis] = REST
        elif (size := reading.whole_number(key, f"the size of {axis}")) is not None:
            sizes[axis] = size
    spans = {axis: reading.span(f"parallel.mesh.{axis}") for axis in sizes}
    ep = max(sizes.pop(EXPERT, 1), 1)
    world = None
    if reading.get("world_size") is not None:
        world = reading.whole_number("world_size", "world_size")
    rest = [axis for axis in AXES if sizes.get(axis) == REST]
    if rest:
        sizes = _with_rest(reading, sizes, rest, world or started_ranks())
    elif world is not None:
        _check_product(reading, sizes, world)
    mesh = Mesh(
        {axis: max(size, 1) for axis, size in sizes.items()}, spans
    )  # what is below 1 has been reported
    if mesh.replica % ep:
        _report_experts(reading, mesh, ep)
        return mesh
    return dataclasses.replace(mesh, ep=ep)


def _report_experts(reading: Reading, mesh: Mesh, ep: int) -> None:
    """`ep` does not divide the ranks that it is taken out of."""
    among = _shown({axis: mesh.sizes[axis] for axis in REPLICA_AXES})
    ranks = f"{mesh.replica} rank{'' if mesh.replica == 1 else 's'}"
    related = [
        Related(reading.span(f"parallel.mesh.{axis}"), f"{axis}={mesh.sizes[axis]} is set here")
        for axis in REPLICA_AXES
        if mesh.sizes[axis] > 1
    ]
    reading.findings.error(
        "expert-ranks",
        f"ep={ep} is taken out of the ranks of dp_shard, cp and tp, and does not divide their {ranks} ({among})",
        reading.span(f"parallel.mesh.{EXPERT}"),
        f"ep can be {_divisors(mesh.replica)}; it multiplies nothing, so another axis must bring its ranks, as dp_shard={ep}",
        related,
    )


def _with_rest(
    reading: Reading, sizes: Mapping[str, int], rest: list[str], world: int | None
) -> dict[str, int]:
    axis, others = rest[0], {a: n for a, n in sizes.items() if n != REST}
    key, product = f"parallel.mesh.{axis}", math.prod(others.values())
    if len(rest) > 1:
        first = Related(reading.span(key), f"{axis} is -1 too")
        message = f"{' and '.join(rest)} are both -1, so their sizes cannot be computed"
        where = reading.span(f"parallel.mesh.{rest[1]}")
        reading.findings.error(
            "mesh-rest-twice", message, where, "set the sizes of all of them but one", [first]
        )
    elif world is None:
        message = f"{axis}=-1 needs the number of ranks, which is not known"
        reading.error("mesh-rest-unknown", message, key, "add world_size=<number of ranks>, or set its size")
    elif world % product:
        message = f"{world} ranks do not divide by {product} ({_shown(others)}): no size fits {axis}=-1"
        help_text = f"the product of the other axes can be {_divisors(world)}"
        reading.error("world-size", message, key, help_text)
    else:
        return {**others, axis: world // product}
    return others


def _check_product(reading: Reading, sizes: Mapping[str, int], world: int) -> None:
    product = math.prod(sizes.values())
    if product == world:
        return
    related = [
        Related(reading.span(f"parallel.mesh.{axis}"), f"{axis}={size} is set here")
        for axis, size in sizes.items()
        if size > 1
    ]
    message = f"the mesh has {product:,} ranks ({_shown(sizes)}), but world_size is {world:,}"
    help_text = "one axis can be -1, which stands for all remaining ranks: parallel.mesh.dp_shard=-1"
    reading.findings.error("world-size", message, reading.span("world_size"), help_text, related)


def started_ranks() -> int | None:
    """The number of ranks that this process was started as one of; None if it was started alone.

    Only where an environment says so is torch imported, to read it as the launcher does.
    """
    if not {"RANK", "SLURM_PROCID"} & set(os.environ):
        return None
    from parallelizer.runtime.launch.outside import outside_ranks

    outside = outside_ranks()
    return outside.world_size if outside else None


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "every axis is 1"


def _divisors(number: int) -> str:
    found = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return ", ".join(map(str, found[:12])) + (", ..." if len(found) > 12 else "")
