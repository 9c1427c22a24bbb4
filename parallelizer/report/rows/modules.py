"""The rows of the tables of modules: the styles that do not show in the parameters' placements."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.report.rows.paths import shown_paths
from parallelizer.styles.application import Application, Program

Flows = tuple[tuple[str, tuple[str, ...]], ...]
"""`input` and `output`, where a style says anything of them, each with what happens to which tensor."""


@dataclass(frozen=True)
class ModuleRow:
    """Modules that one rule does the same to. `axis` is `dp_shard+cp` for a style on several, and may be empty."""

    modules: tuple[str, ...]
    style: str
    axis: str
    flows: Flows
    span: Span

    @property
    def paths(self) -> list[str]:
        """The modules' paths, folded."""
        return shown_paths(self.modules)


def module_rows(program: Program, place: Callable[[Span], Hashable] = lambda span: span) -> list[ModuleRow]:
    """Rows in the order of their first modules. `place` is what a table tells of the place of a rule: rules
    that it tells the same of share a row."""
    groups: dict[tuple[object, ...], list[Application]] = {}
    for a in program:
        if a.slot != "params":
            key = (a.style, a.axes, _flows(a), place(a.rule.span))
            groups.setdefault(key, []).append(a)
    return [
        ModuleRow(
            tuple(a.module for a in alike),
            alike[0].style,
            "+".join(alike[0].axes),
            _flows(alike[0]),
            alike[0].rule.span,
        )
        for alike in groups.values()
    ]


def _flows(application: Application) -> Flows:
    return tuple(
        (option, tuple(f"{name}: {flow}" if name else str(flow) for name, flow in by_name.items()))
        for option in ("input", "output")
        if (by_name := application.options.get(option))
    )
