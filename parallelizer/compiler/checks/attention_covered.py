"""`attention-left-out`: context parallelism applies to attention in some layers and not in others of the same
kind.

The code is deprecated. `local-attention` (`simulate/checks/local_attention.py`) finds the same in a followed
step, by the inputs of attention and not by the names of modules. This check is removed in the next release,
since codes are stable for one release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation


def attention_covered(state: Compilation) -> Iterator[Diagnostic]:
    """Modules that stand in other layers where one of the same class has `context-parallel` have it too.

    Where one is left out, attention there sees the tokens of its own rank alone: the step runs, and its
    gradients are wrong.
    """
    covered = {a.module: a for a in state.applications if a.slot == "attention"}
    kinds = {(_layerless(path), type(state.modules[path])): a for path, a in covered.items()}
    inside = tuple(f"{path}." for path in covered if path) or ("\0",)
    around = {path[:at] for path in covered for at, character in enumerate(path) if character == "."}
    left_out: dict[tuple[str, type], list[str]] = {}
    for path, module in state.modules.items():
        kind = (_layerless(path), type(module))
        if kind in kinds and path not in covered and path not in around and not path.startswith(inside):
            left_out.setdefault(kind, []).append(path)
    for kind, paths in left_out.items():
        rule = kinds[kind].rule
        yield Diagnostic(
            "attention-left-out",
            f"`{rule.key}` does not match {', '.join(fold_paths(paths)[:3])}: attention there would see only the tokens of "
            f"one rank of cp={state.mesh.sizes['cp']}",
            rule.span,
            f"match all of them: `{kind[0]}`",
        )


def _layerless(path: str) -> str:
    """The path with `*` for the number of a layer."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
