"""A U-Net with skips: convolutions, and group or batch norms."""

import torch
import torch.nn.functional as F
from torch import nn


class Double(nn.Module):
    def __init__(self, inputs, outputs, norm):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm1, self.norm2 = norm(outputs), norm(outputs)

    def forward(self, x):
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class FrozenNorm(nn.Module):
    """A batch norm whose statistics stay what they were."""

    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, training=False)


NORMS = {
    "group": lambda channels: nn.GroupNorm(4, channels),
    "batch": nn.BatchNorm2d,
    "instance": lambda channels: nn.InstanceNorm2d(channels, affine=True),
    "frozen": FrozenNorm,
}


class Unet(nn.Module):
    def __init__(self, channels=8, norm="group"):
        super().__init__()
        self.enter = Double(3, channels, NORMS[norm])
        self.down = Double(channels, 2 * channels, NORMS[norm])
        self.middle = Double(2 * channels, 2 * channels, NORMS[norm])
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.leave = Double(2 * channels, channels, NORMS[norm])
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, images):
        first = self.enter(images)
        second = self.middle(self.down(F.avg_pool2d(first, 2)))
        return self.out(self.leave(torch.cat([first, self.up(second)], 1)))


def denoised(output, batch):
    return (output - batch["clean"]).pow(2).sum(), output.numel()


def denoised_mean(output, batch):
    return F.mse_loss(output, batch["clean"]), 1


def psnr(output, batch):
    """The logarithm of the mean over the batch."""
    return torch.log10((output - batch["clean"]).pow(2).mean()) * len(output), len(output)


def psnr_of_rows(output, batch):
    return torch.log10((output - batch["clean"]).pow(2).mean((1, 2, 3))).sum(), len(output)
