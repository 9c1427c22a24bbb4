"""A block like Mamba's: a gated projection, a causal convolution, and a scan over the sequence."""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, inner, state=4):
        super().__init__()
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.x_proj = nn.Linear(inner, 2 * state, bias=False)
        self.dt = nn.Parameter(torch.rand(inner))
        self.log_a = nn.Parameter(torch.rand(inner, state))
        self.skip = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        length = x.shape[1]
        h, z = self.in_proj(x).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c = self.x_proj(h).chunk(2, -1)
        decay = torch.exp(-F.softplus(self.dt).unsqueeze(-1) * self.log_a.exp())
        state, out = h.new_zeros(h.shape[0], h.shape[2], b.shape[-1]), []
        for t in range(length):
            state = state * decay + h[:, t].unsqueeze(-1) * b[:, t].unsqueeze(1)
            out.append((state * c[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(out, 1) + h * self.skip
        return self.out_proj(y * F.silu(z))


class Mamba(nn.Module):
    def __init__(self, vocabulary=32, width=16, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixers = nn.ModuleList(Mixer(width, 2 * width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)
