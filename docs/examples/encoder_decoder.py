"""Context parallelism in a training loop of one's own, without a plan: a ViT-like encoder, whose attention has no causal
mask, and a decoder that attends across to it.

    torchrun --nproc-per-node 2 docs/examples/encoder_decoder.py      # or 1, 3, 4: the losses are the same

Three lines make it parallel: `context_parallel` on the modules that call attention, `shard_buffers` on what has a row for each
patch or token, and an all-reduce of the gradients, which FSDP over the same ranks would do as well.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import parallelizer as pz

WIDTH, HEADS, PATCHES, TOKENS, WORDS = 64, 4, 48, 24, 100


class Attention(nn.Module):
    """Self-attention, or attention across to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None, is_causal: bool = False) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            f(t).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, source), (self.v, source))
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Captioner(nn.Module):
    """Patches [B, P, 12] with their places, and tokens [B, T], to logits [B, T, words]."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(12, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.encoder = nn.ModuleList(Attention() for _ in range(2))
        self.token, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.inner, self.across, self.head = Attention(), Attention(), nn.Linear(WIDTH, WORDS)

    def forward(self, patches: Tensor, places: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        memory = self.patch(patches) + self.place(places)
        for block in self.encoder:
            memory = memory + block(F.layer_norm(memory, (WIDTH,)))
        x = self.token(tokens) + self.position(positions)
        x = x + self.inner(F.layer_norm(x, (WIDTH,)), is_causal=True)
        return self.head(x + self.across(F.layer_norm(x, (WIDTH,)), memory))


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Captioner()
    pz.context_parallel([m for m in model.modules() if isinstance(m, Attention)], mesh, method="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1)
    patches, tokens = (
        torch.randn(4, PATCHES, 12, generator=data),
        torch.randint(WORDS, (4, TOKENS), generator=data),
    )
    batch = {
        "patches": patches, "places": torch.arange(PATCHES).expand(4, -1),
        "tokens": tokens, "positions": torch.arange(TOKENS).expand(4, -1), "labels": tokens.roll(-1, 1),
    }  # fmt: skip
    local = pz.shard_buffers(batch, dict.fromkeys(batch, 1), mesh)
    labels = local.pop("labels")
    for step in range(5):
        loss = F.cross_entropy(model(**local).flatten(0, 1), labels.flatten())
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)  # every rank has its tokens' part of the sum
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
