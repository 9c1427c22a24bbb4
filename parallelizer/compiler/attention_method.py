"""The method that `auto` selects for a module's attention calls, and the bytes that each method would send,
in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from parallelizer.compiler.observe.attention_calls import AttentionCall, is_inside
from parallelizer.diagnostics.units import size
from parallelizer.styles.context_parallel.choice import Heads, best_degree, cheapest, legal, sent

if TYPE_CHECKING:
    from parallelizer.styles.application import Application


def chosen_methods(
    a: Application,
    ranks: int,
    calls: Iterable[tuple[AttentionCall, tuple[str, ...]]],
    tp_share: Mapping[str, int],
) -> tuple[str, ...]:
    """What `auto` takes for each kind of call in a context-parallel module, with what all methods that are possible send, or
    over how many ranks ulysses-ring deals out heads; the closed forms where no call is known; nothing for another method.

    `calls` are the model's, and `tp_share` says over how many ranks of tp the heads of each are split.
    """
    method, degree = a.options.get("method"), a.options.get("ulysses_degree")
    if method not in ("auto", "ulysses-ring") or ranks == 1 or (method == "ulysses-ring" and degree):
        return ()
    mine = [call for call, places in calls if any(is_inside(path, a.module) for path in places)]
    if not mine:
        return _unknown(method, ranks)
    lines: dict[str, None] = {}
    for call in mine:
        share = tp_share.get(call.path, 1)
        if call.queries % share or call.keys % share:
            continue  # an error of its own
        heads = Heads(call.queries // share, call.keys // share)
        told = _of_call(a, call, heads, ranks, share) if method == "auto" else _of_ring(heads, ranks)
        lines.update(dict.fromkeys(told))
    return tuple(lines)


def _of_call(a: Application, call: AttentionCall, heads: Heads, ranks: int, share: int) -> Iterable[str]:
    kept, degree = bool(a.options.get("keep_gathered")), a.options.get("ulysses_degree")
    known = {"is_causal": call.is_causal, "masked": call.masked}
    chosen = cheapest(heads, ranks, **known, keep_gathered=kept, degree=degree)
    of_tp = f" (a rank of tp has {heads.queries} and {heads.keys})" if share > 1 else ""
    mask = "causal" if call.is_causal else "with a mask" if call.masked else "without a mask"
    yield (
        f"auto takes {chosen} for {call.queries} query and {call.keys} key heads{of_tp}, {mask}, over {ranks} ranks: nothing "
        "that is possible sends less"
    )
    bytes_of_keys = call.key_bytes // share // ranks
    found = {
        m: sent(m, heads, ranks, **known, kept=kept, degree=degree)
        for m in legal(heads, ranks, masked=call.masked, keep_gathered=kept, degree=degree)
    }
    inside = degree or best_degree(heads, ranks)
    for m in sorted(found, key=lambda m: (found[m], m != chosen)):
        named = f"{m} (ulysses_degree={inside})" if m == "ulysses-ring" else m
        yield f"  {named} {float(found[m]):g} K, {size(float(found[m] * bytes_of_keys))}"
    yield (
        f"  forward and backward, of the rank that sends most, for each sequence; K = {size(bytes_of_keys)}: one rank's keys and "
        f"values in {call.dtype}"
    )


def _of_ring(heads: Heads, ranks: int) -> Iterable[str]:
    degree = best_degree(heads, ranks)
    share = float(sent("ulysses-ring", heads, ranks, is_causal=False))
    alike = {1: ": it is the ring", ranks: ": it is ulysses"}.get(degree, "")
    yield (
        f"ulysses_degree={degree} for {heads.queries} query and {heads.keys} key heads over {ranks} ranks sends least, "
        f"{share:g} K{alike}"
    )


def _unknown(method: str, ranks: int) -> tuple[str, ...]:
    """The closed forms of `context.choice`, with the ranks filled in."""
    others = ranks - 1
    if method != "auto":
        return (
            f"ulysses_degree is chosen by a call's heads, which are known when it runs, over {ranks} ranks",
        )
    return (
        f"auto takes what sends least over {ranks} ranks for a call's heads, which are known when it runs: in K, the bytes of "
        "one rank's keys and values, with g query heads to a key head",
        f"  all-gather {3 * others} K, {2 * others} K under a mask or with keep_gathered",
        f"  ring {3 * others} K, not under a mask",
        f"  ulysses {2 * others / ranks:g} (1+g) K, if both numbers of heads divide by {ranks}",
        f"  ulysses-ring 2 (U-1)/U (1+g) + 3 ({ranks}/U - 1) K, if they divide by U, a divisor of {ranks}; not under a mask",
    )
