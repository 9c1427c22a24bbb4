"""Every code that a diagnostic may carry, read from the Markdown files that hold their texts.

The text of a code stands beside the check that reports it, `checks/attention_heads.md` beside `checks/attention_heads.py`;
what is reported elsewhere stands in this folder, one file a family. No torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallelizer.diagnostics.codes.section import Code, MalformedSection, read_sections
from parallelizer.diagnostics.package_folder import ROOT

FOLDERS = (
    "diagnostics/codes",
    "compiler/checks",
    "compiler/pipeline",
    "propose/search",
    "simulate",
    "simulate/checks",
    "simulate/time",
    "hugging_face",
)
"""Where the texts stand. `package-data` in pyproject.toml puts them into the wheel."""


@dataclass(frozen=True)
class CodeFamily:
    """Codes that concern the same subject, in alphabetical order."""

    name: str
    about: str
    codes: tuple[Code, ...]


ABOUT = {
    "language": "What a plan may contain, and how it is written.",
    "matching": "Rules, and the modules, parameters and buffers that they name.",
    "mesh": "Sizes of mesh axes, and the number of ranks.",
    "pipeline": "Pipeline schedules, the numbers that they need, and the cut of a model into stages.",
    "constraints": "Sizes that must be divisible or large enough.",
    "composition": "Styles, parameters and buffers that must fit together.",
    "layout flow": "How tensors are placed on their way through forward and backward.",
    "configuration": "Presets and overrides, and what they name.",
    "running": "What is known only when a command runs.",
    "survival": "Checkpoints, faults, and changes during a run.",
    "watching": "What a run is compared with, and where it reports to.",
    "weights": "Loading and saving pretrained weights.",
}
"""The families in the order in which a plan is read, compiled and run."""


def read_codes() -> dict[str, Code]:
    """Every code by name, family by family. Raises MalformedSection."""
    found: dict[str, Code] = {}
    for code in sorted(_every_section(), key=lambda code: code.name):
        where = f"{code.file}:{code.line}"
        if code.family not in ABOUT:
            raise MalformedSection(f"{where}: there is no family `{code.family}`")
        if other := found.get(code.name):
            raise MalformedSection(f"{where}: `{code.name}` has a section in {other.file} too")
        found[code.name] = code
    order = list(ABOUT)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1].family)))


def _every_section() -> Iterator[Code]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.md")):
            yield from read_sections(
                path.read_text(encoding="utf-8"), path.relative_to(ROOT.parent).as_posix()
            )


CODES: dict[str, Code] = read_codes()
"""Every code by its name, in the order of the documentation."""

FAMILIES: tuple[CodeFamily, ...] = tuple(
    CodeFamily(name, about, tuple(code for code in CODES.values() if code.family == name))
    for name, about in ABOUT.items()
)
