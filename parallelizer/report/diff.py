"""Two plans side by side: what changes in shards, collectives and memory, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.hardware_device import hardware_device
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.step_time import step_time
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.diagnostics.units import size
from parallelizer.language.plan import Mesh
from parallelizer.report.figures import Change, Fields, Figures, changes, figures
from parallelizer.report.lock import number
from parallelizer.report.rows.time import compared, faster_of, shares_of_difference
from parallelizer.report.text.tables import Screen, width_of
from parallelizer.simulate.record.trace_classes import trace_classes
from parallelizer.simulate.time.predict import StepTime

IN_BYTES = ("bytes", "payload", "sent", "peak")
"""Fields whose values are bytes."""
WIDE = 80
"""Columns from which the two sides stand beside each other."""
HIDDEN = ("collectives by module",)
"""Sections that a table leaves out: the totals say it shorter."""


@dataclass(frozen=True)
class Side:
    """One of the two: its figures, and the time of its step, if it could be predicted."""

    figures: Figures
    time: StepTime | None = None


def side(text: str, config_dir: str | None = None) -> list[str]:
    """What one side of a comparison stands for, as overrides: `parallel=` a preset's name, `plan=` a plan's
    name or path, or overrides separated by commas."""
    if re.match(r"[+~]*[A-Za-z_][\w./@]*=", text):
        return split(text)
    folders = [Path(f) for f in (config_dir, config_folder()) if f]
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return [f"plan={quoted(text)}"]
    for group, key in (("parallel", "parallel"), ("plans", "plan")):
        if any((folder / group / f"{text}.yaml").is_file() for folder in folders):
            return [f"{key}={text}"]
    return [f"parallel={quoted(text)}"]  # whose diagnostic names what is near


def split(text: str) -> list[str]:
    """Overrides separated by commas, but not by those inside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        if char == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def quoted(text: str) -> str:
    """A value as Hydra's grammar takes it."""
    return (
        text
        if re.fullmatch(r"[\w./-]+", text)
        else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    )


def of_overrides(overrides: Sequence[str], config_dir: str | None, config_name: str, rank: int) -> Side:
    """Compose, compile, trace and price what some overrides ask for. Raises PlanError, as the first three do."""
    setup = from_config(*compose_config(overrides, config_dir, config_name))
    if added := hardware_device(setup):
        setup = from_config(*compose_config([*overrides, *added], config_dir, config_name))
    model = setup.build_model()
    program = setup.compile(model)
    check_rank(rank, setup.mesh)
    step = trace_classes(program, model, setup.recipe(), rank)
    return Side(figures(program, model, step, setup.workload), step_time(setup, step))


def check_rank(rank: int, mesh: Mesh) -> None:
    """Raise PlanError for a rank that the mesh has not got."""
    if not 0 <= rank < mesh.world_size:
        help_text = f"ranks are 0 to {mesh.world_size - 1}"
        raise PlanError(
            [
                Diagnostic(
                    "unknown-rank", f"there is no rank {rank} among {mesh.world_size:,}", None, help_text
                )
            ]
        )


def write(one: Side, other: Side, names: Sequence[str], stream: TextIO, *, width: int | None = None) -> None:
    """Print what changes from one to the other, a section a table. Colour and width follow the terminal."""
    console = Screen(file=stream, width=width_of(stream, width), highlight=False)
    before, after = one.figures, other.figures
    found = [c for c in changes(before, after) if c.section not in HIDDEN]
    sections = dict.fromkeys(name for name in (*before, *after) if name not in HIDDEN)
    for name in sections:
        own = [c for c in found if c.section == name]
        total = len({**before.get(name, {}), **after.get(name, {})})
        same = total - sum(c.number for c in own)
        console.print(Text(name, "bold"))
        if own:
            console.print(_table(own, names) if console.width >= WIDE else _list(own, names))
        if same or not total:
            console.print("  nothing on either side" if not total else f"  {same:,} the same")
        console.print()
    if one.time is not None and other.time is not None:
        console.print(Text("time", "bold"))
        for line in compared(one.time, other.time, names):
            console.print(Text(f"  {line}"))
        console.print()


def _list(found: Iterable[Change], names: Sequence[str]) -> Text:
    """The same without columns."""
    lines = [f"  {names[0]} -> {names[1]}"]
    for change in found:
        lines += [f"  {subject}" for subject in change.subjects]
        for field, before, after in _rows(change):
            values = " -> ".join("-" if v is None else _value(field, v) for v in (before, after))
            lines.append(f"    {_label(field)}{values}  {_ratio(field, before, after)}".rstrip())
    return Text("\n".join(lines))


def _table(found: Iterable[Change], names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", overflow="fold", ratio=4)
    for column in names:
        table.add_column(Text(column), overflow="fold", ratio=3)
    table.add_column("change", justify="right", no_wrap=True)
    for change in found:
        rows = _rows(change)
        cells = [
            (_cell(f, before), _cell(f, after), _ratio(f, before, after) or "-") for f, before, after in rows
        ]
        # What subjects share stands beside each of them, or that it does: a blank would read as nothing.
        beside = cells * len(change.subjects) if len(cells) == 1 else cells
        beside = beside + [("as above", "as above", "")] * (len(change.subjects) - len(beside))
        subjects = "\n".join(f"  {subject}" for subject in change.subjects)
        table.add_row(Text(subjects), *(Text("\n".join(column)) for column in zip(*beside, strict=True)))
    return table


def _cell(field: str, value: str | None) -> str:
    return "-" if value is None else f"{_label(field)}{_value(field, value)}"


def _label(field: str) -> str:
    return "" if field == "over" else f"{field} "


def _rows(change: Change) -> list[tuple[str, str | None, str | None]]:
    """(field, before, after) of what differs. Of what stands on one side only, one row."""
    before, after = change.before, change.after
    if before is None or after is None:
        field, value = _summary(before if after is None else after)
        return [(field, value if after is None else None, None if after is None else value)]
    return [(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]


def _summary(fields: Fields | None) -> tuple[str, str]:
    """The one field that says most of something that the other side has not got."""
    for name in ("sent", "local", "bytes"):
        if fields and name in fields:
            return name, fields[name]
    return next(iter((fields or {"": ""}).items()))


def _value(field: str, value: str) -> str:
    if field == "over":  # as the table of the plan: the dimension that an axis shards
        return value.replace("replicate", "-").replace("shard(", "").replace(")", "")
    return size(int(value)) if field in IN_BYTES and value.isdigit() else number(value)


def _ratio(field: str, before: str | None, after: str | None) -> str:
    """How much more or less, of bytes and calls."""
    if before is None or after is None:
        return "new" if before is None else "gone"
    if field not in (*IN_BYTES, "calls") or before == "0":
        return ""
    ratio = int(after) / int(before)
    if ratio >= 10:
        return f"x {ratio:,.0f}"
    return f"{ratio - 1:+.1%}" if abs(ratio - 1) < 0.01 else f"{ratio - 1:+.0%}"


def document(one: Side, other: Side, names: Sequence[str]) -> dict[str, Any]:
    """The comparison for scripts: paths are folded, values are as in a lock. `seconds` are the two predicted times, `faster`
    the side of more tokens a second on each device, and `causes` what it has less of, each as a share of the difference.
    """
    times = one.time, other.time
    faster, causes = None, list[tuple[str, float]]()
    if one.time is not None and other.time is not None:
        faster = faster_of(one.time, other.time)
        if faster is not None:
            slow, fast = (other.time, one.time) if faster == 0 else (one.time, other.time)
            causes = shares_of_difference(slow, fast)
    return {
        "sides": list(names),
        "changes": [
            {
                "section": c.section,
                "subjects": list(c.subjects),
                "before": _plain(c.before),
                "after": _plain(c.after),
            }
            for c in changes(one.figures, other.figures)
        ],
        "seconds": [None if time is None else time.seconds for time in times],
        "faster": None if faster is None else names[faster],
        "causes": [{"cause": cause, "share": share} for cause, share in causes],
    }


def _plain(fields: Fields | None) -> dict[str, Any] | None:
    return None if fields is None else {k: int(v) if v.isdigit() else v for k, v in fields.items()}
