"""Few globs for many modules or parameters, written as a person would: `model.layers.*.self_attn.{q,k,v}_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from parallelizer.language.fold import fold_alternatives, fold_paths
from parallelizer.language.glob import parse_glob
from parallelizer.propose.from_transformers.tp_plan import with_wildcards

_NAMES = re.compile(r"\{(\w+(?:,\w+)+)\}")


def globs_for(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Globs that match exactly `names` among `every` module and parameter of a model, layers as `*` where all are meant.

    In order of the first name that each matches.
    """
    wanted = dict.fromkeys(names)
    patterns: dict[str, None] = {}
    single: list[str] = []
    for key, members in _by_key(wanted).items():
        if set(parse_glob(key).select(every)) == set(members):
            patterns[key] = None
        else:
            single += members
    folded = [*fold_alternatives(patterns), *(fold_paths(single) if single else ())]
    at = {name: i for i, name in enumerate(names)}
    shared = [_shared(glob) for glob in folded]
    return sorted(shared, key=lambda glob: min(at[n] for n in parse_glob(glob).select(names)))


def _by_key(names: Iterable[str]) -> dict[str, list[str]]:
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(with_wildcards(name), []).append(name)
    return by_key


def _shared(glob: str) -> str:
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
