"""`left-out`: a module fails because a rule meant for it and its like leaves it out: `w[kv]` where `w[qkv]` was meant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.fold import fold_paths
from parallelizer.language.plan import Rule
from parallelizer.simulate.checks.followed_step import MIXED, Followed


def left_out(followed: Followed) -> Iterator[Diagnostic]:
    """A failing module without a style of its own, of whose kind a rule styles others.

    Its kind is, first, the same module of other layers; then, where a plain tensor met a DTensor, its siblings that take
    inputs of the same width.
    """
    failure = followed.failure
    if failure is None:
        return
    module = followed.one(failure.module)
    styled = {a.module: a.rule for a in followed.program.of_slot("params")}
    if module in styled:
        return
    like = [path for path in styled if _in_any_layer(path) == _in_any_layer(module)]
    if not like and MIXED in failure.text:
        like = [path for path in styled if _siblings(followed.model, path, module)]
    if not like:
        return
    rules: dict[int, Rule] = {id(styled[path]): styled[path] for path in like}
    # The rule of most of them, the first such: w[kv] before wo, which has a rule with others.
    most, _ = Counter(id(styled[path]) for path in like).most_common(1)[0]
    rule = rules[most]
    others = fold_paths([path for path in like if styled[path] is rule])
    shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    _, related = followed.blamed(failure)
    yield Diagnostic(
        "left-out",
        f"this rule matches {shown} but not {module}, which fails: {failure.text}",
        rule.span,
        f"let the glob match {module} too, or give it a rule of its own",
        related=tuple(r for r in related if r.span != rule.span),
    )


def _in_any_layer(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _siblings(model: nn.Module, path: str, module: str) -> bool:
    if path.rpartition(".")[0] != module.rpartition(".")[0]:
        return False
    one, other = model.get_submodule(path), model.get_submodule(module)
    return type(one) is type(other) and _width(one) == _width(other)


def _width(module: nn.Module) -> int | None:
    """The size of the last dimension of what it takes, by its weight."""
    weight = getattr(module, "weight", None)
    return weight.size(-1) if weight is not None and weight.dim() else None
