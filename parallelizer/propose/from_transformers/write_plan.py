"""A proposal as the text of a plan file that a person may keep: aligned, in sections, with where each line came from."""

from __future__ import annotations

from collections.abc import Sequence

from parallelizer.propose.from_transformers.proposal import (
    CONTEXT,
    DATA,
    SUMMED,
    TRANSLATED,
    WHOLE,
    Line,
    Proposal,
)

WIDTH = 120
"""The columns of a line."""

ROOM = 26
"""The columns that a comment needs."""

SECTIONS = {
    TRANSLATED: "tp_plan: behind each rule stands transformers' string; (added) to every plan, by transformers itself.",
    WHOLE: "Ours: what no entry names lies whole on every rank, with one gradient; as DTensors, like everything else.",
    SUMMED: "Ours: no entry names these, and each rank's gradient is a part, which transformers leaves unsummed.",
    CONTEXT: "Ours: exact attention over a sequence that is split over cp, where the attention interface is called.",
    DATA: "fsdp_plan: behind each rule stands transformers' string; the others keep full weights, as the root does.",
}


def plan_text(proposal: Proposal, header: Sequence[str]) -> str:
    """The YAML text of a plan; `header` are the lines of the comment on top."""
    lines = [f"# {line}".rstrip() for line in header]
    lines += ["version: 1", "rules:"]
    keys = {line: f"{_key(line.glob)}:" for line in proposal.lines}
    column = max((len(key) for key in keys.values() if len(key) <= WIDTH // 2), default=0) + 2
    for section, about in SECTIONS.items():
        own = [line for line in proposal.lines if line.section == section]
        if own:
            lines.append(f"  # {about}")
            lines += _aligned(own, keys, column)
        if section == TRANSLATED:
            lines += _left_out(proposal)
        if section == SUMMED and proposal.plain:
            lines.append("  # No rule: another module reads these and takes them for plain tensors.")
            lines += [f"  #   {glob}" for glob in proposal.plain]
    lines.append("buffers:")
    batch = ", ".join(f"{name}: {value}" for name, value in proposal.batch.items())
    lines.append(f"  batch: {{{batch}}}")
    return "\n".join(lines) + "\n"


def _aligned(lines: Sequence[Line], keys: dict[Line, str], column: int) -> list[str]:
    """The lines of a section, comments below each other; what is too long for one stands below its key."""
    bodies = {line: f"  {keys[line]:<{column - 2}}  {_body(line.styles)}" for line in lines}
    short = [len(body) for body in bodies.values() if len(body) <= WIDTH - ROOM]
    widest = max(short, default=0)
    written: list[str] = []
    for line, body in bodies.items():
        comment = f"  # {line.comment}" if line.comment else ""
        if len(body) <= widest:
            written.append(f"{body:<{widest}}{comment}".rstrip())
        elif len(body) <= WIDTH and not comment:
            written.append(body)
        else:
            written += [f"  {keys[line]}{comment}", f"    {_body(line.styles)}"]
    return written


def _left_out(proposal: Proposal) -> list[str]:
    """The entries without a rule, as comments."""
    lines = [
        f"  # {rule.entry.key}: {rule.entry.string}  -> no rule: {rule.note}" for rule in proposal.needless
    ]
    if proposal.unmatched:
        lines.append("  # These entries name nothing in this model:")
        lines += [f"  #   {entry.key}: {entry.string}" for entry in proposal.unmatched]
    return lines


def _body(styles: Sequence[str]) -> str:
    return styles[0] if len(styles) == 1 else f"[{', '.join(styles)}]"


def _key(glob: str) -> str:
    """The glob as a YAML key, in quotes where YAML would read something else."""
    quoted = not glob or glob[0] in "*{[!&?'\"#%@`|>-" or ": " in glob or not any(map(str.isalpha, glob))
    return f'"{glob}"' if quoted else glob
