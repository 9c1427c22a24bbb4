"""What a person sees of a run: a bar on a terminal, plain lines in a file, and the summary at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from recipes.data import Data

if TYPE_CHECKING:
    from recipes.train import Result


class Progress:
    """Loss, tokens a second and time to go. Silent on ranks other than 0."""

    def __init__(self, settings: dict[str, Any], quiet: bool) -> None:
        self.settings, self.quiet = settings, quiet
        self.terminal = sys.stdout.isatty() and not quiet
        self.bar: Bar | None = None

    @classmethod
    def on_rank_0(cls, settings: dict[str, Any], data: Data, folder: Path | None) -> Progress:
        return cls(settings, quiet=dist.get_rank() != 0)

    def __enter__(self) -> Progress:
        if self.terminal:
            self.bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn(
                    "loss {task.fields[loss]}  {task.fields[rate]} tokens/s  {task.fields[validation]}"
                ),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self.bar.start()
            self.task = self.bar.add_task(
                "", total=self.settings["steps"], loss="...", rate="...", validation=""
            )
        return self

    def step(self, measured: dict[str, float]) -> None:
        """Show one finished step."""
        validation = f"validation {measured['validation_loss']:.4f}" if "validation_loss" in measured else ""
        if self.bar:
            fields = {"loss": f"{measured['loss']:.4f}", "rate": f"{measured['tokens_per_second']:,.0f}"}
            if validation:
                fields["validation"] = validation
            self.bar.update(self.task, advance=1, **fields)  # type: ignore[arg-type]
        elif not self.quiet and self.settings["log_every"]:
            step, total = int(measured["step"]), self.settings["steps"]
            if step % self.settings["log_every"] == 0 or step in (1, total):
                print(
                    f"step {step:>{len(str(total))}}/{total}  loss {measured['loss']:.4f}  "
                    f"grad norm {measured['grad_norm']:.3f}  "
                    f"{measured['tokens_per_second']:,.0f} tokens/s  {validation}".rstrip(),
                    flush=True,
                )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()


def summary(result: Result, folder: Path) -> None:
    """The last lines of a run."""
    verdict = "below" if result.validation_loss < result.unigram_entropy else "not yet below"
    try:
        shown = folder.relative_to(Path.cwd())
    except ValueError:
        shown = folder
    print(
        f"\ntrained {len(result.losses)} steps in {result.seconds:.1f} s: "
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}\n"
        f"validation loss {result.validation_loss:.4f}, {verdict} the unigram entropy of that text, {result.unigram_entropy:.4f} "
        f"(nats a byte)\noutputs in {shown}"
    )
