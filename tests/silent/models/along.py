"""Blocks that mix tokens along the sequence without attention, or look at many features at once."""

import torch
import torch.nn.functional as F
from torch import nn


class Along(nn.Module):
    """Words, some blocks, and a head. `kind` names the blocks' class."""

    def __init__(self, kind, vocabulary=32, width=16, layers=2):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(globals()[kind](width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mlp(nn.Module):
    """The features between the linears go through `between`."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def before(self, x):
        return x

    def between(self, h):
        return h

    def forward(self, x):
        return x + self.down(self.between(torch.tanh(self.up(self.before(x)))))


class TokenMlp(Mlp):
    """MLP-mixer: a linear over the tokens."""

    def __init__(self, width):
        super().__init__(width)
        self.tokens = nn.Linear(16, 16)

    def before(self, x):
        return x + self.tokens(x.transpose(1, 2)).transpose(1, 2)


class Summed(Mlp):
    """The mean of what came before."""

    def before(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)


class Shifted(Mlp):
    """Half of the features are of the token before."""

    def before(self, x):
        half = x.shape[-1] // 2
        return torch.cat([F.pad(x, (0, 0, 1, -1))[..., :half], x[..., half:]], -1)


class Rolled(Mlp):
    def before(self, x):
        return 0.5 * (x + x.roll(1, 1))


class Flipped(Mlp):
    """Tokens and their mirror images."""

    def before(self, x):
        return x + 0.5 * x.flip(1)


class FlippedTwice(Mlp):
    """Reversed, worked on token by token, and reversed again."""

    def before(self, x):
        return torch.tanh(x.flip(1)).flip(1)


class MeanTaken(Mlp):
    """The mean over the sequence is taken away."""

    def before(self, x):
        return x - x.mean(1, keepdim=True)


class Gate(Mlp):
    """Squeeze and excite: a gate of the features, by the mean over tokens."""

    def before(self, x):
        return x * torch.sigmoid(x.mean(1, keepdim=True))


class Softmaxed(Mlp):
    """A softmax over the tokens."""

    def before(self, x):
        return x.softmax(1) * x.shape[1]


class FirstToken(Mlp):
    """Every token reads the first."""

    def before(self, x):
        return x + x[:, :1]


class Unbound(Mlp):
    """A loop over tokens, each by itself."""

    def before(self, x):
        return torch.stack([F.layer_norm(token, token.shape[-1:]) for token in x.unbind(1)], 1)


class Reindexed(Mlp):
    """Tokens are permuted and put back by index_select."""

    def before(self, x):
        order = torch.arange(x.shape[1]).flip(0)
        return torch.sin(x.index_select(1, order)).index_select(1, order)


class Bucketed(Mlp):
    """Values are put into buckets, each by itself."""

    def before(self, x):
        borders = torch.linspace(-1, 1, 5, dtype=x.dtype)
        return x * (1 + torch.searchsorted(borders, x.detach().contiguous()) / 5)


class SortedTokens(Mlp):
    """Each feature is sorted along the sequence."""

    def before(self, x):
        return x + x.sort(1).values


class Decay(Mlp):
    """An exponential mean, token after token."""

    def before(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = 0.5 * state + token
            out.append(state)
        return torch.stack(out, 1)


class Convolved(Mlp):
    """A causal convolution, a kernel for each feature."""

    def __init__(self, width):
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, groups=width)

    def before(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Pooled(Mlp):
    """Pairs of tokens: their mean, and back."""

    def before(self, x):
        pairs = F.avg_pool1d(x.transpose(1, 2), 2)
        return x + F.interpolate(pairs, scale_factor=2.0).transpose(1, 2)


class Fourier(Mlp):
    """FNet: the real part of a transform over tokens."""

    def before(self, x):
        return torch.fft.fft(x, dim=1).real / 4


class LocalMask(Mlp):
    """A mask of the local length, all of it true: tokens past the end, of which there are none."""

    def before(self, x):
        inside = torch.arange(x.shape[1]) < x.shape[1]
        return x * inside.unsqueeze(-1)


class HalfMask(Mlp):
    """A mask of the first half of what is there."""

    def before(self, x):
        inside = torch.arange(x.shape[1]) < x.shape[1] // 2
        return x * (1 + inside.unsqueeze(-1))


class AnyOfFeatures(Mlp):
    """A branch on the features between the linears."""

    def between(self, h):
        return h * 0.5 if h.abs().max() > 0.98 else h


class NormLimit(Mlp):
    """If the norm of the whole activation is above a limit, it is scaled down."""

    def before(self, x):
        norm = x.norm()
        return x * (20.0 / norm) if norm > 20.0 else x


class SoftFeatures(Mlp):
    """A softmax over the features between the linears."""

    def between(self, h):
        return h.softmax(-1) * h.shape[-1]


class NormedFeatures(Mlp):
    """Normalised over the features between the linears, without parameters."""

    def between(self, h):
        return F.layer_norm(h, h.shape[-1:])


class RmsFeatures(Mlp):
    """Normalised over the features between the linears, with a weight."""

    def __init__(self, width):
        super().__init__(width)
        self.weight = nn.Parameter(torch.rand(2 * width))

    def between(self, h):
        return self.weight * h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


class SortedFeatures(Mlp):
    def between(self, h):
        return h.sort(-1).values


class TopFeatures(Mlp):
    """Only the largest quarter of the features is left."""

    def between(self, h):
        least = h.topk(h.shape[-1] // 4, -1).values[..., -1:]
        return h * (h >= least)


class Maxout(Mlp):
    """Neighbouring features in pairs, each with the larger: groups of 2 lie within a rank."""

    def between(self, h):
        pairs = h.unflatten(-1, (-1, 2))
        return (pairs / (1 + pairs.abs().amax(-1, keepdim=True))).flatten(-2)


class FarPairs(Mlp):
    """Features in pairs that lie half the width apart."""

    def between(self, h):
        a, b = h.chunk(2, -1)
        return torch.cat([a * b, a + b], -1)


class GroupNormed(Mlp):
    """Four groups of features, normalised each: groups lie within a rank."""

    def between(self, h):
        return F.layer_norm(h.unflatten(-1, (-1, 8)), (8,)).flatten(-2)


class CountedGroups(Mlp):
    """Two groups, counted by the width that is there."""

    def between(self, h):
        return F.layer_norm(h.unflatten(-1, (2, -1)), (h.shape[-1] // 2,)).flatten(-2)


class RolledFeatures(Mlp):
    def between(self, h):
        return h + 0.5 * h.roll(1, -1)


class Scaled(Mlp):
    """By the number of features that are there."""

    def between(self, h):
        return h / h.shape[-1] ** 0.5


class CumulatedFeatures(Mlp):
    def between(self, h):
        return h.cumsum(-1) / 8


class Wavy(Mlp):
    """Each feature by its index."""

    def between(self, h):
        return h * torch.cos(torch.arange(h.shape[-1], dtype=h.dtype))


class Dotted(Mlp):
    """An inner product over all features, as a gate."""

    def between(self, h):
        return h * torch.sigmoid((h * h).sum(-1, keepdim=True))


class QkNormed(nn.Module):
    """Attention with a norm over all heads of queries and keys together."""

    def __init__(self, width, heads=4, over_heads=True):
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        size = width if over_heads else self.head_dim
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.over_heads = over_heads

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.over_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if not self.over_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class EachHeadNormed(QkNormed):
    """The norms are of each head."""

    def __init__(self, width):
        super().__init__(width, over_heads=False)
