"""What a proof depends on, part by part: where no part has changed, the proof still holds."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallelizer.configuration.dotted_path import function_at
from parallelizer.configuration.setup import Setup
from parallelizer.language.digest import digest
from parallelizer.language.styles import STYLE_FILES
from parallelizer.language.workload import Workload
from parallelizer.optim import SCHEDULE_KEYS
from parallelizer.proof.sources import modules_of, package_digest, source_digests, versions
from parallelizer.proof.tiny import small_sizes
from parallelizer.styles.registry import FUNCTIONS

SCHEDULE = ("lr", *SCHEDULE_KEYS)
"""Keys of `optim` that a proof does not depend on: they scale an update that is equal on both sides."""

PARTS: dict[str, str] = {
    "plan": "the plan",
    "axes": "the axes above 1",
    "pipeline": "the pipeline",
    "styles": "the `styles` of the preset",
    "own styles": "the source files of the plan's own styles",
    "model": "the model's configuration",
    "sources": "the source files of the model, the loss or the optimizer",
    "packages": "the version of an installed package that the model, the loss or the optimizer is from",
    "loss": "the loss",
    "batch": "the batch",
    "length": "how the length divides",
    "optimizer": "the optimizer",
    "parallelizer": "parallelizer",
    "torch": "torch",
    "python": "Python",
}
"""The parts of a fingerprint, and how a message calls them."""


def parts_of(setup: Setup, model: nn.Module) -> dict[str, str]:
    """The digest of each part that the proof of a setup depends on. `model` is what `setup.build_model()` gave.

    Sizes of axes are not among them, and neither are the number of rows nor the length but for how it divides: a proof runs a
    small form of the same axes. Raises PlanError where `setup.loss()` does.
    """
    plan = setup.plan
    used = {use.style for rule in plan.rules for use in rule.uses}
    own = [FUNCTIONS[name].__module__ for name in sorted(used - set(STYLE_FILES)) if name in FUNCTIONS]
    optimizer = str(setup.optim.get("_target_") or "")
    functions = [setup.loss(), *([function_at(optimizer)] if optimizer else [])]
    styles = {name: options for name, options in setup.defaults.items() if options != type(options)()}
    sources = source_digests([*modules_of(model), *(f.__module__ for f in functions)])
    packages, own_styles = versions(sources, used), source_digests(own)
    small = small_sizes(setup)
    values: dict[str, Any] = {
        "plan": (plan.rules, plan.layouts, plan.batch, plan.buffers, plan.balance, setup.redistribute),
        "axes": sorted(axis for axis, size in setup.mesh.every.items() if size > 1),
        "pipeline": (small.pipeline, small.mesh.sizes["pp"]),
        "styles": styles,
        "own styles": own_styles,
        "model": {key: value for key, value in setup.model.items() if key not in ("plan", "batch", "loss")},
        "sources": sources,
        "packages": packages,
        "loss": setup.loss_path,
        "batch": (_entries(setup.workload), setup.workload.accumulate > 1),
        "length": small.length,
        "optimizer": ({k: v for k, v in setup.optim.items() if k not in SCHEDULE}, setup.clip),
        "parallelizer": package_digest(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {name: digest(values[name]) for name in PARTS}


def fingerprint(parts: Mapping[str, str]) -> str:
    """The SHA-256 of all parts together."""
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()


def _entries(workload: Workload) -> Mapping[str, Any]:
    return dict(workload.entries)
