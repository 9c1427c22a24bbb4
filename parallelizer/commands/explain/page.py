"""The documentation page of all codes: their sections, one after the other."""

from __future__ import annotations

from parallelizer.diagnostics.codes.all_codes import FAMILIES

COMMAND = "python -m parallelizer.commands.explain > docs/diagnostics.md"

HEAD = f"""# Diagnostics

Every finding has a code that stays the same across releases. `python -m parallelizer explain CODE` prints what is
written here, and `explain` without a code lists all codes. This page joins the texts that stand beside the checks
in the sources: `{COMMAND}`. Tests run the examples and compare what they print.

An *error* ends the command with status 1 before any rank starts; a *warning* or a *note* does not.
"""


def page() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    for family in FAMILIES:
        names = ", ".join(f"[`{code.name}`](#{code.name})" for code in family.codes)
        parts.append(f"- **{family.name}**: {names}")
    for family in FAMILIES:
        parts.append(f"\n## {family.name.capitalize()}\n\n{family.about}")
        parts += [f"\n#{code.text.rstrip()}" for code in family.codes]
    return "\n".join(parts) + "\n"
