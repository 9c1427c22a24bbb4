"""Small modules, each with something that a style must cope with, and a model around one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity import VOCAB

WIDTH = 8


class Around(nn.Module):
    """Token ids to logits through one inner module. The embedding's gradient is right only if the inner
    input's is.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Embedding(VOCAB, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.before(input_ids)
        logits: Tensor = self.after(x + self.inner(x))
        return logits


def around(inner: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: Around(inner(*args, **kwargs))


class Mlp(nn.Module):
    """Two linears; `bias` is what it says."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12, bias=bias)
        self.down = nn.Linear(12, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class AddingMlp(Mlp):
    """Changes what its last linear returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y += x
        return y


class BiasBehind(nn.Module):
    """Two matrices that are parameters, and a bias behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, 12))
        self.down = nn.Parameter(torch.empty(12, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up) @ self.down + self.bias


class FusedMlp(nn.Module):
    """Gate and up projection in one linear, of `gate_size` and `up_size` features, or equal halves in
    `fused_down`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class FusedAttention(nn.Module):
    """Queries, keys and values in one linear, heads counted by attributes, a norm over each head."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, norm: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, 4
        self.qkv = FusedLinear(WIDTH, heads, kv_heads, self.size)
        self.q_norm = Scale(self.size) if norm else nn.Identity()
        self.out = nn.Linear(heads * self.size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:2]
        sizes = [n * self.size for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.view(*rows, -1, self.size).transpose(1, 2) for t in self.qkv(x).split(sizes, -1))
        y = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).reshape(*rows, -1))
        return z


class FusedLinear(nn.Linear):
    """A linear that knows the parts of its output."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        self.q_heads, self.kv_heads = heads, kv_heads
        super().__init__(width, (heads + 2 * kv_heads) * size)


class Scale(nn.Module):
    """An RMS norm over the last dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Transposed(nn.Module):
    """A linear whose weight is stored [in, out], as in GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        nn.init.normal_(self.bias, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TransposedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Transposed(WIDTH, 12), Transposed(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


class Conv1D(nn.Module):
    """A linear as transformers writes it for GPT-2: the weight is [in, out], and forward reads `nf`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        nn.init.normal_(self.bias, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Conv1DMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(12, WIDTH), Conv1D(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


@dataclass
class Sizes:
    """A configuration that all modules of a model share."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 4


class ConfiguredAttention(nn.Module):
    """Queries, keys and values in one plain linear: how many of each is known to the shared configuration alone, and
    forward reads it there.
    """

    def __init__(self, config: Sizes | None = None) -> None:
        super().__init__()
        self.config = c = config or Sizes()
        self.qkv = nn.Linear(WIDTH, (c.heads + 2 * c.kv_heads) * c.size)
        self.out = nn.Linear(c.heads * c.size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        rows, queries, keys = x.shape[:2], c.heads * c.size, c.kv_heads * c.size
        qkv = self.qkv(x)
        parts = qkv[..., :queries], qkv[..., queries : queries + keys], qkv[..., queries + keys :]
        q, k, v = (t.view(*rows, -1, c.size).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).reshape(*rows, -1))
        return z


class GroupedAttention(nn.Module):
    """Query heads in groups that share a key-value head, which forward repeats `groups` times."""

    def __init__(
        self, heads: int = 8, num_kv_heads: int = 2, size: int = 2, transposed: bool = False
    ) -> None:
        super().__init__()
        make = (lambda i, o: Conv1D(o, i)) if transposed else nn.Linear
        self.num_kv_heads, self.groups, self.size = num_kv_heads, heads // num_kv_heads, size
        self.q, self.out = make(WIDTH, heads * size), make(heads * size, WIDTH)
        self.k, self.v = make(WIDTH, num_kv_heads * size), make(WIDTH, num_kv_heads * size)
        self.k_norm = Scale(size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(*x.shape[:2], -1, self.size).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x))
        )
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: Tensor = self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        return z


class Alibi(nn.Module):
    """Attention whose scores sink with distance, by a slope for each head in a buffer (Press et al., arXiv:2108.12409),
    and whose heads are weighed by a parameter each.
    """

    def __init__(self, heads: int = 4, size: int = 2) -> None:
        super().__init__()
        self.size = size
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, heads * size, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * size, WIDTH)
        self.weigh = nn.Parameter(torch.empty(heads))
        self.slopes: Tensor
        self.register_buffer("slopes", torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weigh, 0.5, 1.5)
        heads = len(self.slopes)
        with torch.no_grad():
            self.slopes.copy_(2.0 ** (-8 / heads * torch.arange(1, heads + 1)))

    def forward(self, x: Tensor) -> Tensor:
        rows, steps = x.shape[:2], torch.arange(x.shape[1], device=x.device)
        q, k, v = (linear(x).view(*rows, -1, self.size).transpose(1, 2) for linear in self.qkv)
        distance = (steps[:, None] - steps).to(x.dtype)
        bias = (-self.slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias) * self.weigh[:, None, None]
        z: Tensor = self.out(y.transpose(1, 2).reshape(*rows, -1))
        return z


class Scaled(nn.Module):
    """Features scaled by a buffer, between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.scale: Tensor
        self.register_buffer("scale", torch.empty(3, WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.arange(1.0, 1 + 3 * WIDTH).view(3, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[1]


class FusedExperts(nn.Module):
    """Experts as transformers has them: `gate_up` [experts, 2 * hidden, width], of which the halves are gate and up, and
    `down` [experts, width, hidden]. Every expert sees every token.
    """

    def __init__(self, experts: int = 3, hidden: int = 12) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, WIDTH))
        self.down = nn.Parameter(torch.empty(experts, WIDTH, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bsd,ehd->ebsh", x, self.gate_up).chunk(2, -1)
        return torch.einsum("ebsh,edh->bsd", F.silu(gate) * up, self.down)


class InterleavedMlp(nn.Module):
    """Gate and up projection in one linear, a feature of one beside its feature of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 24), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        y: Tensor = self.down(F.silu(both[..., ::2]) * both[..., 1::2])
        return y


class Experts(nn.Module):
    """A dense mixture: every expert sees every token. `up` is [experts, width, hidden], `down` the other way
    round.
    """

    def __init__(self, experts: int = 4, hidden: int = 12, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.up = nn.Parameter(torch.empty(experts, WIDTH, hidden * (2 if fused else 1)))
        self.down = nn.Parameter(torch.empty(experts, hidden, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.normal_(self.down, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bsd,edh->ebsh", x, self.up)
        if self.fused:
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        return torch.einsum("ebsh,ehd->bsd", torch.tanh(hidden), self.down)


class NormedMlp(nn.Module):
    """A norm before the linears, so that the stream between them may lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(x))
        return y
