"""Draws the next token from logits: on rank 0, which broadcasts it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from parallelizer.training.sampling.settings import Sampling


class Sampler:
    """Samples tokens below `vocab_size` with a random generator of its own: the same tokens for the same
    seed on every mesh. `SamplingJob.sampler` makes it.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, device: torch.device) -> None:
        self.sampling, self.vocab_size, self.device = sampling, vocab_size, device
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def draw(self, logits: Tensor) -> int:
        """A token for logits [V]: rank 0 samples it, and every rank returns it. Collective."""
        drawn = torch.zeros((), dtype=torch.int64, device=self.device)
        if dist.get_rank() == 0:
            drawn.fill_(draw(logits[: self.vocab_size].cpu(), self.sampling, self.generator))
        dist.broadcast(drawn, 0)
        return int(drawn)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token for logits [V] on the CPU: the likeliest where the temperature is 0."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -math.inf
    shares = scaled.softmax(0)
    if sampling.top_p is not None:
        ordered, places = shares.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        shares[places[before >= sampling.top_p]] = 0  # the likeliest has nothing before it, and stays
    return int(torch.multinomial(shares, 1, generator=generator))
