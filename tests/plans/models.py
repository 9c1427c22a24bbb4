"""Small models for the plans beside this file, each with something that a plan can get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class Attend(nn.Module):
    """Causal attention over [B, heads, S, E]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention out of one fused projection, and a gated MLP out of another."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm = HEADS, nn.LayerNorm(WIDTH)
        self.qkv, self.out, self.attend = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Attend()
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        x = x + scale * self.out(self.attend(*heads).transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = x + self.down(F.silu(gate) * up)
        return y


class Gpt(nn.Module):
    """A GPT whose output layer is its embedding again; positions are a table that is looked up."""

    def __init__(self, layers: int = 2, places: int = 512) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, WIDTH), nn.Embedding(places, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embed.weight

    def stream(self, input_ids: Tensor, places: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places(places)
        for block in self.h:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.stream(input_ids, torch.arange(input_ids.shape[1], device=input_ids.device))


class GivenPlaces(Gpt):
    """The same with positions that come with the batch."""

    def forward(self, input_ids: Tensor, places: Tensor) -> Tensor:
        return self.stream(input_ids, places)


class Masked(nn.Module):
    """Attention under a mask made from the length that forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(256, WIDTH), MaskedAttend()

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        y: Tensor = self.attend(self.embed(input_ids)[:, None], mask)
        return y


class MaskedAttend(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class Experts(nn.Module):
    """Every expert sees every token; `up` is [experts, width, hidden], `down` the other way round."""

    def __init__(self, experts: int = 4, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, WIDTH, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, WIDTH))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up)
        nn.init.normal_(self.down)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ebsh,ehd->bsd", torch.einsum("bsd,edh->ebsh", x, self.up).relu(), self.down)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts, self.head = nn.Embedding(256, WIDTH), Experts(), nn.Linear(WIDTH, 256)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.experts(self.embed(input_ids)))
        return y


class Through(nn.Module):
    """Tokens through one module: `inner` is made with `arguments`."""

    def __init__(self, inner: str, *arguments: Any) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(256, WIDTH), getattr(nn, inner)(*arguments)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.inner(self.embed(input_ids))
        return y


class Forgetful(Through):
    """A parameter of its own, and nothing to fill it with."""

    def __init__(self) -> None:
        super().__init__("Identity")
        self.scale = nn.Parameter(torch.ones(WIDTH))
