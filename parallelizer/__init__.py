"""Parallelism for PyTorch models as data: a YAML plan, checked, shown, applied and run.

    model = parallelize(model, "llama", device_mesh)

Names are imported on first use, so that reading a plan needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from parallelizer.diagnostics.torchao_messages import drop_torchao_messages

if TYPE_CHECKING:  # the same for those who read and do not run: type checkers, editors, the documentation
    from parallelizer.compiler.compile import compile as compile
    from parallelizer.configuration.read_setup import from_config as from_config
    from parallelizer.configuration.read_setup import from_overrides as from_overrides
    from parallelizer.configuration.setup import Setup as Setup
    from parallelizer.diagnostics.diagnostic import Diagnostic as Diagnostic
    from parallelizer.diagnostics.diagnostic import PlanError as PlanError
    from parallelizer.hugging_face.saving import save_pretrained as save_pretrained
    from parallelizer.hugging_face.weights import load_pretrained as load_pretrained
    from parallelizer.language.load import load_plan as load_plan
    from parallelizer.language.pipeline.settings import Pipeline as Pipeline
    from parallelizer.language.plan import Mesh as Mesh
    from parallelizer.language.plan import Plan as Plan
    from parallelizer.language.workload import Entry as Entry
    from parallelizer.language.workload import Workload as Workload
    from parallelizer.mesh import batch_rank as batch_rank
    from parallelizer.mesh import build_mesh as build_mesh
    from parallelizer.mesh import rename_axes as rename_axes
    from parallelizer.mesh import share_experts as share_experts
    from parallelizer.optim import parameter_groups as parameter_groups
    from parallelizer.proof.validate import validate as validate
    from parallelizer.proof.verify import verify as verify
    from parallelizer.runtime.apply import apply as apply
    from parallelizer.runtime.checkpoint.loading import load_checkpoint as load_checkpoint
    from parallelizer.runtime.checkpoint.loading import newest_checkpoint as newest_checkpoint
    from parallelizer.runtime.checkpoint.saving import Checkpoints as Checkpoints
    from parallelizer.runtime.checkpoint.saving import save_checkpoint as save_checkpoint
    from parallelizer.runtime.gradients import clip_grad_norm_ as clip_grad_norm_
    from parallelizer.runtime.initialize import materialize as materialize
    from parallelizer.runtime.launch.failures import LaunchError as LaunchError
    from parallelizer.runtime.load_balancing import load_balancing_loss as load_balancing_loss
    from parallelizer.runtime.mean_loss import mean_loss as mean_loss
    from parallelizer.runtime.parallelize import parallelize as parallelize
    from parallelizer.runtime.redistribution import redistribute as redistribute
    from parallelizer.runtime.shard_batch import shard_batch as shard_batch
    from parallelizer.runtime.state import restore_buffers as restore_buffers
    from parallelizer.runtime.state_dict import load_whole_state_dict as load_whole_state_dict
    from parallelizer.runtime.state_dict import whole_state_dict as whole_state_dict
    from parallelizer.runtime.step import evaluate as evaluate
    from parallelizer.runtime.step import train_step as train_step
    from parallelizer.runtime.sum_over_batch import sum_over_batch as sum_over_batch
    from parallelizer.styles.application import Application as Application
    from parallelizer.styles.application import Program as Program
    from parallelizer.styles.context_parallel.buffers import unshard as unshard
    from parallelizer.styles.context_parallel.public import context_parallel as context_parallel
    from parallelizer.styles.context_parallel.public import shard_buffers as shard_buffers
    from parallelizer.styles.experts.expert_list import ExpertList as ExpertList
    from parallelizer.styles.experts.stack import stack_experts as stack_experts
    from parallelizer.styles.random_numbers import seed_ranks as seed_ranks
    from parallelizer.styles.registry import style as style
    from parallelizer.styles.sharded_logits import cross_entropy as cross_entropy

_WHERE = {
    "Application": "styles.application",
    "Checkpoints": "runtime.checkpoint.saving",
    "Diagnostic": "diagnostics.diagnostic",
    "Entry": "language.workload",
    "ExpertList": "styles.experts.expert_list",
    "LaunchError": "runtime.launch.failures",
    "Mesh": "language.plan",
    "Pipeline": "language.pipeline.settings",
    "Plan": "language.plan",
    "PlanError": "diagnostics.diagnostic",
    "Program": "styles.application",
    "Setup": "configuration.setup",
    "Workload": "language.workload",
    "apply": "runtime.apply",
    "batch_rank": "mesh",
    "build_mesh": "mesh",
    "clip_grad_norm_": "runtime.gradients",
    "compile": "compiler.compile",
    "context_parallel": "styles.context_parallel.public",
    "cross_entropy": "styles.sharded_logits",
    "evaluate": "runtime.step",
    "from_config": "configuration.read_setup",
    "from_overrides": "configuration.read_setup",
    "load_checkpoint": "runtime.checkpoint.loading",
    "load_balancing_loss": "runtime.load_balancing",
    "load_plan": "language.load",
    "load_pretrained": "hugging_face.weights",
    "load_whole_state_dict": "runtime.state_dict",
    "materialize": "runtime.initialize",
    "mean_loss": "runtime.mean_loss",
    "newest_checkpoint": "runtime.checkpoint.loading",
    "parallelize": "runtime.parallelize",
    "parameter_groups": "optim",
    "redistribute": "runtime.redistribution",
    "rename_axes": "mesh",
    "share_experts": "mesh",
    "restore_buffers": "runtime.state",
    "save_checkpoint": "runtime.checkpoint.saving",
    "save_pretrained": "hugging_face.saving",
    "seed_ranks": "styles.random_numbers",
    "shard_batch": "runtime.shard_batch",
    "shard_buffers": "styles.context_parallel.public",
    "stack_experts": "styles.experts.stack",
    "style": "styles.registry",
    "sum_over_batch": "runtime.sum_over_batch",
    "train_step": "runtime.step",
    "unshard": "styles.context_parallel.buffers",
    "validate": "proof.validate",
    "verify": "proof.verify",
    "whole_state_dict": "runtime.state_dict",
}

drop_torchao_messages()

__all__ = list(_WHERE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'parallelizer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"parallelizer.{_WHERE[name]}"), name)
