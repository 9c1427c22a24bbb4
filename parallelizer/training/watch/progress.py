"""The progress of a run: a panel on a terminal, plain lines in a file."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live

from parallelizer.training.settings import Settings
from parallelizer.training.watch.live import View
from parallelizer.training.watch.memory import Memory

A_SECOND = 4
"""Times that the panel is drawn anew, also where a step takes minutes: the time to go runs on."""


class Progress:
    """Shows what rank 0 has measured, step by step; `quiet` for the others."""

    def __init__(
        self, settings: Settings, view: View, *, quiet: bool = False, console: Console | None = None
    ) -> None:
        self.settings, self.view, self.quiet = settings, view, quiet
        self.begun_behind = view.done
        self.console = console
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        console = self.console or Console()
        if console.is_terminal and not self.quiet and (self.console or sys.stdout.isatty()):
            # What is printed meanwhile goes above the panel.
            self.live = Live(self.view, console=console, refresh_per_second=A_SECOND)
            self.live.start()
        return self

    def step(self, measured: dict[str, float], memory: Memory | None = None) -> None:
        """Show one finished step."""
        self.view.step(measured, memory)
        if self.live is None and not self.quiet and self._is_due(int(measured["step"])):
            self._line(measured)

    def _line(self, measured: dict[str, float]) -> None:
        loss, rate = f"{measured['loss']:.4f}", f"{measured['tokens_per_second']:,.0f}"
        validation = (
            f"  validation {measured['validation_loss']:.4f}" if "validation_loss" in measured else ""
        )
        step = f"step {int(measured['step']):>{len(str(self.settings.steps))}}/{self.settings.steps}"
        print(
            f"{step}  loss {loss}  grad norm {measured['grad_norm']:.3f}  {rate} {self.view.unit}/s{validation}",
            flush=True,
        )

    def _is_due(self, step: int) -> bool:
        every = self.settings.log_every
        return bool(every) and (step % every == 0 or step in (self.begun_behind + 1, self.settings.steps))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.view.ended = True
            self.live.stop()


def show_cursor() -> None:
    """Give the terminal its cursor back, which a panel hides, and which a rank that was ended did not."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
