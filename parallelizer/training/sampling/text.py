"""The logits of a text's next token, on one rank of a world.

Unmodified models keep no keys and values of earlier tokens, so each token needs a forward over the whole
text. The text is padded at its end to a length that the mesh divides, so that few lengths occur. A causal
model does not see the padding; this is checked once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.plan import Plan
from parallelizer.runtime.state import restore_buffers
from parallelizer.runtime.step import forward
from parallelizer.styles.context_parallel.buffers import shard_tokens
from parallelizer.training.data.tokenizer import Tokenizer

LEAST = 64
"""Lengths are multiples of it, or of the next number that the mesh divides."""


class TextLogits:
    """Computes logits with a parallel model; `SamplingJob.text` makes it. `fill` are the entries of the
    model besides the tokens.
    """

    def __init__(
        self,
        setup: Setup,
        plan: Plan,
        model: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        tokenizer: Tokenizer,
        longest: int,
        fill: Mapping[str, str],
    ) -> None:
        self.setup, self.plan, self.model, self.mesh, self.device = setup, plan, model, mesh, device
        self.tokenizer, self.longest, self.fill = tokenizer, longest, fill
        self.tokens = setup.workload.name_of("input_ids")

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], filler: int | None = None, length: int | None = None) -> Tensor:
        """The logits after the last token: [V], float32, the same on every rank. Collective.

        The text is padded with `filler`, by default the separator, to a length that fits `length` tokens.
        """
        count = len(tokens)
        behind = [self.tokenizer.separator if filler is None else filler] * (
            self._room(length or count) - count
        )
        ids = torch.tensor([[*tokens, *behind]])
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        fill = {n: places if what == "positions" else torch.zeros_like(ids) for n, what in self.fill.items()}
        batch = shard_tokens({self.tokens: ids, **fill}, self.plan, self.mesh, device=self.device)
        local = shard_tokens({self.tokens: places, **fill}, self.plan, self.mesh)[self.tokens][0]
        output = forward(self.model, batch)
        restore_buffers(self.model)
        here = (local == count - 1).nonzero().flatten().tolist()
        if isinstance(output, DTensor) and any(p.is_shard(1) for p in output.placements):
            output = output.full_tensor()
        found = output[0, here[0] if here else 0]
        found = (found.full_tensor() if isinstance(found, DTensor) else found).float()
        if self.setup.mesh.sizes["cp"] > 1:  # one of its ranks has this token
            found = found if here else torch.zeros_like(found)
            dist.all_reduce(found, group=self.mesh.get_group("cp"))
        return found

    def check_causal(self, prompt: Sequence[int]) -> None:
        """Raises PlanError on all ranks where the logits of a token depend on what stands behind it. Collective."""
        tokens = list(prompt)[: self.longest - 1]
        if not tokens:
            return
        one, other = (self.logits(tokens, filler, len(tokens) + 1) for filler in (0, 1))
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-3):
            message = "the logits of a token change with what stands behind it: this model does not write from left to right"
            span = self.setup.origins.span("model._target_")
            raise PlanError(
                [Diagnostic("data-mismatch", message, span, "generate with a causal language model")]
            )

    def _room(self, tokens: int) -> int:
        """The length that so many tokens are filled up to."""
        step = multiple(self.setup.mesh.sizes["cp"], self.setup.mesh.sizes["tp"])
        step *= math.ceil(LEAST / step)
        return min(-(-tokens // step) * step, self.longest)


def multiple(cp: int, tp: int) -> int:
    """What a length must divide by on a mesh."""
    return tp if cp == 1 else math.lcm(2 * cp, cp * tp)
