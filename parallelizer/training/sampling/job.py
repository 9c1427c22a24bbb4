"""The argument of a sampling recipe's function on a rank: a checked command, and the parts that it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelizer.configuration.setup import Setup
from parallelizer.styles.application import Program
from parallelizer.training.batches import local_device
from parallelizer.training.data.tokenizer import Tokenizer
from parallelizer.training.sampling.draw import Sampler
from parallelizer.training.sampling.settings import Sampling
from parallelizer.training.sampling.stream import TextStream
from parallelizer.training.sampling.text import TextLogits
from parallelizer.training.settings import Settings


@dataclass(frozen=True)
class SamplingJob:
    """One sampling command, composed and checked before its ranks started.

    `setup` builds the model, `program` is the plan, compiled for a text; `sampling` are the keys of
    `configs/generate.yaml`. Values come from `checkpoint`, or from `weights`, a transformers folder.
    `prompt` has at least one token; the model gets at most `longest` tokens. `fill` are the other entries
    of the model besides `input_ids`: `zeros`, or `positions` counted from 0.
    """

    setup: Setup
    program: Program
    settings: Settings
    sampling: Sampling
    tokenizer: Tokenizer
    prompt: Sequence[int]
    longest: int
    fill: Mapping[str, str]
    checkpoint: Path | None = None
    weights: Path | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return local_device(self.setup.device)

    @property
    def max_new_tokens(self) -> int:
        """The most tokens to sample for a text: the requested number, or fewer if the model has fewer
        positions.
        """
        return min(self.sampling.max_new_tokens, self.longest - len(self.prompt) + 1)

    def text(self, model: nn.Module, mesh: DeviceMesh) -> TextLogits:
        """Makes the object that computes the logits of the next token. Collective. Raises PlanError on all
        ranks if the model is not causal.
        """
        text = TextLogits(
            self.setup, self.program.plan, model, mesh, self.device, self.tokenizer, self.longest, self.fill
        )
        text.check_causal(self.prompt)
        return text

    def sampler(self) -> Sampler:
        """Makes the sampler of tokens, with the same seed on every rank."""
        return Sampler(self.sampling, self.tokenizer.vocab_size, self.device)

    def stream(self) -> TextStream:
        """Makes the writer of one text to stdout; on ranks other than 0 it writes nothing."""
        return TextStream(self.tokenizer, quiet=dist.get_rank() != 0)
