"""Mixtures in several shapes: names of arguments, dimensions of parameters, dimensions of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.styles.experts.expert_list import ExpertList
from tests.styles.models import WIDTH, Mlp

EXPERTS = 4
HIDDEN = 6


class Stacked(nn.Module):
    """As the experts of transformers: parameters [experts, ...], and a loop over the experts that have tokens."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.bias = nn.Parameter(torch.empty(experts, HIDDEN))
        self.down = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        hits = F.one_hot(top_k_index, self.num_experts)
        for expert in range(self.num_experts):
            token, place = torch.where(hits[..., expert] > 0)
            hidden = torch.tanh(F.linear(hidden_states[token], self.up[expert], self.bias[expert]))
            rows = F.linear(hidden, self.down[expert]) * top_k_weights[token, place, None]
            made.index_add_(0, token, rows)
        return made


class Normed(Stacked):
    """A norm of every expert's output, whose weight all experts share."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.norm = nn.LayerNorm(WIDTH)

    def reset_parameters(self) -> None:
        for param in self.parameters(recurse=False):
            nn.init.normal_(param, std=0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        hits = F.one_hot(top_k_index, self.num_experts)
        for expert in range(self.num_experts):
            token, place = torch.where(hits[..., expert] > 0)
            hidden = torch.tanh(F.linear(hidden_states[token], self.up[expert], self.bias[expert]))
            rows = self.norm(F.linear(hidden, self.down[expert])) * top_k_weights[token, place, None]
            made.index_add_(0, token, rows)
        return made


class Batched(nn.Module):
    """Other names, experts along the second dimension, tokens in rows, weights on the input."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(WIDTH, experts, HIDDEN))
        self.w2 = nn.Parameter(torch.empty(HIDDEN, experts, WIDTH))

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.5)

    def forward(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        weighted = x.unsqueeze(-2) * shares.unsqueeze(-1)  # [rows, tokens, k, width]
        hidden = torch.tanh(torch.einsum("bskd,dbskf->bskf", weighted, self.w1[:, chosen]))
        return torch.einsum("bskf,fbskd->bsd", hidden, self.w2[:, chosen])


class Mixture(nn.Module):
    """A router and experts. `favourite` experts get all tokens, if there are any."""

    def __init__(self, experts: nn.Module | None = None, favourites: int = 0, rows: bool = False) -> None:
        super().__init__()
        self.experts = experts if experts is not None else Stacked()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.favourites, self.rows = favourites, rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x if self.rows else x.flatten(0, 1)
        scores = self.gate(flat)
        if self.favourites:
            scores = scores + 100.0 * (torch.arange(EXPERTS, device=x.device) < self.favourites)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        experts = self.experts
        made: Tensor = (
            experts(x, weights, chosen) if self.rows else experts(flat, chosen, top_k_weights=weights)
        )
        return made.view_as(x)


class Looped(nn.Module):
    """Experts that are modules, in a list: the router's block loops over those that have tokens."""

    def __init__(self, experts: Callable[[Iterable[nn.Module]], Any] = nn.ModuleList) -> None:
        super().__init__()
        self.experts = experts(Mlp() for _ in range(EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                made = made.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return made.view_as(x)


class Called(Looped):
    """The same with one call."""

    def __init__(self) -> None:
        super().__init__(ExpertList)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        made: Tensor = self.experts(x, chosen, weights)
        return made


class Loop(nn.Module):
    """Experts that are modules, in a list, and the usual loop over those that have tokens, as its author wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = torch.zeros_like(hidden_states)
        hits = F.one_hot(top_k_index, len(self.experts)).permute(2, 1, 0)
        for number in (hits.sum((1, 2)) > 0).nonzero():
            expert = self.experts[number]
            place, token = torch.where(hits[number].squeeze(0))
            rows = expert(hidden_states[token]) * top_k_weights[token, place, None]
            made.index_add_(0, token, rows)
        return made


class Lists(nn.Module):
    """Lists of linears, other names, and a parameter of its own that all experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.n_experts = EXPERTS
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.empty(EXPERTS))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        flat, made = x.flatten(0, 1), torch.zeros_like(x).flatten(0, 1)
        for number in range(self.n_experts):
            token, place = torch.where(chosen.flatten(0, 1) == number)
            hidden = torch.tanh(F.linear(flat[token], self.up[number].weight, self.up[number].bias))
            rows = self.down[number](hidden) * self.scale[number]
            made = made.index_add(0, token, rows * shares.flatten(0, 1)[token, place, None])
        return made.view_as(x)
