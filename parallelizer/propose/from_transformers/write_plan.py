"""A proposal as the text of a plan file that a person may keep: in sections, with where each line came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallelizer.propose.from_transformers.proposal import (
    CONTEXT,
    DATA,
    EXPERTS,
    SPLIT,
    SUMMED,
    TRANSLATED,
    WHOLE,
    Proposal,
)
from parallelizer.propose.plan_text import Form, Section, plan_text

FORM = Form(120, gap="  ", comment="  # ", room=26, styles_below=True)

SECTIONS = {
    TRANSLATED: "tp_plan: behind each rule stands transformers' string; (added) to every plan, by transformers itself.",
    SPLIT: "Ours: no entry names these, and they meet heads or features that are split; each rank has those of its own.",
    WHOLE: "Ours: what no entry names lies whole on every rank, with one gradient; as DTensors, like everything else.",
    SUMMED: "Ours: no entry names these, and each rank's gradient is a part, which transformers leaves unsummed.",
    CONTEXT: "Ours: exact attention over a sequence that is split over cp, where the attention interface is called.",
    EXPERTS: "ep_plan: on meshes with ep, experts are shared out, and tokens travel to them.",
    DATA: "fsdp_plan: behind each rule stands transformers' string; the others keep full weights, as the root does.",
}


def write_plan(proposal: Proposal, header: Sequence[str]) -> str:
    """The plan; `header` are the lines of the comment on top."""
    sections = []
    for name, about in SECTIONS.items():
        lines = proposal.sections.get(name, ())
        sections.append(Section(lines, (about,) if lines else (), tuple(_left_out(proposal, name))))
    return plan_text(FORM, header, sections, buffers={"batch": proposal.batch})


def _left_out(proposal: Proposal, section: str) -> Iterator[str]:
    """What has no rule in a section, and why."""
    if section == TRANSLATED:
        for rule in proposal.needless:
            yield f"{rule.entry.key}: {rule.entry.string}  -> no rule: {rule.note}"
        if proposal.unmatched:
            yield "These entries name nothing in this model:"
            yield from (f"  {entry.key}: {entry.string}" for entry in proposal.unmatched)
    if section == SUMMED and proposal.plain:
        yield "No rule: another module reads these and takes them for plain tensors."
        yield from (f"  {glob}" for glob in proposal.plain)
