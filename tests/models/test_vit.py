"""The Vision Transformer against a reference in float64 that shares nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallelizer.losses import classification
from parallelizer.models.vit import VisionTransformer

SIZES = {
    "image_size": 8,
    "patch_size": 4,
    "num_classes": 5,
    "dim": 12,
    "depth": 2,
    "num_heads": 3,
    "hidden_dim": 20,
}


def filled(**more: object) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(**SIZES, **more).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def reference(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """Patch by patch and head by head."""

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("...i,oi->...o", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    patches = [
        torch.einsum("bcij,ocij->bo", images[:, :, r : r + 4, c : c + 4], w["embed.project.weight"])
        + w["embed.project.bias"]
        for r in (0, 4)
        for c in (0, 4)
    ]
    if "embed.class_token" in w:
        patches.insert(0, w["embed.class_token"][0].expand(len(images), -1))
    x = torch.stack(patches, 1) + w["embed.positions"]
    for i in range(2):
        at = f"blocks.{i}"
        qkv, parts = linear(norm(x, f"{at}.norm1"), f"{at}.attn.qkv"), []
        for head in range(3):
            q, k, v = (qkv[..., 12 * part + 4 * head : 12 * part + 4 * head + 4] for part in range(3))
            scores = torch.einsum("bqe,bke->bqk", q, k) / 2
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            parts.append(weights @ v)
        x = x + linear(torch.cat(parts, -1), f"{at}.attn.proj")
        hidden = linear(norm(x, f"{at}.norm2"), f"{at}.mlp.fc1")
        x = x + linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), f"{at}.mlp.fc2")
    x = norm(x, "norm")
    return linear(x[:, 0] if "embed.class_token" in w else x.mean(1), "head")


@pytest.mark.parametrize("class_token", [False, True])
def test_logits_are_those_of_the_reference(class_token: bool) -> None:
    model = filled(class_token=class_token)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images), reference(model.state_dict(), images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [{"patch_size": 3}, {"num_heads": 5}])
def test_sizes_that_do_not_divide_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is not a multiple of"):
        VisionTransformer(**SIZES | wrong)  # type: ignore[arg-type]


def test_the_loss_is_a_sum_over_images_that_count() -> None:
    logits, labels = torch.randn(4, 5), torch.tensor([1, -100, 4, 0])
    total, count = classification(logits, {"labels": labels})
    expected = -sum(logits[i].log_softmax(-1)[labels[i]] for i in (0, 2, 3))
    assert count == 3
    torch.testing.assert_close(total, expected)
