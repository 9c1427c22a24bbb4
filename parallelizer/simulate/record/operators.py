"""The entries of a time line: what a rank's host asks its device to do in a step, operators and collectives in their order."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelizer.simulate.record.ledger import Collective

GEMM, ATTENTION, MEMORY = "gemm", "attention", "memory"
"""The kinds of operators: a product of matrices, attention in one kernel, and what is bound by the memory's bandwidth."""


@dataclass(frozen=True)
class Operator:
    """One operator, or a chain of neighbouring ones of kind MEMORY.

    `sizes` are (batch, m, n, k) of a GEMM, [batch, m, k] times [batch, k, n], and (batch, query heads, key heads, queries, keys,
    head size) of attention, None of others. `causal` says whether attention looks at earlier positions alone, `backward` whether
    it is attention's backward. `moved` are the bytes read and written, each operator of a chain by itself unless the plan
    compiles it. `kernels` is the number of operators, and `modules` the number of the model's modules that began since the
    entry before. `again` marks what a checkpoint computes a second time. `turn` numbers the phases of the process, see
    `Collective`. `copies` is "in" or "out" for FSDP's copies before a reduction and behind a gather. `dtensors` is
    the number of operators on DTensors since the entry before, each of which its local operators follow. `casts` is how many of
    the operators round a tensor to float8.
    """

    phase: str
    module: str
    kind: str
    name: str
    dtype: str
    moved: int
    sizes: tuple[int, ...] | None = None
    causal: bool = False
    backward: bool = False
    kernels: int = 1
    modules: int = 0
    again: bool = False
    compiled: bool = False
    copies: str = ""
    dtensors: int = 0
    casts: int = 0
    turn: int = field(default=0, compare=False, repr=False)

    @property
    def flops(self) -> int:
        """2mnk for each product of matrices; attention is two such products forward and five backward, half of them if causal."""
        if self.kind == GEMM and self.sizes:
            batch, m, n, k = self.sizes
            return 2 * batch * m * n * k
        if self.kind == ATTENTION and self.sizes:
            batch, heads, _, queries, keys, size = self.sizes
            whole = 2 * (5 if self.backward else 2) * batch * heads * queries * keys * size
            return whole // 2 if self.causal else whole
        return 0


@dataclass(frozen=True)
class Issued:
    """A collective, where it is issued. `unit` says whether FSDP issues it, on streams of its own, and `waits` whether the
    computation behind it waits for it at once; otherwise a Wait follows where its result is read.
    """

    entry: Collective
    unit: bool
    waits: bool = False

    @property
    def phase(self) -> str:
        return self.entry.phase

    @property
    def module(self) -> str:
        return self.entry.module

    @property
    def turn(self) -> int:
        return self.entry.turn


@dataclass(frozen=True)
class Wait:
    """The computation waits for the collective that was issued `back` collectives ago, 1 for the last."""

    phase: str
    module: str
    back: int
    turn: int = field(default=0, compare=False, repr=False)


Moment = Operator | Issued | Wait
"""One entry of a time line: what a rank's host asks its device to do, in order."""
