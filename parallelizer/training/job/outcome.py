"""The end of a run that fails: its messages, the files that it leaves, and its exit status.

Exit 1: the configuration is wrong, or a rank failed. 2: the command line does not parse. 130: Ctrl-C.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.override_mistakes import OverrideSyntaxError
from parallelizer.diagnostics import interrupts
from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.checkpoint.folder import name, steps_in
from parallelizer.runtime.launch.failures import LaunchError, failure_of
from parallelizer.runtime.launch.outside import outside_ranks
from parallelizer.training.job.recipe_file import RecipeFile
from parallelizer.training.watch.progress import show_cursor

PATIENCE = 10.0
"""Seconds that a rank other than 0 waits before it says what is wrong: mostly rank 0 says the same at that
moment, and the launcher then ends them all."""

BEHIND = 3.0
"""Seconds that a rank which has lost another waits before it says so: the one that ended first speaks first, and the
launcher mostly ends the others before they can."""


class LostError(LaunchError):
    """This rank goes on no further because another one has ended."""


@contextmanager
def rank_reported(rank: int, ranks: int, folder: Path) -> Iterator[None]:
    """Around what a rank does that joined others: raises LaunchError, with the traceback of what it does itself, where
    something fails, and LostError, a line, where another rank has ended. The whole traceback goes to `rank<k>.log`.
    """
    try:
        yield
    except (PlanError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        failure = failure_of(rank, error, 1, folder, __file__)
        whole = f"whole in {shown_path(folder / f'rank{rank}.log')}"
        if failure.lost:
            message = f"rank {rank} of {ranks} {failure.line}"
            raise LostError(
                message, f"the rank that ended first says why; this one's traceback is {whole}"
            ) from None
        text = f"rank {rank} of {ranks} {failure.line}\n\n{failure.text.rstrip()}\n"
        raise OwnError(text, f"its traceback is {whole}") from None


class OwnError(LaunchError):
    """What this rank has failed with by itself: it does not wait for others to say it."""


class JobFailed(Exception):
    """A job of a sweep has failed, and said why."""


@contextmanager
def job_reported(
    folder: Path | None, sweep: bool, kept: Path | None = None, command: str = ""
) -> Iterator[None]:
    """Around one job: say what is wrong, remove its output folder if nothing was trained in it, and exit. Of a run that is
    interrupted, which checkpoint in `kept` stands, and that `command` goes on from there.

    In a sweep JobFailed is raised instead, and Hydra goes on to the next job; but Ctrl-C ends the sweep.
    """
    try:
        yield
    except BaseException as error:
        show_cursor()
        if folder is not None:
            tidy(folder)
            # The logs of ranks that were ended on purpose say what they missed of each other.
            discard(
                folder, MADE_BY_HYDRA if isinstance(error, LaunchError) else (*MADE_BY_HYDRA, "rank*.log")
            )
        if isinstance(error, BrokenPipeError):
            sys.exit(interrupts.reader_gone())
        if not isinstance(error, PlanError | LaunchError | KeyboardInterrupt):
            raise
        status = _say(error)
        if isinstance(error, KeyboardInterrupt) and folder is not None and folder.exists():
            print(f"the measurements until then are in {folder}", file=sys.stderr)
            print(_goes_on(folder, kept or folder / "checkpoints", command), file=sys.stderr)
        if sweep and not isinstance(error, KeyboardInterrupt):
            raise JobFailed from None
        sys.exit(status)


def _goes_on(folder: Path, kept: Path, command: str) -> str:
    """Which checkpoint stands, and the command that goes on from it."""
    steps = steps_in(kept) if kept.is_dir() else []
    if not steps:
        return "no checkpoint was saved: train.checkpoint_every=N saves one every N steps"
    # A run of the same command has a folder of its own, unless it is told.
    where = f"hydra.run.dir={shlex.quote(shown_path(folder))}"
    again = command if "hydra.run.dir=" in command else f"{command} {where}"
    newest = shown_path(kept / name(steps[-1]))
    return f"the checkpoint of step {steps[-1]} is complete, {newest}; this command resumes from it:\n  python {again}"


@contextmanager
def command_reported(recipe: RecipeFile) -> Iterator[None]:
    """Around the command of a recipe: say what is wrong with the command line as `parallelizer validate` would, and exit."""
    in_full = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises then, instead of printing its own account
    try:
        yield
    except JobFailed:
        sys.exit(1)
    except (LaunchError, PlanError, KeyboardInterrupt) as error:
        sys.exit(_say(error))
    except (HydraException, OmegaConfBaseException) as error:
        if in_full:
            raise
        sys.exit(_say(_explained(error, recipe)))
    except OSError as error:
        if not _making_a_folder(error):
            raise
        reason = f"the output folder cannot be made: {error.filename}: {error.strerror}"
        sys.exit(_say(LaunchError(reason, "give another hydra.run.dir")))
    finally:
        for sweep in SweepFolder.seen:
            discard(sweep, made=["multirun.yaml"])


def _making_a_folder(error: OSError) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return error.filename is not None and bool(frames) and frames[-1].name in ("mkdir", "makedirs")


class SweepFolder(Callback):
    """Hydra's callback that notes the folders of sweeps, which are made even when no job can be composed."""

    seen: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **more: Any) -> None:
        self.seen.append(Path(config.hydra.sweep.dir))


MADE_BY_HYDRA = (".hydra", "train.log")
"""What Hydra puts into an output folder; what its log says has been on the terminal."""


def discard(folder: Path, made: Sequence[str] = MADE_BY_HYDRA) -> None:
    """Remove an output folder that holds only empty files and what is `made`, and the parents then empty.

    A folder with anything else in it is left alone: it may be older than this run. `made` are name patterns.
    """
    others = [p for p in folder.glob("*") if not any(p.match(pattern) for pattern in made)]
    if not folder.is_dir() or any(p.is_dir() or p.stat().st_size for p in others):
        return
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # at the first parent that is not empty
        for parent in folder.absolute().parents[:2]:
            parent.rmdir()


def tidy(folder: Path) -> None:
    """Remove the logs of ranks that had nothing to say from an output folder."""
    for log in folder.glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()


def status_of(end: SystemExit) -> int:
    """The exit status that an exit asks for."""
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _explained(error: Exception, recipe: RecipeFile) -> Exception:
    """Hydra's exception as the one that our own composition of the same command raises."""
    known = recipe.words(sys.argv)
    folders = recipe.folders(sys.argv)
    overrides = [word for word in known.rest if "=" in word.lstrip("-") or word.startswith("~")]
    jobs: Iterable[Sequence[str]]
    if isinstance(error, OverrideParseException):
        jobs = [overrides if error.override in overrides else [*overrides, error.override]]
    else:
        jobs = _jobs(overrides)
    try:
        for job in jobs:
            compose_config(job, folders, known.config_name)
    except (PlanError, OverrideSyntaxError) as explained:
        return explained
    return PlanError([Diagnostic("config-invalid", str(error).strip().split("\n")[0])])


def _jobs(overrides: Sequence[str]) -> Iterator[Sequence[str]]:
    """The overrides of each job, which are as many as a sweep has."""
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv):
        yield overrides
        return
    choices = []
    for text, override in zip(
        overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True
    ):
        values = override.sweep_string_iterator() if override.is_discrete_sweep() else ()
        choices.append([f"{override.get_key_element()}={value}" for value in values] or [text])
    yield from itertools.product(*choices)


def _say(error: BaseException) -> int:
    """Tell a person what went wrong. Returns the exit status."""
    try:
        return _told(error)
    except BrokenPipeError:
        return interrupts.reader_gone()


def _told(error: BaseException) -> int:
    if not isinstance(error, LostError | OwnError):
        _let_rank_0_speak()
    if isinstance(error, KeyboardInterrupt):
        print(
            "\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr
        )  # behind the echo of ^C
        return 130
    if isinstance(error, LostError):
        time.sleep(BEHIND)
    if isinstance(error, LaunchError):
        print(f"error: {error.message}", file=sys.stderr)
        if error.help:
            print(textwrap.indent(f"= help: {error.help}", "    ")[2:], file=sys.stderr)
        return 1
    if isinstance(error, OverrideSyntaxError):
        show_diagnostics.write([error.diagnostic], sys.stderr)
        return 2
    if isinstance(error, PlanError):
        show_diagnostics.write(error.diagnostics, sys.stderr)
    return 1


def _let_rank_0_speak() -> None:
    with suppress(LaunchError):
        outside = outside_ranks()
        if outside is not None and outside.rank > 0:
            time.sleep(PATIENCE)
            print(f"rank {outside.rank}:", file=sys.stderr)
