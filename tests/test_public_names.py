"""The public names are frozen: what is added, taken away or called otherwise shows here, and in docs/changelog.md.

After a change that is meant:  python -m tests.test_public_names
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import parallelizer as pz
from parallelizer import training

ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = Path(__file__).with_name("public_signatures.txt")

NAMES = {
    "Application", "Checkpoints", "Diagnostic", "Entry", "ExpertList", "LaunchError", "Mesh", "Pipeline", "Plan", "PlanError",
    "Program", "Setup", "Workload", "apply", "batch_rank", "build_mesh", "clip_grad_norm_", "compile", "context_parallel",
    "cross_entropy", "evaluate", "from_config", "from_overrides", "load_balancing_loss", "load_checkpoint", "load_plan",
    "load_pretrained", "load_whole_state_dict", "materialize", "mean_loss", "newest_checkpoint", "parallelize",
    "parameter_groups",
    "redistribute", "rename_axes", "restore_buffers", "save_checkpoint", "save_pretrained", "seed_ranks", "shard_batch",
    "share_experts", "shard_buffers", "stack_experts", "style", "sum_over_batch", "train_step", "unshard", "validate", "verify",
    "whole_state_dict",
}  # fmt: skip

TRAINING = {
    "Baseline", "Batches", "Guards", "Job", "Reporting", "Result", "RunCheckpoints", "Sampler", "Sampling", "SamplingJob",
    "Settings", "Source", "TRACKERS", "TextLogits", "TextStream", "Tracker", "fingerprint", "learning_rate", "read_document",
    "run", "run_sampling", "source_of", "stop_requests",
}  # fmt: skip
"""The names of `parallelizer.training`, which recipes use."""

MADE = {
    "Batches": ("training", "validation"),
    "Guards": ("after", "at_once", "before_saving", "words"),
    "Reporting": (
        "at_once",
        "begin",
        "doing",
        "ended",
        "measured",
        "result",
        "step",
        "tell",
        "validation_loss",
    ),
    "RunCheckpoints": ("find", "is_due", "load", "save"),
    "Sampler": ("draw",),
    "TextLogits": ("logits",),
    "TextStream": ("end", "show"),
}
"""Classes of `parallelizer.training` whose objects a job makes, and what recipes call of them: that alone is public."""

BESIDE = {
    "parallelizer.hugging_face.trainer": ("ParallelTrainer",),
    "parallelizer.losses": ("classification", "cross_entropy", "squared_error"),
    "parallelizer.optim": ("build_optimizer", "learning_rate"),
    "parallelizer.testing": ("assert_equivalent",),
}
"""Public names that are imported from a module of their own, because few want them or configurations name them."""


def public() -> Iterator[tuple[str, object]]:
    """Every public object under the name that it is imported by."""
    for name in sorted(NAMES):
        where = pz._WHERE[name]
        yield f"parallelizer.{name}", getattr(importlib.import_module(f"parallelizer.{where}"), name)
    for name in sorted(TRAINING):
        where = training._WHERE[name]
        yield f"parallelizer.training.{name}", getattr(importlib.import_module(f"parallelizer.{where}"), name)
    for module, names in BESIDE.items():
        for name in names:
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


def lines() -> Iterator[str]:
    """A line for each function, and for each class one for what it is called with and each public method."""
    for name, thing in public():
        made = MADE.get(name.removeprefix("parallelizer.training."))
        if made is not None:
            yield name
            yield from (f"    .{m}{_signature(getattr(thing, m)) if hasattr(thing, m) else ''}" for m in made)
            continue
        yield f"{name}{_signature(thing)}"
        if not inspect.isclass(thing):
            continue
        fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        for method, found in sorted(vars(thing).items()):
            if method.startswith("_") or method in fields:
                continue
            if isinstance(found, property) or not callable(getattr(thing, method)):
                yield f"    .{method}"
            else:
                yield f"    .{method}{_signature(getattr(thing, method))}"


def _signature(thing: object) -> str:
    try:
        written = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", written)


def test_the_public_names_are_these() -> None:
    assert set(pz.__all__) == NAMES
    assert len(pz.__all__) == len(NAMES)
    assert set(training.__all__) == TRAINING
    assert len(training.__all__) == len(TRAINING)


def test_every_public_name_is_there_and_documented() -> None:
    for name, thing in public():
        assert (inspect.getdoc(thing) or "").strip(), name
    for name in NAMES:
        assert getattr(pz, name) is not None
    for name in TRAINING:
        assert getattr(training, name) is not None


def test_no_name_is_hidden_by_a_module() -> None:
    """`import parallelizer.x` puts the module in the place of a function called x."""
    for name in NAMES:
        is_module = any((ROOT / "parallelizer" / f"{name}{end}").exists() for end in (".py", "/__init__.py"))
        assert not is_module, name
    for name in TRAINING:
        assert not list((ROOT / "parallelizer/training").glob(f"{name}*")), name


def test_signatures_are_as_they_were() -> None:
    assert list(lines()) == SIGNATURES.read_text().splitlines(), (
        "a public signature has changed: say so in docs/changelog.md, then `python -m tests.test_public_names`"
    )


if __name__ == "__main__":
    SIGNATURES.write_text("".join(f"{line}\n" for line in lines()))
