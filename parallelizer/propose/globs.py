"""Few globs for many modules or parameters, written as a person would: `model.layers.*.self_attn.q_proj`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parallelizer.language.fold import fold_alternatives, fold_paths
from parallelizer.language.glob import escape, parse_glob

_NAMES = re.compile(r"\{(\w+(?:,\w+)+)\}")


def pattern(path: str) -> str:
    """A path with every number in it as a wildcard: what the same module of all layers has in common."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def globs_for(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Globs that match exactly `names` among `every` path of a model, in order of the first name that each matches.

    Numbers are wildcards where all layers are meant, and ranges elsewhere.
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(pattern(name), []).append(name)
    patterns: list[str] = []
    single: list[str] = []
    for of, members in alike.items():
        exact = (
            g
            for g in (_numbered(of), _varying(of, members))
            if set(parse_glob(g).select(every)) == set(members)
        )
        wildcards = next(exact, None)
        if wildcards is None:
            single += members
        else:
            patterns.append(wildcards)
    folded = [*fold_alternatives(patterns), *fold_paths(single)]
    at = {name: i for i, name in enumerate(names)}
    return sorted(folded, key=lambda glob: min(at[name] for name in parse_glob(glob).select(names)))


def _numbered(of: str) -> str:
    """A wildcard for every number: `layers.*.ff.*`."""
    return ".".join("*" if segment == "*" else escape(segment) for segment in of.split("."))


def _varying(of: str, members: Sequence[str]) -> str:
    """A wildcard for every number that is not the same in all of them: `layers.*.ff.0`."""
    columns = zip(of.split("."), *(name.split(".") for name in members), strict=True)
    return ".".join("*" if segment == "*" and len(set(at)) > 1 else escape(at[0]) for segment, *at in columns)


def ends_in_common(glob: str) -> str:
    """Braces around what differs: `{gate_proj,up_proj}` is `{gate,up}_proj`."""

    def shorter(match: re.Match[str]) -> str:
        names = match[1].split(",")
        words = [name.split("_") for name in names]
        tail = 0
        while all(len(w) > tail + 1 for w in words) and len({w[-1 - tail] for w in words}) == 1:
            tail += 1
        if not tail:
            return match[0]
        end = "_" + "_".join(words[0][-tail:])
        heads = [name.removesuffix(end) for name in names]
        return "{" + ",".join(heads) + "}" + end

    return _NAMES.sub(shorter, glob)
