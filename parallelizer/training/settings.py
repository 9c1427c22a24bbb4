"""The configuration keys of a training, in one table; checked before a rank starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from parallelizer.configuration.origins import Origins
from parallelizer.configuration.reading import Reading, is_whole
from parallelizer.diagnostics.diagnostic import PlanError, Span, quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.language.yaml_nodes import Scalar
from parallelizer.training.keys import (
    Key,
    Kind,
    defaulted,
    folder,
    key,
    keys_of,
    number,
    one_of,
    optional,
    read,
    seconds,
    seconds_or_0,
    share,
    text,
    truth,
    whole,
)
from parallelizer.training.trackers import TRACKERS

SCHEDULES = ("cosine", "linear", "wsd", "constant")
"""What `parallelizer.optim.learning_rate` computes. That file imports torch, and `validate --quick` reads this one."""

Steps = tuple[int, int]
"""The first and the last step, from 1."""


def read_settings(config: DictConfig, origins: Origins) -> Settings:
    """Settings of a composed configuration. Raises PlanError with every value that is of no use."""
    reading = Reading(config, origins)
    found = read(reading, Settings)
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return Settings(**found)


def check(reading: Reading, more_keys: tuple[str, ...] = ()) -> None:
    """Report every value of a run's keys that is of no use, and every key that neither it nor, with `more_keys` at the
    root, its caller reads.

    The configuration's `checks` names it, so that `parallelizer validate` says the same as a run would.
    """
    read(reading, Settings)
    _check_keys(reading, (*ROOT_KEYS, *more_keys))


def _read_trackers(reading: Reading, one: Key) -> tuple[str, ...]:
    """The names of trackers, each once."""
    value = reading.get(one.name)
    names = value if isinstance(value, list) else [value] * (value is not None)
    for name in names:
        if name not in TRACKERS:
            help_text = did_you_mean(str(name), list(TRACKERS), "there are")
            reading.error("wrong-type", f"{one.name} has {name!r}", one.name, help_text)
    return tuple(dict.fromkeys(map(str, names)))


def _read_profile(reading: Reading, one: Key) -> Steps | None:
    value, written = reading.get(one.name), reading.origins.written(one.name)
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
        reading.error("wrong-type", f"{one.name} is {value!r}", one.name, str(error))
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
        raise ValueError("steps count from 1, and the first must not be after the last")
    return first, last


_trackers = Kind(f"a list of names: {', '.join(TRACKERS)}", _read_trackers)
_profile = Kind("a step, or the first and the last one, or null", _read_profile)


train, launch, optim = (partial(key, section) for section in ("train", "launch", "optim"))


# fmt: off
@dataclass(frozen=True)
class Settings:
    """The keys of a training run, with the shipped defaults. Timeouts are in seconds."""

    steps: int = train(60, whole(1), "steps of the optimizer")
    seed: int = train(0, whole(0), "the seed of initial values and of the order of the data")
    eval_every: int = train(0, whole(0), "steps between evaluations; 0: one, at the end")
    eval_batches: int = train(4, whole(1), "held-out batches in an evaluation")
    log_every: int = train(1, whole(0), "steps between lines if there is no live view; 0: none")
    pretrained: bool = train(
        True, optional(truth), "with model=hf, start from the pretrained weights of model.name, if it has any")
    save: str | None = train(
        None, optional(folder), "a new folder for the trained model, which from_pretrained of transformers can load")
    checkpoint_every: int = train(0, whole(0), "steps between checkpoints; 0: none, except when a scheduler stops the run")
    checkpoint_dir: str | None = train(
        None, optional(folder), "the folder of checkpoints; null: `checkpoints` in the output folder, hydra.run.dir")
    keep_last: int = train(3, whole(1), "the number of newest checkpoints that are kept")
    keep_every: int = train(0, whole(0), "also keep the checkpoints of every so many steps; 0: keep no others")
    resume: str = train("auto", optional(text),
        "auto: the newest checkpoint in checkpoint_dir, if there is one; never; or a folder: a checkpoint, or a run's")
    check_every: int = train(100, whole(0), "steps between checks that ranks hold the same values where they should; 0: none")
    on_drift: str = train(
        "auto", one_of("auto", "stop", "warn"),
        "what to do when these values differ: stop, or warn and continue; auto: stop on CPUs and warn on GPUs")
    on_nonfinite: str = train("stop", one_of("stop", "skip"),
        "what to do at a step whose loss or gradients are not finite: stop, or skip it with a warning")
    deterministic: bool = train(False, defaulted(truth),
        "let torch use only kernels that always give the same result, which are slower on GPUs; others raise an error")
    compare: bool = train(
        True, optional(truth), "compare the first step with the dry run: collectives, and the peak of memory")
    write_routing: str | None = train(
        None, optional(text), "a file for what the first step counted of the tokens of experts; a preset's routing takes it")
    prove: str = train("auto", one_of("auto", "always", "never"),
        "without a certificate: auto proves the tiny form first if that is quick, always refuses the run, never "
        "trains without a proof")
    proofs: str = train(".parallelizer/proofs", folder, "the folder of certificates")
    trackers: tuple[str, ...] = train((), _trackers, "trackers in addition to metrics.jsonl: tensorboard, wandb")
    profile: tuple[int, int] | None = train(None, _profile, 'steps that torch\'s profiler records: "3:5", or 3')

    start_timeout: float = launch(120, seconds, "seconds until every rank must have joined the others")
    collective_timeout: float = launch(600, seconds, "seconds after which a collective that hangs is an error")
    max_cpu_ranks: int | None = launch(
        None, optional(whole(1)), "the most processes on one machine; null: 64, fewer on a machine of fewer than 8 cores")
    max_restarts: int = launch(
        100, whole(0), "how often failed ranks are started again, from the last checkpoint")
    stuck_after: float = launch(
        300, seconds_or_0, "seconds without a finished step until the ranks that are behind are printed; 0: never")
    stop_grace: float = launch(60, seconds_or_0, "seconds to save a checkpoint after SIGTERM or SIGUSR1; 0: none")
    requeue_code: int = launch(75, whole(1, 255),
        "the exit status after SIGTERM or SIGUSR1, at which the scheduler starts the job again")

    lr: float = optim(2e-3, number, "the peak of the learning rate, after the warm-up")
    warmup: int = optim(10, whole(0), "steps to the peak")
    final_ratio: float = optim(0.1, number, "the learning rate of the last step, as a share of the peak")
    schedule: str = optim("cosine", defaulted(one_of(*SCHEDULES)),
        "how the learning rate falls after the warm-up; wsd: linearly over the last steps; constant: not at all")
    decay: float = optim(
        0.2, defaulted(share), "for schedule wsd: the share of all steps, at the end, in which the learning rate falls")


READ_ELSEWHERE = (
    Key("plan", "${model.plan}", Kind("a name or a path"), "a name (plans/<name>.yaml along the search path) or a path"),
    Key("rules", [], Kind("a list of rules"),
        "rules after all others, from the command line: 'rules=[\"layers.*: checkpoint\"]'"),
    Key("imports", [], Kind("a list of modules"), "modules that register your own styles"),
    Key("checks", ["parallelizer.training.settings.check"], Kind("a list of functions"),
        "functions that check the composed configuration before anything runs"),
    Key("device", "auto", Kind("auto, cpu or cuda"), "auto, cpu, cuda"),
    Key("dry_run", False, Kind("true or false"), "print the plan and stop"),
    Key("world_size", None, Kind("a whole number from 1, or null"),
        "the number of ranks that the mesh must have; an axis of -1 takes the remaining factor"),
    Key("train.batch_size", 16, Kind("a whole number from 1"), "sequences in the global batch"),
    Key("train.accumulate", 1, Kind("a whole number from 1"), "parts of the batch over which gradients are accumulated"),
    Key("train.seq_len", 256, Kind("a whole number from 1"), "tokens of a sequence"),
    Key("train.dtype", "auto", Kind("auto, or a floating-point type of torch"),
        "the dtype of parameters in forward and backward; auto: bfloat16 on GPUs, float32 on CPUs; master weights stay float32"),
    Key("train.clip", 1.0, Kind("a positive number, or null"),
        "the largest gradient norm, above which gradients are scaled down; null: none"),
    Key("optim._target_", "parallelizer.optim.build_optimizer", Kind("the dotted path of a function or a class"),
        "a function of the model and this config, or a class of optimizers"),
    Key("optim.betas", [0.9, 0.95], Kind("two numbers from 0, below 1"), "of AdamW"),
    Key("optim.eps", 1e-8, Kind("a number from 0"), "of AdamW"),
    Key("optim.weight_decay", 0.1, Kind("a number from 0"), "of matrices; norms are not decayed"),
    Key("optim.fused", "auto", Kind("auto, true or false"),
        "auto: one kernel for all parameters if the device has one; true; false"),
)
"""Keys beside them: those that every command reads, and those of the shipped optimizer."""
# fmt: on

KEYS = (*READ_ELSEWHERE, *keys_of(Settings))
"""All keys of a training's root configuration, its groups `model`, `parallel`, `data` and `hardware` left out."""

ROOT_KEYS = (
    *("model", "parallel", "data", "optim", "hardware", "train", "launch"),
    *(one.name for one in KEYS if not one.section),
)
"""What the root configuration says."""

SECTIONS = {
    section: tuple(one.name.removeprefix(f"{section}.") for one in KEYS if one.section == section)
    for section in ("train", "launch", "optim")
}
"""What the sections say that a training reads; `optim` where the optimizer is the shipped one."""

OPTIMIZER = next(one.default for one in KEYS if one.name == "optim._target_")


def _check_keys(reading: Reading, known_here: tuple[str, ...]) -> None:
    """Report unknown keys: a misspelt key that is ignored leaves its setting unchanged.

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
            one = f"{section}.{name}"
            if name not in known and f"${{{one}" not in written:
                help_text = did_you_mean(name, known, f"{section} has")
                reading.unknown("unknown-key", f"there is no key {quoted(one)}", one, help_text)


def _added(reading: Reading, name: str) -> Span | None:
    """Where the command line has added a key of the root; None when it has not, or has chosen a file for it."""
    if any((folder / name).is_dir() for folder in reading.origins.folders):
        return None
    for override in reading.origins.overrides:
        typed = override.partition("=")[0]
        bare = typed.lstrip("+~")
        if bare == name or bare.startswith(f"{name}."):
            start = len(typed) - len(bare) + 1
            return Span(f"<override {override}>", 1, start, start + len(name))
    return None
