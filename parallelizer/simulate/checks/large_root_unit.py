"""`large-root-unit`: most of the model is gathered at once, though it has layers that could be units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.diagnostics.units import size
from parallelizer.language.plan import full_name
from parallelizer.simulate.checks.traced_step import SMALL, Traced

LARGE_SHARE = 0.5
"""The share of the parameters from which on the root unit is too large."""


def large_root_unit(traced: Traced) -> Iterator[Diagnostic]:
    """The root gathers most parameters, layers among them that could be units of their own."""
    root = next((a for a in traced.program.of_slot("fsdp") if not a.module), None)
    if root is None or not root.axes:
        return
    sizes = {name: p.numel() for name, p in traced.model.named_parameters()}
    own = [full_name(root.module, name) for name in root.params]
    share = sum(sizes[n] for n in own) / max(sum(sizes.values()), 1)
    layers = _layers(traced.model, own)
    gathered = [e for e in traced.fsdp_gathers() if e.phase == "forward" and not e.module]
    if share <= LARGE_SHARE or not layers or not gathered or gathered[0].payload_bytes < SMALL:
        return
    yield Diagnostic(
        "large-root-unit",
        f"the root unit gathers {share:.0%} of the parameters at once: every rank holds {size(gathered[0].payload_bytes)} "
        "from the beginning of forward to the end of backward",
        root.rule.span,
        f"make each layer a unit: `{layers}: fsdp`",
        "warning",
    )


def _layers(model: nn.Module, names: Iterable[str]) -> str:
    """A glob for repeated layers that have some of the named parameters, or an empty text."""
    names = list(names)
    for path, module in model.named_modules():
        children = [n for n, _ in module.named_children()]
        if len(children) > 1 and all(n.isdigit() for n in children):
            inside = f"{path}." if path else ""
            if any(n.startswith(inside) for n in names):
                return f"{inside}*"
    return ""
