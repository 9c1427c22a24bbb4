"""The last lines of a run: its result, and the places of its files."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from parallelizer.diagnostics.units import size
from parallelizer.language.yaml_nodes import shown_path
from parallelizer.runtime.checkpoint.folder import step_of
from parallelizer.training.watch.result import Result


def summary(result: Result, folder: Path) -> None:
    """Print them."""
    print(f"\n{_trained(result)}")
    for line in _figures(result):
        print(f"  {line}")
    if result.stopped:
        print(_stopped(result))
    if result.unwritten:
        last = (
            "and there is no other"
            if result.checkpoint is None
            else f"the last is {shown_path(result.checkpoint)}"
        )
        print(f"{result.unwritten} checkpoint{'s' * (result.unwritten > 1)} could not be written; {last}")
    if result.validation_loss is not None and not result.nats:
        print(f"validation loss {result.validation_loss:.4f}")
    elif result.validation_loss is not None:
        baseline = result.baseline
        verdict = "below" if result.validation_loss < baseline.loss else "not yet below"
        print(
            f"validation loss {result.validation_loss:.4f}, {verdict} {baseline.name}, "
            f"{baseline.loss:.4f} ({baseline.unit})"
        )
    print(f"outputs in {shown_path(folder)}")


def is_cross_entropy(loss: Callable[..., object]) -> bool:
    """Whether a loss is a cross entropy, by the functions that it calls: only then an entropy says anything of it."""
    code = getattr(inspect.unwrap(loss), "__code__", None)
    called = {getattr(loss, "__name__", ""), *(code.co_names if code is not None else ())}
    return any(
        word in name.lower() for name in called for word in ("cross_entropy", "crossentropy", "nll_loss")
    )


def _trained(result: Result) -> str:
    if not result.losses:
        return f"no step was left to train: all {result.first} are done"
    behind = f" after step {result.first}" if result.first else ""
    return (
        f"trained {len(result.losses)} step{'s' if len(result.losses) > 1 else ''}{behind} in {result.seconds:.1f} s: "
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
    )


def _figures(result: Result) -> Iterator[str]:
    if result.best is not None and len(result.losses) > 1:
        step, loss = result.best
        yield f"lowest loss {loss:.4f}, at step {step}"
    if result.skipped:
        yield f"{result.skipped} step{'s' * (result.skipped > 1)} skipped: not finite"
    if result.speed is not None:
        low, middle, high = result.speed
        spread = f" (quartiles {low:,.0f} to {high:,.0f})" if len(result.rates) > 2 else ""
        mfu = f", MFU {result.mfu:.1%}" if result.mfu is not None else ""
        if result.causal_mfu is not None and result.causal_mfu != result.mfu:
            mfu += f" ({result.causal_mfu:.1%} without the masked half of attention)"
        total = result.tokens * len(result.losses)
        yield f"{total:,} {result.unit}, {middle:,.0f} a second{spread}{mfu}"
    if result.memory is not None and result.losses:
        whose = "rank 0's process" if result.memory.whole else "rank 0"
        dry = (
            "" if result.memory.whole or result.predicted is None else f", {size(result.predicted)} predicted"
        )
        held = result.memory.reserved
        reserved = "" if held is None else f"; its allocator reserved {size(held)}"
        yield f"{whose} had {size(result.memory.peak)} in use at most{dry}{reserved}"
    if result.checkpoint is not None and not result.stopped and not result.unwritten:
        yield f"saved after step {step_of(result.checkpoint)}, in {shown_path(result.checkpoint)}"
    if result.profiled is not None:
        yield f"traces for Perfetto in {shown_path(result.profiled)}"


def _stopped(result: Result) -> str:
    name = signal.Signals(result.stopped).name
    done = result.first + len(result.losses)
    if result.checkpoint is None or step_of(result.checkpoint) != done:
        return f"stopped by {name} after step {done}, which could not be saved"
    return f"stopped by {name} after step {done}, saved in {shown_path(result.checkpoint)}: the same command resumes from it"
