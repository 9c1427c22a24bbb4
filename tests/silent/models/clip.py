"""Two towers, images and texts, and a contrastive loss over the batch."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as together
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, width, shared):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.project = nn.Linear(width, shared, bias=False)

    def forward(self, x):
        return self.project(x + self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Clip(nn.Module):
    def __init__(self, width=16, shared=12):
        super().__init__()
        self.pixels, self.words = nn.Linear(10, width), nn.Embedding(32, width)
        self.image, self.text = Tower(width, shared), Tower(width, shared)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, input_ids):
        image = F.normalize(self.image(self.pixels(images)), dim=-1)
        text = F.normalize(self.text(self.words(input_ids).mean(1)), dim=-1)
        return image, text, self.scale.exp()


def local_negatives(output, batch):
    image, text, scale = output
    logits = scale * image @ text.T
    target = torch.arange(len(image))
    both = F.cross_entropy(logits, target, reduction="sum") + F.cross_entropy(
        logits.T, target, reduction="sum"
    )
    return both / 2, len(image)


class _Everywhere(torch.autograd.Function):
    """All ranks' rows; backward sums the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def all_negatives(output, batch):
    """Negatives of all ranks: this rank's rows against everybody's columns, both ways."""
    image, text, scale = output
    if not dist.is_initialized():
        return local_negatives(output, batch)
    every_image, every_text = _Everywhere.apply(image), _Everywhere.apply(text)
    target = torch.arange(len(image)) + dist.get_rank() * len(image)
    both = F.cross_entropy(scale * image @ every_text.T, target, reduction="sum")
    both = both + F.cross_entropy(scale * text @ every_image.T, target, reduction="sum")
    return both / 2, len(image)


def gathered_without_gradient(output, batch):
    """Negatives of all ranks, gathered without a gradient: only this rank's own rows get theirs."""
    image, text, scale = output
    if not dist.is_initialized():
        return local_negatives(output, batch)
    every = []
    for x in (image, text):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach().contiguous())
        parts[dist.get_rank()] = x
        every.append(torch.cat(parts))
    target = torch.arange(len(image)) + dist.get_rank() * len(image)
    both = F.cross_entropy(scale * image @ every[1].T, target, reduction="sum")
    both = both + F.cross_entropy(scale * text @ every[0].T, target, reduction="sum")
    return both / 2, len(image)


def gathered_by_torch(output, batch):
    """The same as all_negatives, with torch's own differentiable gather."""
    image, text, scale = output
    if not dist.is_initialized():
        return local_negatives(output, batch)
    every_image, every_text = (torch.cat(together.all_gather(x.contiguous())) for x in (image, text))
    target = torch.arange(len(image)) + dist.get_rank() * len(image)
    both = F.cross_entropy(scale * image @ every_text.T, target, reduction="sum")
    both = both + F.cross_entropy(scale * text @ every_image.T, target, reduction="sum")
    return both / 2, len(image)


def sigmoid_local(output, batch):
    """As SigLIP: each pair by itself, the pairs of this rank's rows alone."""
    image, text, scale = output
    logits = scale * image @ text.T
    sign = 2 * torch.eye(len(image), dtype=logits.dtype) - 1
    return F.softplus(-sign * logits).sum(), len(image)


def matching(output, batch):
    """Pairs alone, no negatives."""
    image, text, scale = output
    return (scale * (1 - (image * text).sum(-1))).sum(), len(image)
