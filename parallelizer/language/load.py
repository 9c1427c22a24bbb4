"""Plans by name or path, with what they extend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from parallelizer.diagnostics.diagnostic import Diagnostic, Findings, PlanError, Related, Span, quoted
from parallelizer.diagnostics.nearest import did_you_mean
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.language.parse_plan import parse_plan
from parallelizer.language.plan import Plan
from parallelizer.language.yaml_nodes import MappingNode, Node, Scalar, kind, read_file, shown_path

MAX_EXTENDS = 8

PLAN_ENDINGS = (".yaml", ".yml")
"""What the path of a plan ends with; a name has no ending."""

Find = Callable[[str, Span | None], str]
"""Turns a plan's name, and the place where it was written, into a path. Raises PlanError."""

_Chain = tuple[tuple[str, Span | None], ...]
"""The files that extend one another down to the present one, each with where it was asked for."""


def load_plan(name: str | os.PathLike[str], folders: Sequence[str | Path] = ()) -> Plan:
    """Read a plan by path or by name (`plans/<name>.yaml` in `folders`, then in the shipped configuration).

    Raises PlanError with all syntax errors in the plan and in the plans that it extends.
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
        if _is_path(name):
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
        if children:
            _check_inside(name, children[-1][0], span)
        path = find(name, span)
        _check_link(name, path, children[-1][0] if children else None, span)
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


def _is_path(name: str) -> bool:
    return os.sep in name or name.endswith(PLAN_ENDINGS)


def _check_inside(name: str, child: str, span: Span | None) -> None:
    """Raise for a path that leads out of the working directory and out of the folder of the plan that says
    it, before anything is asked about what is there. `child` is that plan's real path.
    """
    if _is_path(name) and not _is_below(os.path.abspath(name), os.getcwd(), os.path.dirname(child)):
        raise _outside(name, span)


def _check_link(name: str, path: str, child: str | None, span: Span | None) -> None:
    """Raise for a link to something else than a plan: a plan must not show what it was not given.

    The command line may name a link to any YAML file; a plan that extends another, only
    one that stays in the folders where plans are.
    """
    real = os.path.realpath(path)
    if path.endswith(PLAN_ENDINGS) and not real.endswith(PLAN_ENDINGS):
        message = f"{quoted(name)} is a link to a file that is not YAML"
        raise _error("file-unreadable", message, span, "name the plan itself")
    if child is None:
        return
    folders = [os.getcwd(), os.path.dirname(child)]
    if not _is_path(name):
        folders.append(os.path.dirname(os.path.abspath(path)))
    if not _is_below(real, *map(os.path.realpath, folders)):
        raise _outside(name, span)


def _is_below(path: str, *folders: str) -> bool:
    return any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _outside(name: str, span: Span | None) -> PlanError:
    message = f"{quoted(name)} lies outside the folders that a plan may extend from"
    help_text = "extend a plan by its name, or by a path below the working directory or beside this plan"
    return _error("extends-outside", message, span, help_text)


def _check_chain(path: str, chain: _Chain) -> None:
    """Raise for a file that extends itself, and for too many files."""
    *children, (real, span) = chain
    earlier = [at for at, (other, _) in enumerate(children) if other == real]
    if earlier:
        circle = chain[earlier[0] + 1 : -1]
        related = tuple(Related(s, "which is extended here") for _, s in circle if s is not None)
        message = f"{path} extends itself"
        help_text = "remove one `extends` of the cycle"
        raise PlanError([Diagnostic("extends-cycle", message, span, help_text, related=related)])
    if len(children) > MAX_EXTENDS:
        message = f"plans extend one another more than {MAX_EXTENDS} deep"
        raise _error("extends-depth", message, span, "extend a plan that is later in the chain")


def _error(code: str, message: str, span: Span | None, help_text: str) -> PlanError:
    return PlanError([Diagnostic(code, message, span, help_text)])
