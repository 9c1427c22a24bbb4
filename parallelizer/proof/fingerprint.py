"""What a proof depends on, part by part: where no part has changed, the proof still holds."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelizer.configuration.dotted_path import function_at
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Span
from parallelizer.diagnostics.package_folder import ROOT
from parallelizer.language.styles import STYLE_FILES
from parallelizer.language.workload import Workload
from parallelizer.optim import SCHEDULE_KEYS
from parallelizer.proof.tiny import small_length, small_mesh, small_pipeline
from parallelizer.styles.registry import FUNCTIONS

SCHEDULE = ("lr", *SCHEDULE_KEYS)
"""Keys of `optim` that a proof does not depend on: they scale an update that is equal on both sides."""

PARTS: dict[str, str] = {
    "plan": "the plan",
    "axes": "the axes above 1",
    "pipeline": "the pipeline",
    "styles": "the `styles` of the preset",
    "own styles": "the source files of the plan's own styles",
    "model": "the model's configuration",
    "sources": "the source files of the model, the loss or the optimizer",
    "packages": "the version of an installed package that the model, the loss or the optimizer is from",
    "loss": "the loss",
    "batch": "the batch",
    "length": "how the length divides",
    "optimizer": "the optimizer",
    "parallelizer": "parallelizer",
    "torch": "torch",
    "python": "Python",
}
"""The parts of a fingerprint, and how a message calls them."""


def parts_of(setup: Setup, model: nn.Module) -> dict[str, str]:
    """The digest of each part that the proof of a setup depends on. `model` is what `setup.build_model()` gave.

    Sizes of axes are not among them, and neither are the number of rows nor the length but for how it divides: a proof runs a
    small form of the same axes. Raises PlanError where `setup.loss()` does.
    """
    plan, mesh = setup.plan, small_mesh(setup.mesh, setup.pipeline)
    used = {use.style for rule in plan.rules for use in rule.uses}
    own = [FUNCTIONS[name].__module__ for name in sorted(used - set(STYLE_FILES)) if name in FUNCTIONS]
    optimizer = str(setup.optim.get("_target_") or "")
    functions = [setup.loss(), *([function_at(optimizer)] if optimizer else [])]
    styles = {name: options for name, options in setup.defaults.items() if options != type(options)()}
    sources = _source_digests([*_modules_of(model), *(f.__module__ for f in functions)])
    values: dict[str, Any] = {
        "plan": (plan.rules, plan.layouts, plan.batch, plan.buffers, plan.balance, setup.redistribute),
        "axes": sorted(axis for axis, size in setup.mesh.every.items() if size > 1),
        "pipeline": (small_pipeline(setup, mesh), mesh.sizes["pp"]),
        "styles": styles,
        "own styles": _source_digests(own),
        "model": {key: value for key, value in setup.model.items() if key not in ("plan", "batch", "loss")},
        "sources": sources,
        "packages": _versions(sources, used),
        "loss": setup.loss_path,
        "batch": (_entries(setup.workload), setup.workload.accumulate > 1),
        "length": small_length(setup, mesh),
        "optimizer": ({k: v for k, v in setup.optim.items() if k not in SCHEDULE}, setup.clip),
        "parallelizer": _package_digest(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    return {name: _digest(values[name]) for name in PARTS}


def fingerprint(parts: Mapping[str, str]) -> str:
    """The SHA-256 of all parts together."""
    return hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON has it. Places in files are left out: a rule on another line is the same rule."""
    if isinstance(value, Span):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = [f.name for f in dataclasses.fields(value) if f.compare]
        return [type(value).__name__, {name: _plain(getattr(value, name)) for name in compared}]
    if isinstance(value, Mapping):
        return {str(key): _plain(below) for key, below in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _entries(workload: Workload) -> Mapping[str, Any]:
    return dict(workload.entries)


def _modules_of(model: nn.Module) -> Iterator[str]:
    """Names of the Python modules that define the classes of a model and their bases."""
    for one in {type(module) for module in model.modules()}:
        for base in one.__mro__:
            yield base.__module__


def _source_digests(names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of the source file of each module, by its name; of a user's own files also of those that they import.

    Files of torch, of Python and of this package are parts of their own.
    """
    found: dict[str, str] = {}
    waiting = list(dict.fromkeys(names))
    while waiting:
        name = waiting.pop()
        if name in found or _is_part_of_its_own(name):
            continue
        file = _file_of(name)
        if file is None:
            continue
        text = file.read_bytes()
        found[name] = hashlib.sha256(text).hexdigest()
        if not _installed(file):
            waiting += _imports(text, name, is_package=file.name == "__init__.py")
    return found


def _versions(names: Iterable[str], styles: Iterable[str]) -> dict[str, str]:
    """The versions of the installed packages that have these modules, and of torchao where a style computes with it: their other
    files, which the modules import, are those of the version.
    """
    tops = {name.partition(".")[0] for name in names if (file := _file_of(name)) and _installed(file)}
    if any(style.startswith("float8") for style in styles):
        tops.add("torchao")
    return {top: _version(top) for top in sorted(tops)}


def _version(top: str) -> str:
    """Of the package with a module of this name; empty where none says."""
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        own = importlib.metadata.packages_distributions().get(top, [])
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(own)))


def _is_part_of_its_own(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "parallelizer")


def _file_of(name: str) -> Path | None:
    """The source file of a module, imported or not; None where there is none."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        file = spec.origin if spec is not None else None
    path = Path(file) if file else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _installed(file: Path) -> bool:
    """Whether a file belongs to an installed package: its own file stands for the version there."""
    folders = {sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib")}
    return any(file.is_relative_to(folder) for folder in folders if folder)


def _imports(text: bytes, name: str, *, is_package: bool) -> Iterator[str]:
    """Names of modules that a source file imports anywhere in it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            target = ".".join(part for part in (base, node.module or "") if part)
            if target:
                yield target
            # A name may be a module of the package, or something that the module defines.
            yield from (f"{target}.{alias.name}" if target else alias.name for alias in node.names)


def _package_digest() -> str:
    """Of this package's sources, so that a change in a checkout counts as well as a release."""
    sums = hashlib.sha256()
    for file in sorted(ROOT.rglob("*.py")):
        sums.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return sums.hexdigest()
