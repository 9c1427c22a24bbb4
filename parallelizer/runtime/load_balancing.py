"""The balancing loss of a mixture of experts, over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallelizer.runtime.sum_over_batch import sum_over_batch

Tensor = torch.Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, counted: Tensor | None = None) -> Tensor:
    """The loss of Switch Transformer as transformers computes it (`load_balancing_loss_func`), over the whole batch: a scalar
    of float32, or float64 for float64 logits, the same on every rank.

    `router_logits` are those of each layer, [tokens of this rank, experts]; each token goes to the `top_k` largest. `counted`
    [tokens] is 0 for padding. The share of the tokens of all layers that go to an expert, times its mean probability, is
    summed over the experts, and multiplied by their number: `top_k` if all experts have the same load.

    Sums over tokens go through `sum_over_batch`, so this is right on the data axes and under cp, and each part of a batch
    that is accumulated has a loss of its own. Add it to a mean loss, or, to the sum of the losses of tokens, once for each
    of them. Over tp the logits must be whole. Raises ValueError for no layer. Collective.
    """
    if not router_logits:
        raise ValueError("a balancing loss needs the router's logits of a layer at least")
    first = router_logits[0]
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    experts = first.shape[-1]
    sums = torch.zeros(2 * experts + 1, dtype=wide, device=first.device)
    for logits in router_logits:
        probabilities = logits.reshape(-1, experts).to(device=first.device, dtype=wide).softmax(-1)
        # One-hot rows in place of a histogram: sums over tokens, without a host read, of which ranks know their own part.
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k, -1).indices, 1.0)
        both = torch.cat([chosen, probabilities, torch.ones_like(probabilities[:, :1])], -1)
        if counted is not None:
            both = both * counted.reshape(-1, 1).to(device=both.device, dtype=wide)
        sums = sums + both.sum(0)
    load, wanted, tokens = sum_over_batch(sums).split([experts, experts, 1])
    return experts * (load * wanted).sum() / tokens[0].square().clamp(min=1)
