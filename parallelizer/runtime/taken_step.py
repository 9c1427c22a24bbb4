"""What a training step says of itself, read from the device when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from parallelizer.runtime.random_state import RandomState


@dataclass(frozen=True)
class Skipped:
    """What is needed to see why a step was not taken: this rank's own sum of losses and what it weighs, one tensor of
    two numbers, and the default random states with which the step began.

    `follows` says that the step is finite, and was left out because the one before it was: see `train_step(after=)`.
    """

    local: torch.Tensor
    random: RandomState
    follows: bool = False


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step once they are known; the fields are those of `Step`."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    skipped: Skipped | None = None
    words: tuple[int, ...] | None = None


class Step:
    """What a step computed, the same on every rank: `loss` and `grad_norm`, scalar tensors; read them when you log.

    `skipped` is None unless the optimizer was not stepped, and `words` are the greatest of all ranks' numbers: see
    `train_step`. Of `train_step(skip_nonfinite=True)` all four come from the device together: whoever asks first for any of
    them waits until the step has computed them. `loss` and `grad_norm` then lie on the CPU. `left_out` says without a wait, on
    the device, whether the step was applied: a float32 scalar, 1 where it was not. It is None without `skip_nonfinite`.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        skipped: Skipped | None = None,
        words: tuple[int, ...] | None = None,
    ) -> None:
        numbers = StepNumbers(loss, grad_norm, skipped, words)
        self._read: Callable[[], StepNumbers] | None = lambda: numbers
        self.left_out: torch.Tensor | None = None

    @classmethod
    def unread(cls, read: Callable[[], StepNumbers], left_out: torch.Tensor) -> Step:
        """A step whose numbers `read` reads, once; `left_out`, a float32 scalar on the device, is 1 where it was not applied."""
        made = cls.__new__(cls)
        made._read, made.left_out = read, left_out
        return made

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss over the valid tokens of the whole global batch."""
        return self._numbers.loss

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients, before they were clipped."""
        return self._numbers.grad_norm

    @property
    def skipped(self) -> Skipped | None:
        """Why the optimizer was not stepped; None where it was."""
        return self._numbers.skipped

    @property
    def words(self) -> tuple[int, ...] | None:
        """The greatest of all ranks' words; None where none travelled."""
        return self._numbers.words

    @cached_property
    def _numbers(self) -> StepNumbers:
        assert self._read is not None  # noqa: S101 - for the type: cached
        numbers = self._read()
        self._read = None  # what it holds is not needed any more; where it raised it can be called again
        return numbers

    def __repr__(self) -> str:
        return f"Step({self._numbers})"
