"""What the recipe itself reads of the configuration, looked at before a rank starts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from parallelizer.diagnostics import PlanError, Span, quoted
from parallelizer.origins import Origins
from parallelizer.reading import Reading, is_whole
from parallelizer.source import Scalar
from parallelizer.suggest import did_you_mean
from recipes.trackers import TRACKERS

Steps = tuple[int, int]
"""The first and the last step, from 1."""


@dataclass(frozen=True)
class Settings:
    """A run in numbers: `lr` to `final_ratio` are those of `learning_rate`, timeouts are in seconds.

    `pretrained`: a model with weights starts from them. `save`: the folder that the trained model is written to.
    `checkpoint_every` to `profile`: see the configuration, `train`.
    """

    steps: int
    seed: int
    eval_every: int
    eval_batches: int
    log_every: int
    lr: float
    warmup: int
    final_ratio: float
    start_timeout: float
    collective_timeout: float
    max_cpu_ranks: int
    max_restarts: int = 0
    stuck_after: float = 300.0
    stop_grace: float = 60.0
    requeue_code: int = 75
    pretrained: bool = True
    save: str | None = None
    checkpoint_every: int = 0
    checkpoint_dir: str | None = None
    keep_last: int = 3
    keep_every: int = 0
    resume: str = "auto"
    check_every: int = 100
    on_nonfinite: str = "stop"
    on_drift: str = "stop"
    compare: bool = True
    trackers: tuple[str, ...] = ()
    profile: Steps | None = None


def read_settings(config: DictConfig, origins: Origins) -> Settings:
    """Settings of a composed configuration. Raises PlanError with every value that is of no use."""
    reading = Reading(config, origins)
    found = {**_numbers(reading), **_weights(reading), **_checkpoints(reading), **_watching(reading)}
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return Settings(**found)


def check(reading: Reading, more_keys: tuple[str, ...] = ()) -> None:
    """Report every number of the recipe that is of no use, and every key that neither it nor, with `more_keys` at the root,
    its caller reads.

    The configuration's `checks` names it, so that `parallelizer validate` says the same as a run would.
    """
    _numbers(reading)
    _weights(reading)
    _checkpoints(reading)
    _watching(reading)
    _check_keys(reading, (*KEYS, *more_keys))


def _numbers(reading: Reading) -> dict[str, Any]:
    """The fields of Settings; what is of no use is reported."""
    found: dict[str, Any] = {}
    for key, (useful, wanted) in _WANTED.items():
        before = len(reading.findings.items)
        value = reading.get(key)
        if not useful(value) and len(reading.findings.items) == before:
            shown = "missing" if value is None else repr(value)
            reading.error("wrong-type", f"{key} is {shown}", key, f"it is {wanted}")
        found[key.partition(".")[2]] = value
    return found


def _weights(reading: Reading) -> dict[str, Any]:
    """Whether pretrained weights are loaded, and where the trained ones go; both may be left out."""
    pretrained, save = reading.get("train.pretrained"), reading.get("train.save")
    if not isinstance(pretrained, bool | None):
        message = f"train.pretrained is {pretrained!r}"
        reading.error("wrong-type", message, "train.pretrained", "it is true or false")
    if save is not None and (not isinstance(save, str) or not save.strip()):
        help_text = "it is a new folder's name, or null"
        reading.error("wrong-type", f"train.save is {save!r}", "train.save", help_text)
    return {"pretrained": pretrained is not False, "save": save}


def _checkpoints(reading: Reading) -> dict[str, Any]:
    """Where checkpoints go, and which one a run starts from; both may be left out."""
    folder, resume = reading.get("train.checkpoint_dir"), reading.get("train.resume")
    if folder is not None and (not isinstance(folder, str) or not folder.strip()):
        help_text = "it is a folder's name, or null for one in the output folder"
        reading.error("wrong-type", f"train.checkpoint_dir is {folder!r}", "train.checkpoint_dir", help_text)
    if resume is not None and (not isinstance(resume, str) or not resume.strip()):
        help_text = "it is auto, never, or a checkpoint's folder"
        reading.error("wrong-type", f"train.resume is {resume!r}", "train.resume", help_text)
    return {"checkpoint_dir": folder, "resume": resume or "auto"}


def _watching(reading: Reading) -> dict[str, Any]:
    """What is looked at while it runs, who else is told, and which steps are profiled; all may be left out."""
    compare, trackers = reading.get("train.compare"), reading.get("train.trackers")
    if not isinstance(compare, bool | None):
        reading.error("wrong-type", f"train.compare is {compare!r}", "train.compare", "it is true or false")
    names = trackers if isinstance(trackers, list) else [trackers] * (trackers is not None)
    for name in names:
        if name not in TRACKERS:
            help_text = did_you_mean(str(name), list(TRACKERS), "there are")
            reading.error("wrong-type", f"train.trackers has {name!r}", "train.trackers", help_text)
    return {
        "compare": compare is not False,
        "trackers": tuple(dict.fromkeys(map(str, names))),
        "profile": _profile(reading),
    }


def _profile(reading: Reading) -> Steps | None:
    value = reading.get("train.profile")
    written = reading.origins.written("train.profile")
    if isinstance(value, int) and isinstance(written, Scalar) and ":" in written.text:
        message = f"YAML reads `{written.text}` as the number {value}"
        help_text = f'write it in quotes: "{written.text}"'
        reading.findings.error("yaml-retyped", message, written.span, help_text)
        return None
    try:
        steps, last = read_steps(value), reading.get("train.steps")
        if steps is not None and is_whole(last) and steps[0] > last:
            raise ValueError(f"the run has {last} steps")
        return steps
    except ValueError as error:
        reading.error("wrong-type", f"train.profile is {value!r}", "train.profile", str(error))
        return None


def read_steps(value: Any) -> Steps | None:
    """`3:5` is steps 3 to 5, `3` or 3 that step alone. Raises ValueError for anything else."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    found = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("it is a step, or the first and the last one: 3 or 3:5")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ValueError("steps count from 1, and the first is not behind the last")
    return first, last


def _check_keys(reading: Reading, known_here: tuple[str, ...]) -> None:
    """Report keys that nobody reads: a misspelt one that is passed over leaves its setting as it was.

    `train`, `launch` and its optimizer's `optim` are the recipe's own. Beside them a configuration may have keys
    that others of its keys name, so that there only what the command line adds is looked at.
    """
    written = str(OmegaConf.to_container(reading.config, resolve=False))
    sections = dict(SECTIONS)
    if reading.get("optim._target_") != OPTIMIZER:
        del sections["optim"]
    for name in map(str, reading.config):
        added = None if name in known_here else _added(reading, name)
        if added is not None and f"${{{name}" not in written:
            help_text = did_you_mean(name, known_here, "there are")
            reading.findings.error("unknown-key", f"there is no key {quoted(name)}", added, help_text)
    for section, known in sections.items():
        below = reading.get(section, resolve=False)
        for name in map(str, below if isinstance(below, dict) else ()):
            key = f"{section}.{name}"
            if name not in known and f"${{{key}" not in written:
                help_text = did_you_mean(name, known, f"{section} has")
                reading.unknown("unknown-key", f"there is no key {quoted(key)}", key, help_text)


def _added(reading: Reading, name: str) -> Span | None:
    """Where the command line has added a key of the root; None when it has not, or has chosen a file for it."""
    if any((folder / name).is_dir() for folder in reading.origins.folders):
        return None
    for override in reading.origins.overrides:
        key = override.partition("=")[0]
        bare = key.lstrip("+~")
        if bare == name or bare.startswith(f"{name}."):
            start = len(key) - len(bare) + 1
            return Span(f"<override {override}>", 1, start, start + len(name))
    return None


def _whole(least: int, most: int = 2**63 - 1) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and least <= value <= most


def _number(value: Any) -> bool:
    return (is_whole(value) or isinstance(value, float)) and math.isfinite(value) and value >= 0


def _seconds(value: Any) -> bool:
    return _number(value) and value > 0


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in words


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train.steps": (_whole(1), "a whole number from 1"),
    "train.seed": (_whole(0), "a whole number from 0"),
    "train.eval_every": (_whole(0), "a whole number of steps between evaluations, 0 for one at the end"),
    "train.eval_batches": (_whole(1), "a whole number from 1"),
    "train.checkpoint_every": (_whole(0), "a whole number of steps between checkpoints, 0 for none"),
    "train.keep_last": (_whole(1), "a whole number from 1"),
    "train.keep_every": (_whole(0), "a whole number of steps, 0 to keep the last ones only"),
    "train.check_every": (_whole(0), "a whole number of steps between looks at drift, 0 for none"),
    "train.on_nonfinite": (_one_of("stop", "skip"), "stop or skip"),
    "train.on_drift": (_one_of("stop", "warn"), "stop or warn"),
    "train.log_every": (_whole(0), "a whole number of steps between lines, 0 for none"),
    "optim.lr": (_number, "a number from 0"),
    "optim.warmup": (_whole(0), "a whole number of steps"),
    "optim.final_ratio": (_number, "a number from 0"),
    "launch.start_timeout": (_seconds, "a number of seconds"),
    "launch.collective_timeout": (_seconds, "a number of seconds"),
    "launch.max_cpu_ranks": (_whole(1), "a whole number from 1"),
    "launch.max_restarts": (_whole(0), "a whole number from 0"),
    "launch.stuck_after": (_number, "a number of seconds, 0 for never"),
    "launch.requeue_code": (_whole(1, 255), "an exit status from 1 to 255"),
    "launch.stop_grace": (_number, "a number of seconds, 0 for none"),
}
"""By key: whether a value is of use, and what would be."""

KEYS = (
    *("model", "parallel", "data", "optim", "hardware", "plan", "rules", "imports", "checks"),
    *("device", "dry_run", "world_size", "train", "launch"),
)
"""What the root configuration says."""

SECTIONS = {
    "train": (
        *("steps", "batch_size", "accumulate", "seq_len", "dtype", "seed", "clip"),
        *("eval_every", "eval_batches", "log_every"),
        *("pretrained", "save"),
        *("checkpoint_every", "checkpoint_dir", "keep_last", "keep_every", "resume"),
        *("check_every", "on_nonfinite", "on_drift"),
        *("compare", "trackers", "profile"),
    ),
    "launch": (
        *("start_timeout", "collective_timeout", "max_cpu_ranks"),
        *("max_restarts", "stuck_after", "stop_grace", "requeue_code"),
    ),
    "optim": ("_target_", "lr", "betas", "eps", "weight_decay", "fused", "warmup", "final_ratio"),
}
"""What the sections say that the recipe reads; `optim` where the optimizer is its own."""

OPTIMIZER = "parallelizer.optim.build_optimizer"
