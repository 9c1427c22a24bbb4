"""The source files that a proof depends on, as digests, and the versions of the packages that stand for others."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from parallelizer.diagnostics.package_folder import ROOT


def modules_of(model: nn.Module) -> Iterator[str]:
    """Names of the Python modules that define the classes of a model and their bases."""
    for one in {type(module) for module in model.modules()}:
        for base in one.__mro__:
            yield base.__module__


def source_digests(names: Iterable[str]) -> dict[str, str]:
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


def versions(names: Iterable[str], styles: Iterable[str]) -> dict[str, str]:
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


def package_digest() -> str:
    """Of this package's sources, so that a change in a checkout counts as well as a release."""
    sums = hashlib.sha256()
    for file in sorted(ROOT.rglob("*.py")):
        sums.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return sums.hexdigest()
