"""The highest memory of a step on a device, by the allocator's own count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from parallelizer.compiler.observe import phase
from parallelizer.runtime.step import Batch
from parallelizer.simulate.record.peak_of_step import PeakOfStep
from parallelizer.simulate.rehearse.quiet import quiet


@dataclass(frozen=True)
class Peak:
    """Bytes at the highest point of a step. `requested` is what tensors asked for, which the dry run predicts; `allocated` that
    in the allocator's blocks; `reserved` what the process took of the device, with what lies between blocks. On a CPU only
    `requested` is known. `phases` has the peak of allocated bytes in each phase of the step, on CUDA.
    """

    requested: int
    allocated: int | None = None
    reserved: int | None = None
    phases: Mapping[str, int] = field(default_factory=dict)


def peak_of(
    step: Callable[[], object],
    device: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Batch],
) -> Peak:
    """The peak of one call of `step`."""
    if device == "cuda":
        return _on_cuda(step)
    # The step frees them first of all, and the CPU's allocator does not tell of memory that was there before.
    optimizer.zero_grad(set_to_none=True)
    found = PeakOfStep(torch.device(device), _there(model, optimizer, parts))
    with quiet(), found:
        step()
    return Peak(found.bytes or 0)


def _there(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[Batch]
) -> Iterator[torch.Tensor]:
    """The tensors of a training between two steps, without gradients."""
    yield from model.parameters()
    yield from model.buffers()
    for state in optimizer.state.values():
        yield from (t for t in state.values() if isinstance(t, torch.Tensor))
    for part in parts:
        yield from part.values()


def _on_cuda(step: Callable[[], object]) -> Peak:
    phases: dict[str, int] = {}

    def ended(name: str) -> None:
        phases[name] = max(phases.get(name, 0), torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.synchronize()
    # Blocks that building the model left behind are no part of a step.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    with phase.told(ended):
        step()
    return Peak(
        stats["requested_bytes.all.peak"],
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
        phases,
    )
