"""Parallelism for PyTorch models as data: a YAML plan, checked, shown, applied and run.

    model = parallelize(model, "llama", device_mesh)

Names are imported on first use, so that reading a plan needs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "Application": "compiler",
    "Checkpoints": "checkpoint.saving",
    "Diagnostic": "diagnostics",
    "Entry": "workload",
    "LaunchError": "launch",
    "Mesh": "plan",
    "Plan": "plan",
    "PlanError": "diagnostics",
    "Program": "compiler",
    "Setup": "config",
    "Workload": "workload",
    "apply": "applier",
    "batch_rank": "mesh",
    "build_mesh": "mesh",
    "clip_grad_norm_": "gradients",
    "compile": "compiler",
    "context_parallel": "context.public",
    "cross_entropy": "vocabulary",
    "evaluate": "step",
    "from_config": "config",
    "from_overrides": "asking",
    "load_checkpoint": "checkpoint.loading",
    "load_plan": "load",
    "load_pretrained": "hugging_face.weights",
    "load_whole_state_dict": "whole_state",
    "materialize": "initialize",
    "mean_loss": "global_mean",
    "newest_checkpoint": "checkpoint.loading",
    "parallelize": "applier",
    "parameter_groups": "optim",
    "redistribute": "redistribution",
    "rename_axes": "mesh",
    "restore_buffers": "state",
    "save_checkpoint": "checkpoint.saving",
    "save_pretrained": "hugging_face.saving",
    "seed_ranks": "random_numbers",
    "shard_batch": "context.buffers",
    "shard_buffers": "context.public",
    "style": "styles.base",
    "train_step": "step",
    "unshard": "context.buffers",
    "validate": "asking",
    "verify": "asking",
    "whole_state_dict": "whole_state",
}

__all__ = list(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'parallelizer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"parallelizer.{_WHERE[name]}"), name)
