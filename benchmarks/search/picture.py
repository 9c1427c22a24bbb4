"""The picture of one search: the memory and the time of its candidates, as on the page of `search --html`."""

from __future__ import annotations

import re

from benchmarks.search.kept import uninterrupted
from parallelizer.propose.search.found import SearchResult
from parallelizer.propose.search.page import plot
from parallelizer.propose.search.run import Search
from parallelizer.propose.search.task import SearchTask, read_task

CASE = (
    "model=llama3_8b", "gpus=16", "hardware=h100", "train.seq_len=8192", "train.batch_size=32",
)  # fmt: skip
"""The search that docs/search.md begins with."""

STYLE = """<style>
svg { background: #fff } text { font: 12px sans-serif; fill: #666 } .axis { stroke: #bbb }
.limit { stroke: #c0392b; stroke-dasharray: 5 4 } .estimate { fill: #ccc } .fits { fill: #2a6fdb }
.large { fill: none; stroke: #c0392b } .edge { fill: none; stroke: #2a6fdb }
</style>"""


def picture(overrides: tuple[str, ...] = CASE) -> str:
    """The picture as SVG. The search takes a minute or two."""
    task = read_task(overrides, front=True)
    return drawn(uninterrupted(Search(task.base, lambda _: None).run(task)), task)


def drawn(found: SearchResult, task: SearchTask) -> str:
    """The plot of a search as a file of its own, whose points lead nowhere."""
    head, opened, rest = re.sub(r"</?a\b[^>]*>", "", str(plot(found, task))).partition("<svg")
    tag, closed, inside = rest.partition(">")
    return f'{head}{opened} xmlns="http://www.w3.org/2000/svg"{tag}{closed}{STYLE}{inside}\n'
