"""The table: of each kind of axes, how many right plans are accepted and how many wrong ones refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS: Mapping[str, Sequence[str]] = {
    "data axes": ("fsdp2", "hsdp2x2"),
    "tp": ("tp2",),
    "fsdp, tp": ("fsdp2_tp2",),
    "cp": ("cp2",),
    "cp, tp": ("cp2_tp2",),
}

KNOWN: Mapping[str, frozenset[str]] = {"validate": frozenset(), "verify": frozenset()}
"""The cases that each command takes for what they are not, and which the pages name."""

COMMANDS = ("static", "validate", "verify")
"""`static` is `validate` without a proof."""

Record = Mapping[str, Any]


def table(records: Iterable[Record]) -> str:
    """Counts by axes, then by name every case that a command takes for what it is not."""
    records = list(records)
    kinds = {**KINDS, "all": tuple(p for presets in KINDS.values() for p in presets)}
    lines = [
        "| axes | right | accepted without a proof | by validate | proven by verify | wrong | refused without a proof"
        " | by validate | not proven by verify | by neither |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, presets in kinds.items():
        own = [r for r in records if r["preset"] in presets]
        right = [r for r in own if r["expected"] == "right"]
        wrong = [r for r in own if r["expected"] != "right"]
        cells = [
            len(right), *(_count(right, command, True) for command in COMMANDS),
            len(wrong), *(_count(wrong, command, False) for command in COMMANDS),
            sum(bool(_accepted(r, "validate") and _accepted(r, "verify")) for r in wrong),
        ]  # fmt: skip
        lines.append(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
    disputed = [r for r in records if r["verdict"] not in (None, r["expected"])]
    lines += _listed("judged otherwise than expected", disputed, lambda r: f"{r['verdict']}, {r['error']}")
    for command in COMMANDS:
        for expected, accepted, title in (
            ("right", False, f"right plans that {command} refuses"),
            ("wrong", True, f"wrong plans that {command} accepts"),
            ("fails", True, f"plans that fail at the start and {command} accepts"),
        ):
            of = [r for r in records if r["expected"] == expected and _accepted(r, command) is accepted]
            lines += _listed(
                title, of, lambda r, c=command, a=accepted: r["why"] or r["error"] if a else r[c]["said"]
            )
    return "\n".join(lines)


def unlisted(records: Iterable[Record]) -> list[str]:
    """The cases that `validate` or `verify` takes for what they are not, and that are not known for it."""
    return [
        f"{record['name']} ({command})"
        for record in records
        for command, known in KNOWN.items()
        if _accepted(record, command) is (record["expected"] != "right") and record["name"] not in known
    ]


def _accepted(record: Record, command: str) -> bool | None:
    answer = record[command]
    return None if answer is None else answer["accepted"]


def _count(records: Sequence[Record], command: str, accepted: bool) -> int | str:
    asked = [r for r in records if r[command] is not None]
    count = sum(_accepted(r, command) is accepted for r in asked)
    return count if len(asked) == len(records) else f"{count} of {len(asked)} asked"


def _listed(title: str, records: Sequence[Record], said: Any) -> list[str]:
    if not records:
        return []
    return ["", f"{title} ({len(records)}):", *(f"  {r['name']}: {said(r)}" for r in records)]
