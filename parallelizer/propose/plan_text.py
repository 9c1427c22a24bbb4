"""A proposal as the text of a plan file."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from parallelizer.language.fold import fold_alternatives, fold_paths
from parallelizer.language.glob import escape, parse_glob
from parallelizer.propose.from_forward.facts import Facts
from parallelizer.propose.from_forward.rules import Choice, Line, lines, pattern

WIDTH = 110
WIDEST = 60  # a key that is longer stands in no column
WIDEST_VALUE = 40  # nor does a comment beside a longer value


def plan_text(facts: Facts, choice: Choice, title: str, said: Sequence[str] = ()) -> str:
    """The plan; `said` are sentences on what was left alone, as comments above the rules."""
    text = [f"# {title}"]
    for sentence in said:
        text += textwrap.wrap(sentence, WIDTH, initial_indent="# ", subsequent_indent="#   ")
    text.append("version: 1")
    if choice.units:
        comment = "the residual stream over tp"
        if choice.is_sharded:
            comment += "; `replicate` switches sequence parallelism off"
        text += ["layouts:", f"  stream: {choice.stream}   # {comment}"]
    text.append("rules:")
    text += _rules(facts, lines(facts, choice))
    if choice.batch or choice.buffers:
        text.append("buffers:   # what carries the sequence, and along which dimension")
        if choice.batch:
            text.append(f"  batch: {{{', '.join(f'{k}: {v}' for k, v in choice.batch.items())}}}")
        if choice.buffers:
            text.append(f"  model: {{{', '.join(_buffers(facts, choice))}}}")
    return "\n".join(text) + "\n"


def _buffers(facts: Facts, choice: Choice) -> list[str]:
    by_dim: dict[int, list[str]] = {}
    for name, dim in choice.buffers.items():
        by_dim.setdefault(dim, []).append(name)
    found = [(glob, dim) for dim, names in by_dim.items() for glob in globs(names, facts.buffers)]
    # In a map of one line braces and commas are YAML's.
    return [f'"{glob}": {dim}' if re.search(r"[*{}\[\],]", glob) else f"{glob}: {dim}" for glob, dim in found]


def globs(modules: Sequence[str], among: Sequence[str]) -> list[str]:
    """Globs for exactly these modules of a model: with wildcards where all layers are meant, else with ranges."""
    if list(modules) == [""]:
        return [""]
    alike: dict[str, list[list[str]]] = {}
    for module in modules:
        alike.setdefault(pattern(module), []).append(module.split("."))
    for starred in (_numbered, _varying):
        wide = fold_alternatives(dict.fromkeys(starred(of, some) for of, some in alike.items()))
        if {path for glob in wide for path in parse_glob(glob).select(among)} == set(modules):
            return wide
    return fold_paths(modules)


def _numbered(of: str, some: Sequence[Sequence[str]]) -> str:
    """A wildcard for every number: `layers.*.ff.*`."""
    return ".".join("*" if segment == "*" else escape(segment) for segment in of.split("."))


def _varying(of: str, some: Sequence[Sequence[str]]) -> str:
    """A wildcard for every number that is not the same in all of them: `layers.*.ff.0`."""
    columns = zip(of.split("."), *some, strict=True)
    return ".".join("*" if segment == "*" and len(set(at)) > 1 else escape(at[0]) for segment, *at in columns)


def _rules(facts: Facts, found: Sequence[Line]) -> list[str]:
    """The lines of the rules: keys and comments in columns, and what is too long for its line below its key."""
    rows = [
        (f"{_quoted(glob)}:", line.styles, line.comment if at == 0 else "")
        for line in found
        for at, glob in enumerate(globs(line.modules, facts.modules))
    ]
    keys = max((len(key) for key, _, _ in rows if len(key) <= WIDEST), default=0)
    values = {styles: styles[0] if len(styles) == 1 else f"[{', '.join(styles)}]" for _, styles, _ in rows}
    short = [len(values[styles]) for _, styles, _ in rows if len(values[styles]) <= WIDEST_VALUE]
    column = 3 + keys + max(short, default=0)
    text = []
    for key, styles, comment in rows:
        row = f"  {key:<{keys}} {values[styles]}"
        beside = (f"{row:<{column}}   # {comment}", f"{row}   # {comment}") if comment else (row,)
        fitting = next((line for line in beside if len(line) <= WIDTH), None)
        if fitting is not None:
            text.append(fitting)
            continue
        if comment:
            text += textwrap.wrap(comment, WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        if len(row) <= WIDTH or len(styles) == 1:
            text.append(row)
        else:
            text += [f"  {key}", *(f"    - {style}" for style in styles)]
    return text


def _quoted(key: str) -> str:
    """A key as YAML takes it for text."""
    return (
        key
        if re.fullmatch(r"[A-Za-z_][\w.*{},\[\]-]*", key) and not re.search(r"[,{}\[\]]\s", key)
        else f'"{key}"'
    )
