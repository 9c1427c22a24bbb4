"""Plans by name or path, with what they extend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from parallelizer.diagnostics import Diagnostic, Findings, PlanError, Related, Span, quoted
from parallelizer.parse import parse_plan
from parallelizer.plan import Plan
from parallelizer.source import MappingNode, Node, Scalar, kind, read_file, shown_path
from parallelizer.suggest import did_you_mean

MAX_EXTENDS = 8

Find = Callable[[str, Span | None], str]
"""Turns a plan's name, and the place where it was written, into a path. Raises PlanError."""

_Chain = tuple[tuple[str, Span | None], ...]
"""The files that extend one another down to the present one, each with where it was asked for."""


def config_folder() -> Path:
    """The folder of the shipped configuration: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load_plan(name: str | os.PathLike[str], folders: Sequence[str | Path] = ()) -> Plan:
    """Read a plan by name (`plans/<name>.yaml` in `folders`, then in the shipped configuration) or by path.

    Raises PlanError with every mistake of form in it and in what it extends.
    """
    return load(os.fspath(name), find_along([*(Path(f) for f in folders), config_folder()]))


def load(name: str, find: Find, span: Span | None = None) -> Plan:
    """Read a plan by name or path, with everything that it extends.

    `span` is where the name was written. Raises PlanError with every diagnostic of every file.
    """
    findings = Findings()
    plan = _load(name, find, span, (), findings)
    if plan is not None and not plan.rules and not findings.items:
        findings.error(
            "no-rules", "the plan has no rules", Span(plan.file), "add `rules:` with at least one line"
        )
    if plan is None or findings.items:
        raise PlanError(findings.items)
    return plan


def find_along(folders: Iterable[Path]) -> Find:
    """A `Find` that looks for `plans/<name>.yaml` along folders; a name with a slash or `.yaml` is a path."""
    roots = list(folders)

    def find(name: str, span: Span | None) -> str:
        if os.sep in name or name.endswith((".yaml", ".yml")):
            return _existing(name, span)
        for root in roots:
            path = os.path.join(root, "plans", f"{name}.yaml")
            if os.path.isfile(path):
                return shown_path(path)
        known = sorted({path.stem for root in roots for path in (root / "plans").glob("*.yaml")})
        help_text = did_you_mean(name, known, "the plans are")
        raise _error("plan-not-found", f"there is no plan named {quoted(name)}", span, help_text)

    return find


def _existing(path: str, span: Span | None) -> str:
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        message, help_text = f"{path} is a folder, not a plan", "name a file in it"
    elif os.path.isfile(path + ".yaml"):
        message, help_text = f"there is no plan file {path}", f"did you mean {path}.yaml?"
    else:
        message, help_text = f"there is no plan file {path}", f"looked in {os.getcwd()}"
    raise _error("plan-not-found", message, span, help_text)


def _load(name: str, find: Find, span: Span | None, children: _Chain, findings: Findings) -> Plan | None:
    """The plan and its parents; None, with the reason in `findings`, when there is nothing to read."""
    try:
        path = find(name, span)
        chain = (*children, (os.path.realpath(path), span))
        _check_chain(path, chain)
        node = read_file(path, path)
    except PlanError as error:
        findings.items.extend(error.diagnostics)
        return None
    empty = Plan(Path(path).stem, path)
    if node is None:
        findings.error(
            "empty-file", "the file is empty", Span(path), "a plan has at least `rules:` or `extends:`"
        )
        return None
    if not isinstance(node, MappingNode):
        message = f"a plan is a map of version, extends, layouts, rules and buffers, not {kind(node)}"
        findings.error("wrong-type", message, node.span, "write `rules:` and below it `glob: style` lines")
        return None
    parent = _parent(node.get("extends"), find, chain, findings) or empty
    return parse_plan(node, replace(parent, name=empty.name, file=empty.file), findings)


def _parent(extends: Node | None, find: Find, chain: _Chain, findings: Findings) -> Plan | None:
    if extends is None:
        return None
    if isinstance(extends, Scalar) and extends.text and "${" not in extends.text:
        return _load(extends.text, find, extends.span, chain, findings)
    if not (isinstance(extends, Scalar) and extends.text):
        message = f"`extends` takes the name or path of one plan, not {kind(extends)}"
        findings.error("wrong-type", message, extends.span, "as in `extends: llama`")
    return None


def _check_chain(path: str, chain: _Chain) -> None:
    """Raise for a file that extends itself, and for too many files."""
    *children, (real, span) = chain
    earlier = [at for at, (other, _) in enumerate(children) if other == real]
    if earlier:
        circle = chain[earlier[0] + 1 : -1]
        related = tuple(Related(s, "which is extended here") for _, s in circle if s is not None)
        message = f"{path} extends itself"
        help_text = "remove one `extends` of the circle"
        raise PlanError([Diagnostic("extends-cycle", message, span, help_text, related=related)])
    if len(children) > MAX_EXTENDS:
        message = f"plans extend one another more than {MAX_EXTENDS} deep"
        raise _error("extends-depth", message, span, "let a plan extend one that is nearer to the end")


def _error(code: str, message: str, span: Span | None, help_text: str) -> PlanError:
    return PlanError([Diagnostic(code, message, span, help_text)])
