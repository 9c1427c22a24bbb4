"""Small regressors and classifiers of rows of features. Some look at other rows of the batch."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as together
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    def __init__(self, features=12, width=16, classes=8):
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def between(self, x):
        return x

    def forward(self, features):
        x = self.between(torch.tanh(self.first(features)))
        return self.head(torch.tanh(self.second(x)))


class Normed(Plain):
    """With torch's batch norm."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.norm = nn.BatchNorm1d(self.first.out_features)

    def between(self, x):
        return self.norm(x)


class LayerNormed(Plain):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.norm = nn.LayerNorm(self.first.out_features)

    def between(self, x):
        return self.norm(x)


class GlobalNorm(nn.Module):
    """Batch statistics over all ranks there are."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        sums = torch.stack([x.sum(0), (x * x).sum(0)])
        count = len(x)
        if dist.is_initialized():
            sums = together.all_reduce(sums)
            count = count * dist.get_world_size()
        mean, square = sums / count
        return (x - mean) * (square - mean * mean + 1e-5).rsqrt() * self.weight + self.bias


class GloballyNormed(Plain):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.norm = GlobalNorm(self.first.out_features)

    def between(self, x):
        return self.norm(x)


class Centred(Plain):
    """Features lose their mean over the batch."""

    def between(self, x):
        return x - x.mean(0, keepdim=True)


class SelfCentred(Plain):
    """Features lose their mean over the features."""

    def between(self, x):
        return x - x.mean(-1, keepdim=True)


class Quantised(Plain):
    """Activations are scaled by their largest, as for int8."""

    def between(self, x):
        scale = x.abs().max() / 4
        return x + ((x / scale).round() * scale - x).detach()


class RowQuantised(Plain):
    def between(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 4
        return x + ((x / scale).round() * scale - x).detach()


class Mixed(Plain):
    """Mixup with the row before."""

    def between(self, x):
        return 0.8 * x + 0.2 * x.roll(1, 0)


class Neighbours(Plain):
    """Rows attend to the rows of their batch."""

    def between(self, x):
        return x + (x @ x.T / 4).softmax(-1) @ x


class Limited(Plain):
    """The batch is scaled down if its norm is above a limit."""

    def between(self, x):
        norm = x.norm()
        return x * (5.0 / norm) if norm > 5.0 else x


class RowLimited(Plain):
    """Each row is scaled down if its norm is above a limit."""

    def between(self, x):
        norm = x.norm(dim=-1, keepdim=True)
        return torch.where(norm > 1.5, x * (1.5 / norm), x)


class AnyLarge(Plain):
    """If any value of the batch is large, all rows are squashed."""

    def between(self, x):
        if (x > 0.87).any():
            return x.tanh()
        return x


class AnyIsSame(Plain):
    """A branch on the batch that only saves work: both ways compute the same."""

    def between(self, x):
        if (x > 0.87).any():
            return x.clamp(max=0.87)
        return x


class Followed(Plain):
    """A running mean of the activations is taken away."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_buffer("mean", torch.zeros(self.first.out_features))

    def between(self, x):
        out = x - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return out


class FollowedTogether(Followed):
    """The same, of the mean over all ranks."""

    def between(self, x):
        out = x - self.mean
        with torch.no_grad():
            mean = x.mean(0)
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return out


class Ordered(Plain):
    """Rows are sorted by their size, as for a curriculum, and get a weight by their place."""

    def between(self, x):
        place = x.norm(dim=-1).argsort().argsort()
        return x * (1 + place.to(x.dtype).unsqueeze(-1) / 10)


class SortedAndBack(Plain):
    """Rows are sorted, worked on one by one, and put back: nothing depends on the place."""

    def between(self, x):
        order = x.norm(dim=-1).argsort()
        return torch.tanh(2 * x[order])[order.argsort()]


class Counted(Plain):
    """The step size depends on the number of rows."""

    def between(self, x):
        return x / len(x) ** 0.5


class OneByOne(Plain):
    """A loop over rows."""

    def between(self, x):
        return torch.stack([row * row.norm() for row in x])


class Picked(Plain):
    """Rows with a positive first feature take another way, by a boolean index."""

    def between(self, x):
        out = x.clone()
        chosen = x[:, 0] > 0
        out[chosen] = F.relu(x[chosen]) * 2
        return out


class Reference(Plain):
    """Everything is relative to the first row, as to a virtual batch."""

    def between(self, x):
        return x - 0.5 * x[:1]


class TopRows(Plain):
    """Only the four rows with the largest norms are changed."""

    def between(self, x):
        chosen = x.norm(dim=-1).topk(2).indices
        return x.index_add(0, chosen, x[chosen])


class Standardised(Plain):
    """Inputs are standardised over the batch, without parameters."""

    def forward(self, features):
        return super().forward((features - features.mean(0)) / features.std(0))


class Whitened(Plain):
    """Scaled by one number of the batch, without a gradient through it."""

    def between(self, x):
        return x / x.detach().std()


class Unused(Plain):
    """One layer takes no part."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.spare = nn.Linear(4, 4)


class Frozen(Plain):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.first.requires_grad_(False)


class Twice(Plain):
    """One layer is used twice."""

    def between(self, x):
        return torch.tanh(self.second(x))


class Spectral(Plain):
    """A weight divided by its largest singular value, by power iteration."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        nn.utils.parametrizations.spectral_norm(self.second)


class WeightNormed(Plain):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        nn.utils.parametrizations.weight_norm(self.second)
        nn.utils.parametrizations.weight_norm(self.head)


class Codebook(Plain):
    """Activations go to their nearest code; codes follow by a running mean of what came to them."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.register_buffer("codes", torch.randn(6, self.first.out_features))

    def between(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        out = x + (self.codes[nearest] - x).detach() * 0.5
        with torch.no_grad():
            hot = F.one_hot(nearest, 6).to(x.dtype)
            means = hot.T @ x / hot.sum(0).clamp(min=1).unsqueeze(-1)
            self.codes.lerp_(torch.where(hot.sum(0).unsqueeze(-1) > 0, means, self.codes), 0.3)
        return out


class Capacity(Plain):
    """Two experts; each takes as many rows as half of the batch, in their order, and drops the others."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        width = self.first.out_features
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def between(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()[: len(x) // 2]
            out = out.index_add(0, rows, gate[rows].unsqueeze(-1) * expert(x[rows]))
        return out


class Dropless(Capacity):
    """The same without a limit."""

    def between(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            out = out.index_add(0, rows, gate[rows].unsqueeze(-1) * expert(x[rows]))
        return out


class Trimmed(nn.Module):
    """Embeds words and trims columns that no row of the batch uses. Padding weighs nothing anyway."""

    def __init__(self, vocabulary=32, width=16, classes=8):
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, classes)

    def forward(self, input_ids):
        used = (input_ids > 3).any(0).nonzero().flatten()
        ids = input_ids[:, : int(used.max()) + 1] if len(used) else input_ids[:, :1]
        seen = (ids > 3).unsqueeze(-1)
        return self.head((torch.tanh(self.words(ids)) * seen).sum(1) / seen.sum(1).clamp(min=1))


class Longest(Trimmed):
    """The same, but the mean is over the columns of the longest row."""

    def forward(self, input_ids):
        used = (input_ids > 15).any(0).nonzero().flatten()
        ids = input_ids[:, : int(used.max()) + 1] if len(used) else input_ids[:, :1]
        seen = (ids > 15).unsqueeze(-1)
        return self.head((torch.tanh(self.words(ids)) * seen).mean(1))
