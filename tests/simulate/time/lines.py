"""Time lines written by hand."""

from __future__ import annotations

from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.ledger import Collective
from parallelizer.simulate.record.operators import Issued, Moment, Operator
from parallelizer.simulate.time.kernel_table import parse_table
from parallelizer.simulate.time.machine import Machine

MESH = Mesh({"dp_shard": 4})
TABLE = parse_table(
    {
        "gemm": {
            "bfloat16": {
                "m": [128, 1024],
                "n": [128, 1024],
                "k": [128, 1024],
                "tflops": [[[10, 20], [20, 40]], [[20, 40], [40, 80]]],
            }
        },
        "attention": {"length": [128, 1024], "tflops": {"64": [10.0, 40.0]}},
    }
)


def machine(**changes: object) -> Machine:
    """A device without overheads: 1 TB/s of memory, 100 GB/s inside a node of 8, 10 GB/s between nodes."""
    given: dict[str, object] = {
        "name": "toy", "table": TABLE, "peaks": {"bfloat16": 100.0}, "memory": 1e12, "node": 100e9, "network": 10e9,
        "per_node": 8, "kernel_seconds": 0.0, "host_seconds": 0.0,
    }  # fmt: skip
    return Machine(**{**given, **changes})  # type: ignore[arg-type]


def memory(
    moved: int, phase: str = "forward", module: str = "", copies: str = "", kernels: int = 1
) -> Operator:
    return Operator(phase, module, "memory", "add", "bfloat16", moved, copies=copies, kernels=kernels)


def collective(
    kind: str, payload: int, axis: str = "dp_shard", phase: str = "forward", ranks: int = 4
) -> Collective:
    wire = payload * (ranks - 1) // ranks * (2 if kind == "all_reduce" else 1)
    return Collective(phase, kind, axis, ranks, payload, wire, "bfloat16", "", None, False)


def gathered(layers: int, payload: int, moved: int) -> list[Moment]:
    """The forward of layers that FSDP gathers one by one: a gather, the copy out of its buffer, and what the layer computes."""
    line: list[Moment] = []
    for layer in range(layers):
        module = f"layers.{layer}"
        line += [
            Issued(collective("all_gather", payload), True),
            memory(0, module=module, copies="out"),
            memory(moved, module=module),
        ]
    return line
