"""What a person sees of a run: a bar on a terminal, plain lines in a file, and the summary at the end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from parallelizer.checkpoint.folder import step_of
from recipes.result import Result
from recipes.settings import Settings

WIDE = 90
"""Columns from which on there is room for a bar, and for the time that has passed."""


class Progress:
    """Loss, tokens a second and time to go."""

    def __init__(self, settings: Settings, *, quiet: bool, unit: str = "tokens", done: int = 0) -> None:
        self.settings, self.quiet, self.unit, self.done = settings, quiet, unit, done
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        if sys.stdout.isatty() and not self.quiet:
            console = Console()
            wide = console.width >= WIDE
            self.bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                *([BarColumn()] if wide else []),
                TextColumn(
                    f"loss {{task.fields[loss]}}  {{task.fields[rate]}} {self.unit}/s{{task.fields[validation]}}"
                ),
                *([TimeElapsedColumn()] if wide else []),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
            )
            self.bar.start()
            self.task = self.bar.add_task(
                "", total=self.settings.steps, completed=self.done, loss="...", rate="...", validation=""
            )
        return self

    def step(self, measured: dict[str, float]) -> None:
        """Show one finished step."""
        loss, rate = f"{measured['loss']:.4f}", f"{measured['tokens_per_second']:,.0f}"
        validation = (
            f"  validation {measured['validation_loss']:.4f}" if "validation_loss" in measured else ""
        )
        if self.bar:
            shown = {"loss": loss, "rate": rate} | ({"validation": validation} if validation else {})
            self.bar.update(self.task, advance=1, **shown)  # type: ignore[arg-type]
        elif not self.quiet and self._is_due(int(measured["step"])):
            step = f"step {int(measured['step']):>{len(str(self.settings.steps))}}/{self.settings.steps}"
            print(
                f"{step}  loss {loss}  grad norm {measured['grad_norm']:.3f}  {rate} {self.unit}/s{validation}",
                flush=True,
            )

    def _is_due(self, step: int) -> bool:
        every = self.settings.log_every
        return bool(every) and (step % every == 0 or step in (self.done + 1, self.settings.steps))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()


def show_cursor() -> None:
    """Give the terminal its cursor back, which a bar hides, and which a rank that was ended did not."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


def summary(result: Result, folder: Path) -> None:
    """The last lines of a run."""
    print(f"\n{_trained(result)}")
    if result.stopped:
        print(_stopped(result))
    if result.unwritten:
        last = (
            "and there is no other"
            if result.checkpoint is None
            else f"the last is {shown(result.checkpoint)}"
        )
        print(f"{result.unwritten} checkpoint{'s' * (result.unwritten > 1)} could not be written; {last}")
    if result.validation_loss is not None:
        baseline = result.baseline
        verdict = "below" if result.validation_loss < baseline.loss else "not yet below"
        print(
            f"validation loss {result.validation_loss:.4f}, {verdict} {baseline.name}, "
            f"{baseline.loss:.4f} ({baseline.unit})"
        )
    print(f"outputs in {shown(folder)}")


def shown(path: Path) -> Path:
    """A path as a person would type it from here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _trained(result: Result) -> str:
    if not result.losses:
        return f"no step was left to train: all {result.first} are done"
    behind = f" behind step {result.first}" if result.first else ""
    return (
        f"trained {len(result.losses)} step{'s' if len(result.losses) > 1 else ''}{behind} in {result.seconds:.1f} s: "
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
    )


def _stopped(result: Result) -> str:
    name = signal.Signals(result.stopped).name
    done = result.first + len(result.losses)
    if result.checkpoint is None or step_of(result.checkpoint) != done:
        return f"stopped by {name} behind step {done}, which could not be saved"
    return f"stopped by {name} behind step {done}, saved in {shown(result.checkpoint)}: the same command goes on from there"
