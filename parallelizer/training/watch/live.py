"""The live view of a run on a terminal: a panel that is redrawn in place, and stays at the end."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parallelizer.diagnostics.units import size
from parallelizer.training.watch.expert_load import ModuleLoad
from parallelizer.training.watch.memory import Memory

BARS = "▁▂▃▄▅▆▇█"
WIDEST = 100
"""Columns that the panel takes at most: beyond them lines are longer than an eye follows."""

RECENT = 20
"""Steps that the time to go is reckoned from. The first of a process is left out where there are others: it makes what
later ones find made.
"""

HISTORY = 4096
"""Losses that are kept for the curve."""

Cell = tuple[str, str]
"""A name and its value."""


@dataclass
class View:
    """What is known of a run that goes: `done` of `steps` steps, and what the last of them measured. `predicted` is the
    dry run's peak in bytes, `compared` the first step's peak and what was predicted for it; `load` is that of the module of
    experts that is loaded least evenly.
    """

    title: str
    steps: int
    unit: str = "tokens"
    done: int = 0
    predicted: int | None = None
    compared: tuple[int, int] | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    validation: float | None = None
    memory: Memory | None = None
    skipped: int = 0
    load: ModuleLoad | None = None
    saved: int | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    ended: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.begun = self.last = self.clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._first = True

    def step(self, measured: Mapping[str, float], memory: Memory | None = None) -> None:
        """A step has ended."""
        now = self.clock()
        if self._first and self._seconds:
            self._seconds.clear()
            self._first = False
        self._seconds.append(now - self.last)
        self.last = now
        self.measured, self.memory = measured, memory
        self.done = int(measured["step"])
        self.losses.append(measured["loss"])
        self.validation = measured.get("validation_loss", self.validation)

    @property
    def seconds(self) -> float | None:
        """How long a step takes: the median of the last ones, evaluation and saving on average included."""
        return statistics.fmean(self._seconds) if self._seconds else None

    def to_go(self) -> float | None:
        """Seconds until the last step has ended."""
        each = self.seconds
        if each is None:
            return None
        return max(0.0, (self.steps - self.done) * each - (0.0 if self.ended else self.clock() - self.last))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        inner = width - 4
        columns = 3 if inner >= THREE else 2
        rows: list[Table | Text] = [self._bar(inner), self._loss(inner)]
        if self.load is not None:
            rows += [
                _load("experts", self.load.experts, self.load.busiest, inner),
                _load("ranks", self.load.ranks, self.load.busiest_rank, inner),
            ]
        for cells in self._lines(columns):
            rows.append(Text("").join(_cell(cell, inner // columns) for cell in cells))
        body = Table.grid(padding=0)
        body.add_column(width=inner, no_wrap=True, overflow="crop")
        for row in rows:
            body.add_row(row)
        yield Panel(body, title=Text(self.title, "bold"), width=width, border_style="dim", padding=(0, 1))

    def _bar(self, width: int) -> Table:
        to_go = self.to_go()
        passed = (self.last if self.ended else self.clock()) - self.begun
        left = _cell(("step", f"{self.done}/{self.steps}"))
        right = Text.assemble(
            f"{self.done / self.steps:4.0%}  {duration(passed)}", ("  ETA ", "dim"), (duration(to_go), "bold")
        )
        bar = ProgressBar(self.steps, self.done, width=max(4, width - left.cell_len - right.cell_len - 4))
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(left, bar, right)
        return row

    def _loss(self, width: int) -> Text:
        cell = _cell(("loss", _number(self.measured.get("loss"), "{:.4f}")))
        curve = sparkline(self.losses, width - cell.cell_len - 2)
        return Text.assemble(cell, "  ", (curve, "cyan"))

    def _lines(self, columns: int) -> list[list[Cell]]:
        m = self.measured
        norm = ("grad norm", _number(m.get("grad_norm"), "{:.3f}"))
        rate = ("lr", _number(m.get("lr"), "{:.2e}"))
        speed = (f"{self.unit}/s", _number(m.get("tokens_per_second"), "{:,.0f}"))
        each = ("s a step", _number(self.seconds, "{:.3g}"))
        held = self._memory()
        reserved = self.memory.reserved if self.memory is not None else None
        mfu = [("MFU", f"{m['mfu']:.1%}")] if "mfu" in m else []
        validation = [("validation", f"{self.validation:.4f}")] if self.validation is not None else []
        more = [("reserved", size(reserved))] if reserved is not None else []
        more += [("saved", f"step {self.saved}")] if self.saved is not None else []
        more += [("left out", f"{self.skipped} not finite")] if self.skipped else []
        if columns == 3:
            groups = [[norm, rate, *validation], [speed, each, *mfu], held, more]
            return [group for group in groups if group]
        flow = [norm, rate, speed, each, *held[1:], *held[:1], *mfu, *validation, *more]
        return [flow[i : i + columns] for i in range(0, len(flow), columns)]

    def _memory(self) -> list[Cell]:
        """What is in use, beside what the dry run says of the same."""
        if self.memory is None:
            return []
        if not self.memory.whole:
            cells = [("memory", size(self.memory.now)), ("peak", size(self.memory.peak))]
            return [*cells, ("predicted", size(self.predicted))] if self.predicted is not None else cells
        process = ("process", size(self.memory.now))
        if self.compared is None:
            return [process]
        peak, predicted = self.compared
        return [process, ("first peak", size(peak)), ("predicted", size(predicted))]


LABEL = 12
"""Columns of a name."""

THREE = 80
"""Columns from which on three cells stand side by side."""


def _cell(cell: Cell, width: int = 0) -> Text:
    name, value = cell
    text = Text.assemble((f"{name:<{LABEL}}", "dim"), (value, "bold"), no_wrap=True)
    text.pad_right(max(0, width - text.cell_len))
    return text


def _load(name: str, rows: Sequence[int], busiest: float, width: int) -> Text:
    """How many rows of tokens each has, as bars from 0, and the busiest over the mean."""
    cell = _cell((name, f"{busiest:.2f} of mean"))
    few = sparkline([0, *rows], width - cell.cell_len - 2)[1:]
    return Text.assemble(cell, "  ", (few, "cyan"))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of some values in one line, each character the mean of as many as it takes; what is not finite is left
    out. Empty for none.
    """
    known = [v for v in values if math.isfinite(v)]
    if not known or width < 1:
        return ""
    if len(known) > width:
        edges = [round(i * len(known) / width) for i in range(width + 1)]
        known = [statistics.fmean(known[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((v - low) / span * len(BARS)))] for v in known)


def duration(seconds: float | None) -> str:
    """`0:07`, `12:03`, `1:02:03`, `3 d 04:05`; `-` for what is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
