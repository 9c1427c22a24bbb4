"""A training loop with nothing around it: forward, loss, backward, clipping, step.

    python docs/examples/bare_loop.py                                           # one process
    torchrun --nproc-per-node 4 docs/examples/bare_loop.py cp=2 tp=2            # the same losses
    torchrun --nproc-per-node 4 docs/examples/bare_loop.py dp_shard=2 tp=2      # and again

What it trains, rows, seed and sizes of steps, is in task.py beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

import task
import torch
import torch.distributed as dist

import parallelizer as pz
from parallelizer.models.llama import Llama


def train(axes: Mapping[str, int]) -> list[float]:
    """The losses of a run on a mesh of these axes, in an initialised world."""
    mesh = pz.build_mesh(
        pz.Mesh(axes), "cpu"
    )  # or a DeviceMesh of yours: pz.rename_axes(mesh, {"model": "tp"})
    plan = pz.load_plan("llama")
    with torch.device("meta"):
        model = Llama(
            vocab_size=256, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=96, max_seq_len=64
        )
    pz.parallelize(model, plan, mesh)
    pz.materialize(model, device="cpu", seed=task.SEED)
    optimizer = torch.optim.AdamW(pz.parameter_groups(model.parameters()), lr=task.RATE, weight_decay=0)

    losses = []
    for step in range(task.STEPS):
        batch = pz.shard_batch(task.batch(step), plan, mesh)  # this rank's rows and tokens
        logits = model(batch["input_ids"])
        total = pz.cross_entropy(logits, batch["labels"])  # summed; a DTensor, sharded by vocabulary
        loss = pz.mean_loss(total, (batch["labels"] != -100).sum(), model)  # the mean over all ranks' tokens
        loss.backward()
        pz.clip_grad_norm_(model.parameters(), task.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """One rank of a run."""
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    for step, loss in enumerate(train(task.axes_asked_for()), 1):
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
