"""The price of every entry of a time line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.plan import Mesh
from parallelizer.simulate.record.operator_sizes import GROUPED
from parallelizer.simulate.record.operators import ATTENTION, GEMM, Issued, Moment, Operator
from parallelizer.simulate.time.constants import COMPILED_DTENSOR, COMPILED_HOST, FITTED, Constants
from parallelizer.simulate.time.machine import HALF, Machine, assumption
from parallelizer.simulate.time.price_attention import attention_seconds
from parallelizer.simulate.time.price_collectives import collective_seconds
from parallelizer.simulate.time.price_gemm import EIGHT_BITS, cast_seconds, gemm_seconds
from parallelizer.simulate.time.price_memory import memory_seconds

MEASURED = 2
"""The ranks among which the host's time around collectives is measured."""


@dataclass(frozen=True)
class Habits:
    """What a configuration does not say of the code that runs it.

    `linear` is the dtype of products inside `linear_modules` (a test of a module's path), if it is another than the trace's.
    `flash_2` says that attention is FlashAttention 2, and `plain` that no DTensors are dispatched. `payload` is what the bytes of
    FSDP's gathers are multiplied by, `tp_payload` those of gathers over tp, and `cp_payload` those of all that attention sends
    over cp. `overlapped_tp` says that collectives over tp run in pieces beside the products around them. `rate` multiplies the
    rates of products and attention: libraries that are older than the table's. `pace` multiplies what operators take on the
    device and on the host. `alone`: the rank runs without its peers, so that collectives take no time and processors are not
    shared.
    """

    linear: str | None = None
    is_linear: Callable[[str], bool] = lambda module: True
    flash_2: bool = False
    plain: bool = False
    payload: float = 1.0
    tp_payload: float = 1.0
    cp_payload: float = 1.0
    overlapped_tp: bool = False
    rate: float = 1.0
    pace: float = 1.0
    alone: bool = False


class Prices:
    """Seconds of operators and collectives on one machine. Equal ones are priced once; `unpriced` are the dtypes without a
    rate, which cost what they move.
    """

    def __init__(
        self, machine: Machine, mesh: Mesh, constants: Constants = FITTED, habits: Habits | None = None
    ) -> None:
        self.machine, self.mesh, self.constants = machine, mesh, constants
        self.habits = habits or Habits()
        self.unpriced: dict[str, str] = {}
        self.guesses: dict[str, str] = {}
        # Ranks that share processors take turns on them.
        self.crowd = 1.0 if self.habits.alone else machine.crowd(mesh.world_size)
        self._gemm = functools.cache(self._gemm_seconds)
        self._attention = functools.cache(
            lambda operator: attention_seconds(operator, machine, constants, flash_2=self.habits.flash_2)
        )
        self._collective = functools.cache(
            lambda entry, payload: collective_seconds(entry, mesh, machine, constants, payload=payload)
        )

    def operator(self, operator: Operator) -> float:
        """The time on the device, without what the host takes to ask for it."""
        return self.habits.pace * self._operator(operator)

    def host(self, operator: Operator) -> float:
        """What the host takes to ask for an operator, or for the operators of a chain. Compiled code asks for a chain at once,
        and calls no modules.
        """
        machine = self.machine
        dtensors = 0 if self.habits.plain else operator.dtensors
        asked, moved = operator.kernels * machine.host_seconds, dtensors * machine.dtensor_seconds
        if operator.compiled:
            return self.habits.pace * (COMPILED_HOST * asked + COMPILED_DTENSOR * moved)
        return self.habits.pace * (asked + operator.modules * machine.module_seconds + moved)

    @property
    def unit(self) -> float:
        """What one of FSDP's collectives takes beside the collective itself, on processors that compute."""
        return self.habits.pace * self.machine.unit_seconds * self.turns(MEASURED)

    def asking(self, issued: Issued) -> float:
        """What the host takes for a style's collective beside the collective itself: those over tp move DTensors, and the others
        are of autograd functions. Messages of a pipeline, and sums of its own, have neither.
        """
        entry, machine = issued.entry, self.machine
        if entry.kind in ("send", "recv") or entry.phase not in ("forward", "backward"):
            return 0.0
        moves = entry.axis in ("tp", "tp_outer") and not self.habits.plain
        seconds = machine.redistribute_seconds if moves else machine.exchange_seconds
        # More ranks than processors wait for each other in any case, as they did when the collective was measured.
        late = machine.skew_seconds if 1 < entry.ranks <= machine.cores else 0.0
        return self.habits.pace * (seconds + late) * self.turns(MEASURED)

    def _operator(self, operator: Operator) -> float:
        found: float | None = None
        if operator.kind == GEMM:
            found = self._gemm(_alike(operator), self._dtype(operator))
        elif operator.kind == ATTENTION:
            found = self._attention(_alike(operator))
            if found is not None and operator.dtype not in HALF and not self.machine.measured:
                self.guesses.setdefault(
                    f"attention in {operator.dtype}",
                    f"{self.machine.name} has no measured attention in {operator.dtype}: its rate is that of bfloat16 "
                    "times the ratio of the peaks",
                )
        if found is not None and operator.dtype in self.machine.guessed:
            self.guesses.setdefault(operator.dtype, self.machine.guessed[operator.dtype])
        if (
            found is not None and operator.name in GROUPED
        ):  # groups of few rows are bound by their weights' bytes
            found = max(found, memory_seconds(operator, self.machine, self.constants))
        if found is not None:
            found /= self.habits.rate
        if found is None:
            if operator.kind != "memory":
                self.unpriced.setdefault(operator.dtype, operator.name)
            return memory_seconds(operator, self.machine, self.constants)
        return found

    def collective(self, issued: Issued) -> float:
        """The time on the links."""
        if self.habits.alone:
            return 0.0
        seconds = self._collective(_of_no_module(issued), self._payload(issued))
        return seconds * self.turns(issued.entry.ranks)

    def turns(self, measured: int) -> float:
        """What something takes in this world by what it took among so many ranks, which had the processors to themselves."""
        return self.crowd / self.machine.crowd(measured)

    def _payload(self, issued: Issued) -> float:
        """What the bytes of a collective are multiplied by."""
        entry, habits = issued.entry, self.habits
        if entry.axis == "cp" and not issued.unit:
            return habits.cp_payload if entry.phase in ("forward", "backward") else 1.0
        if entry.kind != "all_gather":
            return 1.0
        return habits.payload if issued.unit else habits.tp_payload if entry.axis == "tp" else 1.0

    def _dtype(self, operator: Operator) -> str:
        linear = self.habits.linear
        return linear if linear and self.habits.is_linear(operator.module) else operator.dtype

    def _gemm_seconds(self, operator: Operator, dtype: str) -> float | None:
        seconds = gemm_seconds(operator, self.machine, self.constants, dtype)
        if seconds is not None and dtype in EIGHT_BITS and operator.dtype not in EIGHT_BITS:
            seconds += cast_seconds(operator, self.machine, self.constants, dtype)
        return seconds

    def assumed(self) -> tuple[Diagnostic, ...]:
        """Notes for what was assumed: of the machine, and dtypes without a rate."""
        return (
            self.machine.assumed
            + tuple(map(assumption, self.guesses.values()))
            + tuple(
                Diagnostic(
                    "time-assumed",
                    f"{self.machine.name} has no rate for {name} in {dtype}: its time is that of the bytes it moves",
                    None,
                    "choose a hardware configuration whose table has the dtype",
                    severity="note",
                )
                for dtype, name in self.unpriced.items()
            )
        )


def _alike(operator: Operator) -> Operator:
    """What the price of an operator depends on."""
    return Operator(
        "",
        "",
        operator.kind,
        operator.name,
        operator.dtype,
        0,
        operator.sizes,
        operator.causal,
        operator.backward,
    )


def _of_no_module(issued: Issued) -> object:
    entry = issued.entry
    return _Entry(entry.kind, entry.axis, entry.ranks, entry.payload_bytes, entry.wire_bytes)


@dataclass(frozen=True)
class _Entry:
    kind: str
    axis: str
    ranks: int
    payload_bytes: int
    wire_bytes: int


def total_flops(line: Sequence[Moment]) -> tuple[int, int, int]:
    """The model's floating-point operations in products and attention on this rank; those of them that are computed again; and
    those that a causal mask hides. A ring's blocks behind the diagonal belong to a causal attention too. Of the five products of
    attention's backward one computes the scores again, which is no operation of the model's.
    """
    operators = [m for m in line if isinstance(m, Operator)]
    attention = [o for o in operators if o.kind == ATTENTION]
    causal = any(o.causal for o in attention)
    hidden = sum(map(_own_flops, (o for o in attention if not o.again))) if causal else 0
    again = sum(map(_own_flops, (o for o in operators if o.again)))
    return sum(map(_own_flops, operators)), again, hidden


def _own_flops(operator: Operator) -> int:
    scores_again = operator.kind == ATTENTION and operator.backward
    return operator.flops * 4 // 5 if scores_again else operator.flops
