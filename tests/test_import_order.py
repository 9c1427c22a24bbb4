"""The order of the components: each imports only those to its left, and no files import each other in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    "torch_private", "diagnostics", "child", "language", "mesh", "styles", "compiler", "losses", "optim", "runtime",
    "simulate", "configuration", "hugging_face", "proof", "report", "propose", "training", "commands", "recipes",
)  # fmt: skip
"""From the left: a component imports itself and those before it."""

FACES = {"parallelizer": 99, "parallelizer.testing": 99, "parallelizer.__main__": 99}
"""The root stands to the right of everything: it hands names on. `testing` and `__main__` are used by nobody here."""

APART = ("models", "configs")
"""Rooms that import nothing of ours and that nothing imports: configurations name them."""

EXPLAINED: dict[tuple[str, str], str] = {}
"""Imports against the order, each with the reason that it stands."""

TORCH_FREE = ("diagnostics", "language")
"""Rooms whose every file is imported without torch and without Hydra."""


def _rank(module: str) -> int | None:
    """The position of a module's component in the order; None for components outside of it."""
    if module in FACES:
        return FACES[module]
    component = module.split(".")[1] if module.startswith("parallelizer.") else module.split(".")[0]
    if component in APART:
        return None
    assert component in ORDER, f"{module} is in no component of the order: tests/test_import_order.py"
    return ORDER.index(component)


@cache
def _modules() -> dict[str, Path]:
    """Every module of the package and the recipes by its dotted name."""
    found = {}
    for top in ("parallelizer", "recipes"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if "starter" in path.parts or "configs" in path.parts:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _names(tree: ast.AST, *, types: bool) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, at whatever depth, with the line; with `types` also what only type checkers read."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(child for part in node.body for child in ast.walk(part))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield (below if below in _modules() else node.module), node.lineno


@cache
def _imports(types: bool) -> dict[str, dict[str, int]]:
    """For each module those of ours that it imports, with the line of the first."""
    found: dict[str, dict[str, int]] = {}
    for module, path in _modules().items():
        into = found.setdefault(module, {})
        for name, line in _names(ast.parse(path.read_text()), types=types):
            if name in _modules() and name != module:
                into.setdefault(name, line)
    return found


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_a_room_imports_only_what_stands_to_its_left():
    against = []
    for module, imported in _imports(types=True).items():
        here = _rank(module)
        for other, line in imported.items():
            there = _rank(other)
            same_component = module.split(".")[:2] == other.split(".")[:2] and module.startswith(
                "parallelizer."
            )
            if here is None or there is None or same_component or (module, other) in EXPLAINED:
                continue
            if there >= here and not (module.startswith("recipes") and other in ("parallelizer",)):
                against.append(f"{_modules()[module].relative_to(ROOT)}:{line} imports {other}")
    assert not against, "\n".join(against)


def test_what_is_apart_imports_nothing_of_ours():
    for module, imported in _imports(types=True).items():
        if module.startswith("parallelizer.models"):
            assert not imported, (module, imported)


def test_every_explained_import_still_stands():
    for module, other in EXPLAINED:
        assert other in _imports(types=True)[module]


def test_no_files_import_each_other_in_a_circle():
    graph = {m: {o for o in others if o != "parallelizer"} for m, others in _imports(types=True).items()}
    assert not _circles(graph)


def test_no_components_side_by_side_import_each_other_in_a_circle():
    """Files and folders of one folder, an import counted for the two that stand side by side where the paths part."""
    graph: dict[str, set[str]] = {}
    for module, others in _imports(types=True).items():
        for other in others:
            if other == "parallelizer" or module in FACES:
                continue
            a, b = (_modules()[m].relative_to(ROOT).parts for m in (module, other))
            common = next(at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            graph.setdefault("/".join(a[: common + 1]), set()).add("/".join(b[: common + 1]))
    assert not _circles(graph)


def test_the_root_has_few_entries():
    entries = [p.name for p in (ROOT / "parallelizer").iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 24, sorted(entries)


def test_an_init_holds_no_code():
    """But those that hand names on."""
    for module, path in _modules().items():
        if path.name == "__init__.py" and module not in (
            "parallelizer",
            "parallelizer.training",
            "parallelizer.hugging_face",
            "parallelizer.torch_private",
        ):
            body = ast.parse(path.read_text()).body
            assert all(
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body
            ), path


@pytest.mark.parametrize("component", TORCH_FREE)
def test_a_component_without_torch_is_imported_without_it(component):
    modules = [m for m in _modules() if m.startswith(f"parallelizer.{component}")]
    code = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_private_names_are_in_one_folder():
    """No import of torch's private modules elsewhere, and no underscore attribute that torch defines on modules or tensors."""
    found = []
    for module, path in _modules().items():
        if module.startswith("parallelizer.torch_private"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                parts = [*(node.module or "").split("."), *(a.name for a in node.names)]
                if any(p.startswith("_") and not p.startswith("__") for p in parts):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
            if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not found, "\n".join(found)


PRIVATE_ATTRIBUTES = frozenset({
    "_non_persistent_buffers_set", "_parameters", "_modules", "_buffers", "_forward_hooks", "_forward_pre_hooks",
    "_local_tensor", "_spec",
})  # fmt: skip
"""Attributes of torch's classes that torch calls its own."""
