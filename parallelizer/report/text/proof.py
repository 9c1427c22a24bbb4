"""A proof as text."""

from __future__ import annotations

import textwrap
from typing import TextIO

from parallelizer.diagnostics import render as show_diagnostics
from parallelizer.language.fold import fold_paths
from parallelizer.proof.compare import Difference
from parallelizer.proof.not_equal import not_equal
from parallelizer.proof.proof import Proof
from parallelizer.proof.rounding import MARGIN
from parallelizer.report.rows.proof import loss_error, number_compared
from parallelizer.report.text.precision import counted

MOST_DECISIONS = 5
"""Lines of a report for what a proof did not reach."""


def write(proof: Proof, stream: TextIO, *, seconds: float | None = None) -> None:
    """Print what was run, by which rule it is judged, the worst three parameters, and the verdict."""
    color, width = stream.isatty(), show_diagnostics.width_of_terminal()
    for line in _head(proof):
        stream.write(_fitted(line, width) + "\n")
    if proof.divergence is not None or not proof.passed:
        stream.write("\n" + show_diagnostics.render(not_equal(proof), color=color, width=width) + "\n\n")
    if proof.unequal:
        stream.write("replicas that hold different bits:\n")
        stream.writelines(f"  {glob}\n" for glob in fold_paths(key.split(" ")[0] for key in proof.unequal))
    stream.write(_fitted(_last(proof) + (f" ({seconds:.1f} s)" if seconds is not None else ""), width) + "\n")
    stream.flush()


def text(proof: Proof) -> str:
    """The report without colour, as an AssertionError carries it."""
    lines = [*_head(proof), ""]
    if not proof.passed:
        lines += [show_diagnostics.render(not_equal(proof)), ""]
    if proof.unequal:
        lines.append(
            "replicas that hold different bits: "
            + ", ".join(fold_paths(key.split(" ")[0] for key in proof.unequal))
        )
    return "\n".join([*lines, _last(proof)])


def _fitted(line: str, width: int) -> str:
    """The line, or several of them, the second and others indented."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _head(proof: Proof) -> list[str]:
    ranks = proof.mesh.world_size
    what = "proof" if proof.is_verdict else "drift"
    lines = [
        f"{what} of {proof.plan} on {proof.mesh}, {ranks} rank{'s' if ranks > 1 else ''}, in {proof.dtype}"
    ]
    if proof.changes:
        lines.append(f"shrunk: {', '.join(proof.changes)}")
    if proof.is_verdict:
        lines.append(
            f"rule: relative error <= c * eps * sqrt(n), where n is the number of terms of the longest sum and c = "
            f"{proof.verdict.constant:.3g}, {MARGIN:g} times the rounding that another order of summation shows"
        )
    reference, sharded = proof.losses
    lines.append(
        f"loss: {reference:.12g} unsharded, {sharded:.12g} sharded, relative error {loss_error(proof):.2g}"
    )
    gradients, states, buffers = (
        number_compared(proof, what) for what in ("gradient", "optimizer state", "buffer")
    )
    lines.append(
        f"compared: {gradients} gradients and updates, {states} optimizer states, "
        f"{buffers} buffers, loss, gradient norm and logits, over two steps"
    )
    lines += _float8(proof)
    if proof.one_sided:
        lines.append("not covered, decided in the same way for every value that the proof has:")
        lines += [f"  {where}" for where in proof.one_sided[:MOST_DECISIONS]]
        if len(proof.one_sided) > MOST_DECISIONS:
            lines.append(f"  and {len(proof.one_sided) - MOST_DECISIONS} more (--json lists all)")
    lines.append("worst three parameters:")
    worst = proof.worst(3)
    width = max((len(d.name) for d in worst), default=0)
    lines += [
        f"  {d.name:<{width}}  {d.what} {d.when}: error {d.error:.2g}{_margin(d) if proof.is_verdict else ''}"
        for d in worst
    ]
    return lines


def _float8(proof: Proof) -> list[str]:
    """How far float8 is from full precision, by the modules that are furthest."""
    if not proof.float8:
        return []
    shown = []
    for what, of in (("outputs", "output"), ("weights' gradients", "gradient")):
        errors = [(error, one.module) for one in proof.float8 if (error := getattr(one, of)) is not None]
        if errors:
            worst, module = max(errors)
            least, most = f"{min(errors)[0]:.1%}", f"{worst:.1%}"
            shown.append(f"{what} by {most if least == most else f'{least} to {most}'} ({module})")
    modules = counted(len(proof.float8), sum(one.experts for one in proof.float8))
    return [f"float8, in both runs: {modules}; from full precision differ {', '.join(shown)}"]


def _margin(difference: Difference) -> str:
    if difference.passed:
        return (
            f", bound {difference.bound:.2g}, {_times(1 / difference.share)} below"
            if difference.share
            else f", bound {difference.bound:.2g}"
        )
    return f", bound {difference.bound:.2g}, {_times(difference.share)} above"


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor < 1e4 else f"{factor:.0e} times"


def _last(proof: Proof) -> str:
    if not proof.lowered:
        return f"nothing computed in {proof.dtype}: fsdp does, and the plan has no such style"
    if not proof.is_verdict:
        if proof.float8 and proof.dtype == "float32":
            return "information, not a verdict: float8 is proven in float64 alone"
        return f"information, not a verdict: this is how far {proof.dtype} drifts from float32"
    return (
        "proven: the sharded run equals the unsharded one"
        if proof.passed
        else "NOT proven: the sharded run is another computation"
    )
