"""Lightning Fabric on a model that a plan splits: `pip install 'path/to/parallelizer[lightning]'`.

    python docs/examples/fabric_loop.py                                         # one process
    torchrun --nproc-per-node 4 docs/examples/fabric_loop.py dp_shard=2 tp=2    # the same losses

Fabric's ModelParallelStrategy makes a mesh of two axes, data_parallel and tensor_parallel, and asks for a function that
splits the model over it; its loaders deal rows out to data_parallel alone. There is no third axis for cp.
"""

from __future__ import annotations

from collections.abc import Mapping

import task
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import parallelizer as pz
from parallelizer.models.llama import Llama

AXES = {"data_parallel": "dp_shard", "tensor_parallel": "tp"}  # Fabric's names: ours


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What the strategy calls in `fabric.setup`."""
    pz.parallelize(model, "llama", mesh, axes=AXES)
    return pz.materialize(model, device=mesh.device_type, seed=task.SEED)


def train(axes: Mapping[str, int]) -> list[float]:
    """The losses of a run with so many ranks of dp_shard and tp."""
    data, tensor = axes.get("dp_shard", 1), axes.get("tp", 1)
    strategy = ModelParallelStrategy(split, data_parallel_size=data, tensor_parallel_size=tensor)
    fabric = Fabric(accelerator="cpu", devices=data * tensor, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=True):  # on meta
        model = Llama(
            vocab_size=256, dim=64, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=96, max_seq_len=64
        )
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(pz.parameter_groups(model.parameters()), lr=task.RATE, weight_decay=0)
    optimizer = fabric.setup_optimizers(optimizer)
    rows = [task.row(number) for number in range(task.STEPS * task.ROWS)]
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=task.ROWS // data))

    losses = []
    for batch in loader:
        total = pz.cross_entropy(model(batch["input_ids"]), batch["labels"])
        loss = pz.mean_loss(total, (batch["labels"] != -100).sum(), model)
        fabric.backward(loss)
        pz.clip_grad_norm_(model.parameters(), task.CLIP)  # also where they lie on several meshes
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """One rank of a run."""
    losses = train(task.axes_asked_for())
    for step, loss in enumerate(losses, 1):
        if torch.distributed.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
