"""Draws the pictures of docs/pipelines.md from the orders that ranks run: `python docs/pictures/schedules.py`."""

from __future__ import annotations

from pathlib import Path

from parallelizer.language.pipeline.all_schedules import SCHEDULES
from parallelizer.language.pipeline.replay import ActionCosts, replay
from parallelizer.language.pipeline.settings import Pipeline, order_of
from parallelizer.report.html.schedule import timeline

HERE = Path(__file__).resolve().parent
RANKS, MICROBATCHES = 4, 8
PIXELS = 12
"""For half the forward of one microbatch on a rank, the shortest action of two stages a rank, in every picture."""

INK = "svg{color:#1f2933}@media (prefers-color-scheme:dark){svg{color:#e4e8ec}}"
"""The colour of words and, faintly, of waits, by the reader's light or dark side."""


def drawn(name: str) -> str:
    """The SVG of one schedule, in which the layers of a rank take the same time in every picture."""
    pipeline = Pipeline(name, MICROBATCHES).settled(RANKS)
    stages = pipeline.stages_per_rank or 1
    costs = ActionCosts.equal(RANKS * stages, 2 / stages, 2 / stages, 2 / stages)
    svg = timeline(replay(order_of(pipeline, RANKS), costs), PIXELS, xmlns="http://www.w3.org/2000/svg")
    return svg.replace("<style>", f"<style>{INK}", 1) + "\n"


if __name__ == "__main__":
    for schedule in SCHEDULES:
        (HERE / f"schedule-{schedule}.svg").write_text(drawn(schedule))
