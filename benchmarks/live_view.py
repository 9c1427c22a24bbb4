"""A picture of the live view, drawn from a real run; what it costs a step; what the comparison of step 1 costs.

    python benchmarks/live_view.py --svg docs/live.svg
    python benchmarks/live_view.py --overhead [--draws 500]
    python benchmarks/live_view.py --comparison [key=value ...]

The picture is the panel as rank 0 leaves it behind, and what the run says around it, recorded by rich's console and
exported by it. `--overhead` is the processor time that drawing it takes, `--comparison` how long the checks before a run
take with and without the dry run of a step.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.live import Live

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.validate import validated
from parallelizer.runtime.launch import launcher as launch
from parallelizer.training.job.job import Job
from parallelizer.training.job.prepare import prepare
from parallelizer.training.job.run import started
from parallelizer.training.watch import reporting
from parallelizer.training.watch.forecast import Forecast, forecast_of
from parallelizer.training.watch.live import View
from parallelizer.training.watch.memory import memory
from parallelizer.training.watch.progress import A_SECOND, Progress
from parallelizer.training.watch.summary import summary
from recipes.train import train

WIDTH = 100
RUN = ("parallel=fsdp2_tp2", "train.eval_every=20", "train.checkpoint_every=20", "device=cpu")


def run(*overrides: str, progress: type[Progress], folder: Path) -> Any:
    """A run as the command makes it, whose rank 0 shows itself by `progress`; its result."""
    reporting.Progress = progress  # type: ignore[misc]  # ranks are forked from here
    job = prepare(*compose_config(overrides), folder)
    object.__setattr__(job, "forecast", expected(job))
    ranks = job.setup.mesh.world_size
    return launch.start(started, (train, job), ranks=ranks, device="cpu", log_dir=folder)[0]


def expected(job: Job) -> Forecast:
    """What the command expects of a run, behind the checks that it makes."""
    model = job.setup.build_model()
    validation = validated(job.setup, job.program, model)
    return forecast_of(job.setup, job.program, model, job.settings, validation)


def picture(path: Path, overrides: list[str]) -> None:
    """Run, and export what rank 0's console has shown, with the last panel once, to an SVG."""

    class Recorded(Progress):
        """The panel of a terminal of so many columns, kept."""

        def __init__(self, settings: Any, view: View, *, quiet: bool = False) -> None:
            console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system="truecolor")
            super().__init__(settings, view, quiet=quiet, console=console)

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            if not self.quiet and error[0] is None:
                recorder = Console(file=io.StringIO(), width=WIDTH, record=True, force_terminal=True)
                recorder.print("[green]$[/] python -m recipes.train " + " ".join(overrides), highlight=False)
                # What was printed while it was shown: above it, as on the terminal.
                for line in said(self.console):
                    recorder.print(line, highlight=False)
                recorder.print(self.view)
                recorder.save_svg(str(path), title="python -m recipes.train")

    with tempfile.TemporaryDirectory() as name:
        result = run(*overrides, progress=Recorded, folder=Path(name))
        summary(result, Path(name))


def said(console: Console | None) -> list[str]:
    """What step 1 said of itself above the panel."""
    text = console.file.getvalue() if console is not None and isinstance(console.file, io.StringIO) else ""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line.rstrip() for line in re.findall(r"step 1:[^\n]*", plain)][:1]


def overhead(draws: int) -> None:
    """Processor time to draw the panel once, and what that is of a core as often as it is drawn."""
    for width in (100, 60):
        view = View("llama on cp=2 x tp=8", 10_000, predicted=1 << 30)
        for step in range(1, 2001):
            measured = {
                "step": step,
                "loss": 1 / step,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens_per_second": 1e4,
            }
            view.step(measured, memory(torch.device("cpu")))
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        with Live(view, console=console, auto_refresh=False) as live:
            begun = time.process_time()
            for _ in range(draws):
                live.refresh()
            each = (time.process_time() - begun) / draws
        print(
            f"{width} columns: {each * 1e3:.2f} ms to draw, {A_SECOND} times a second: {A_SECOND * each:.1%} of a core"
        )
    begun = time.process_time()
    for step in range(2001, 4001):
        view.step({**measured, "step": step}, memory(torch.device("cpu")))
    print(f"{(time.process_time() - begun) / 2000 * 1e6:.0f} us a step to note what was measured")


def comparison(cases: list[list[str]]) -> None:
    """What `train.compare` adds to the checks before a run."""
    for words in cases:
        seconds = {}
        for compare in (False, True):
            job = prepare(
                *compose_config([*words, f"train.compare={str(compare).lower()}", "dry_run=true"]), None
            )
            begun = time.monotonic()
            forecast = expected(job)
            seconds[compare] = time.monotonic() - begun
        count = len(forecast.planned.ledger) if forecast.planned else 0
        shown = " ".join(words) or "parallel=single"
        print(
            f"{shown}: checks {seconds[False]:.1f} s, with the dry run {seconds[True]:.1f} s; "
            f"{count:,} collectives",
            flush=True,
        )


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--comparison", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument(
        "overrides",
        nargs="*",
        help=f"of the run in the picture ({' '.join(RUN)}), or of the one that is compared (six)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.svg is not None:
        picture(options.svg, options.overrides or [*RUN, f"train.steps={options.steps}"])
    if options.overhead:
        overhead(options.draws)
    if options.comparison:
        large = ["train.seq_len=8192", "train.batch_size=1024"]
        comparison([options.overrides] if options.overrides else [
            [], ["parallel=tp2"], ["parallel=fsdp2_tp2"], ["parallel=tp8_cp2"],
            ["model=llama3_8b", "parallel=fsdp8_tp8"],
            ["model=llama3_405b", "parallel=fsdp1024_cp2_tp8", *large],
        ])  # fmt: skip


if __name__ == "__main__":
    main()
