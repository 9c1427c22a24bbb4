"""Checks that a compiled module contains nothing that cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parallelizer.diagnostics.diagnostic import Diagnostic, Related
from parallelizer.language.plan import TENSOR_AXES

if TYPE_CHECKING:
    from parallelizer.compiler.compilation import Compilation
    from parallelizer.styles.application import Application


def compiled_regions(state: Compilation) -> Iterator[Diagnostic]:
    """FSDP's units gather around compiled code and not in it; and torch 2.13 can compile neither a recomputation that has
    DTensors in it, whose meshes it takes for tensors to save, nor DTensors of symbolic sizes. One finding for each pair of
    rules.
    """
    compiled = [a for a in state.applications if a.slot == "compile"]
    if not compiled:
        return
    split = [
        a
        for a in state.applications
        if a.slot in ("params", "io") and any(axis in TENSOR_AXES for axis in a.axes)
    ]
    laid_out = [a.module for a in split]
    yield from _symbolic_sizes(compiled, split)
    told = set()
    for inner in state.applications:
        if inner.slot not in ("checkpoint", "fsdp"):
            continue
        if inner.slot == "checkpoint" and not any(_within(path, inner.module) for path in laid_out):
            continue
        around = next((c for c in compiled if _holds(c, inner)), None)
        if around is None or (pair := (inner.rule.span, around.rule.span)) in told:
            continue
        told.add(pair)
        where = around.module or "the root"
        if inner.slot == "fsdp":
            message = (
                f"fsdp on {inner.module} is inside {where}, which is compiled: fsdp would gather parameters "
                "inside compiled code"
            )
            help_text = "compile the module that has fsdp, or modules inside it"
        else:
            message = (
                f"checkpoint on {inner.module or 'the root'} is compiled with {where}, and tensor parallelism is inside: "
                "torch cannot compile the recomputation of DTensors"
            )
            help_text = "recompute around compiled code: add `compile` to modules inside the ones that have `checkpoint`"
        yield Diagnostic(
            "compiled-region",
            message,
            inner.rule.span,
            help_text,
            related=(Related(around.rule.span, f"this compiles {where}"),)
            if around.rule.span != inner.rule.span
            else (),
        )


def _symbolic_sizes(compiled: list[Application], split: list[Application]) -> Iterator[Diagnostic]:
    """`dynamic: true` around tensor parallelism, once for each rule."""
    told = set()
    for around in compiled:
        if not around.options.get("dynamic") or around.rule.span in told:
            continue
        # The layouts of the compiled module's own inputs and outputs are hooks, which stay outside.
        inside = next(
            (
                a
                for a in split
                if _within(a.module, around.module) and (a.slot, a.module) != ("io", around.module)
            ),
            None,
        )
        if inside is None:
            continue
        told.add(around.rule.span)
        where = around.module or "the root"
        yield Diagnostic(
            "compiled-region",
            f"{where} is compiled with `dynamic: true`, and tensor parallelism is inside: torch cannot compile DTensors "
            "of symbolic sizes",
            around.spans.get("dynamic", around.rule.span),
            "remove `dynamic`: torch then compiles code for each size",
            related=(Related(inside.rule.span, f"this splits {inside.module or 'the root'}"),),
        )


def _holds(around: Application, inner: Application) -> bool:
    """Whether what `inner` does to its module comes to lie in compiled code."""
    if inner.slot == "fsdp":  # around the compiled code of its own module
        return inner.module != around.module and _within(inner.module, around.module)
    return _within(inner.module, around.module)


def _within(path: str, around: str) -> bool:
    return path == around or not around or path.startswith(f"{around}.")
