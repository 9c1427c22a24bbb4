"""What exported code needs of this package when it splits the sequence, without a plan file: the buffers,
written in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.language.plan import Buffer, Plan
from parallelizer.styles.context_parallel.order import static_order
from parallelizer.styles.context_parallel.sequence import CurrentOrder


def buffers(
    batch: Mapping[str, int | str | Mapping[str, Any]], model: Mapping[str, int], balance: str = "auto"
) -> Plan:
    """A plan of buffers alone: the dimension of each batch entry and of each model buffer (globs) that is the
    sequence, or that and what it is padded with; a text instead says what is made as that entry, `positions`. `balance` says
    which rows each rank gets."""
    here = Span("<exported>")

    def entries(written: Mapping[str, Any]) -> dict[str, Buffer]:
        said = {
            name: {"make": v} if isinstance(v, str) else {"dim": v} if isinstance(v, int) else v
            for name, v in written.items()
        }
        return {name: Buffer(name, here, **of_entry) for name, of_entry in said.items()}

    return Plan(
        "exported", "<exported>", batch=entries(batch), buffers=entries(dict(model)), balanced=balance
    )


def current_order(plan: Plan, mesh: DeviceMesh) -> CurrentOrder:
    """What all modules of one model share that depend on how its batch was dealt out over cp."""
    return CurrentOrder(static_order(plan.balance, mesh["cp"].size()))
