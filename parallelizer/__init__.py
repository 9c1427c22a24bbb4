"""Parallelism for PyTorch models as data: a YAML plan, checked, shown, applied and run.

    model = parallelize(model, "llama", device_mesh)

Names are imported on first use, so that reading a plan needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same for those who read and do not run: type checkers, editors, the documentation
    from parallelizer.applier import apply as apply
    from parallelizer.applier import parallelize as parallelize
    from parallelizer.asking import from_overrides as from_overrides
    from parallelizer.asking import validate as validate
    from parallelizer.asking import verify as verify
    from parallelizer.checkpoint.loading import load_checkpoint as load_checkpoint
    from parallelizer.checkpoint.loading import newest_checkpoint as newest_checkpoint
    from parallelizer.checkpoint.saving import Checkpoints as Checkpoints
    from parallelizer.checkpoint.saving import save_checkpoint as save_checkpoint
    from parallelizer.compiler import Application as Application
    from parallelizer.compiler import Program as Program
    from parallelizer.compiler import compile as compile
    from parallelizer.config import Setup as Setup
    from parallelizer.config import from_config as from_config
    from parallelizer.context.buffers import shard_batch as shard_batch
    from parallelizer.context.buffers import unshard as unshard
    from parallelizer.context.public import context_parallel as context_parallel
    from parallelizer.context.public import shard_buffers as shard_buffers
    from parallelizer.diagnostics import Diagnostic as Diagnostic
    from parallelizer.diagnostics import PlanError as PlanError
    from parallelizer.global_mean import mean_loss as mean_loss
    from parallelizer.gradients import clip_grad_norm_ as clip_grad_norm_
    from parallelizer.hugging_face.saving import save_pretrained as save_pretrained
    from parallelizer.hugging_face.weights import load_pretrained as load_pretrained
    from parallelizer.initialize import materialize as materialize
    from parallelizer.launch import LaunchError as LaunchError
    from parallelizer.load import load_plan as load_plan
    from parallelizer.mesh import batch_rank as batch_rank
    from parallelizer.mesh import build_mesh as build_mesh
    from parallelizer.mesh import rename_axes as rename_axes
    from parallelizer.optim import parameter_groups as parameter_groups
    from parallelizer.plan import Mesh as Mesh
    from parallelizer.plan import Plan as Plan
    from parallelizer.random_numbers import seed_ranks as seed_ranks
    from parallelizer.redistribution import redistribute as redistribute
    from parallelizer.state import restore_buffers as restore_buffers
    from parallelizer.step import evaluate as evaluate
    from parallelizer.step import train_step as train_step
    from parallelizer.styles.base import style as style
    from parallelizer.vocabulary import cross_entropy as cross_entropy
    from parallelizer.whole_state import load_whole_state_dict as load_whole_state_dict
    from parallelizer.whole_state import whole_state_dict as whole_state_dict
    from parallelizer.workload import Entry as Entry
    from parallelizer.workload import Workload as Workload

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
