"""The ways a person breaks a plan, each made from the plan's own tree wherever it can happen."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from parallelizer.language.styles import STYLES
from tests.mutation import tree as trees
from tests.mutation.tree import Place, Tree, Where

TENSOR, DATA, CONTEXT, BOTH = "tp2", "fsdp2_tp2", "cp2", "cp2_tp2"
PLACEMENTS = ("replicate", "stream", "shard(0)", "shard(2)")


@dataclass(frozen=True)
class Source:
    """A plan to be broken: its tree, and the configuration that it belongs to. `has_cp` tells whether it can stand
    on a mesh with cp.
    """

    name: str
    tree: Tree = field(compare=False)
    overrides: tuple[str, ...] = ()
    has_cp: bool = True


@dataclass(frozen=True)
class Mutant:
    """A plan broken in one way. `line` is the line of `text` that was changed, None where one was taken out;
    `overrides` make its configuration, but for the plan. `preset_text` is a preset of its own.
    """

    plan: str
    kind: str
    name: str
    text: str
    line: int | None
    preset: str
    overrides: tuple[str, ...] = ()
    preset_text: str = ""

    @property
    def changed(self) -> str:
        """The line that was changed, as it is now."""
        return self.text.splitlines()[self.line - 1].strip() if self.line else "(taken out)"


Broken = tuple[str, Tree | None, str]
"""(what was done, the tree after it, the preset that shows it)."""
Way = Callable[[Source, random.Random], Iterator[Broken]]


def mutants(source: Source, seed: int = 0) -> Iterator[Mutant]:
    """Every mutant of a plan, each text once for a preset; the seed chooses letters and no more."""
    before = trees.write_tree(source.tree)
    seen = {(before, p) for p in (TENSOR, DATA, CONTEXT, BOTH)}
    for kind, way in WAYS.items():
        dice = random.Random(f"{seed} {source.name} {kind}")
        for name, tree, preset in way(source, dice):
            if tree is None or (preset in (CONTEXT, BOTH) and not source.has_cp):
                continue
            text = trees.write_tree(tree)
            if (text, preset) not in seen:
                seen.add((text, preset))
                yield Mutant(source.name, kind, name, text, _changed(before, text), preset, source.overrides)
    yield from _presets(source, before, random.Random(f"{seed} {source.name}"))


def _changed(before: str, after: str) -> int | None:
    old, new = before.splitlines(), after.splitlines()
    if len(new) < len(old):
        return None
    return next(i for i, line in enumerate(new, 1) if i > len(old) or line != old[i - 1])


def _preset(source: Source, glob: str) -> str:
    """The smallest mesh on which the rule does something."""
    styles = [style for g, _, style, _ in trees.uses(source.tree) if g == glob]
    if "fsdp" in styles:
        return DATA
    return CONTEXT if "context-parallel" in styles else TENSOR


def _preset_at(source: Source, place: Place) -> str:
    if place.where[0] == "rules":
        return _preset(source, str(place.where[1]))
    return CONTEXT if place.where[0] == "buffers" else TENSOR


# Letters


def slips(word: str, dice: random.Random) -> list[str]:
    """One of each: a letter left out, doubled, another one, two exchanged."""
    at = dice.randrange(len(word))
    pair = dice.randrange(max(1, len(word) - 1))
    other = dice.choice([c for c in "aeiorstlnx_12" if c != word[at]])
    made = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + other + word[at + 1 :],
        word[:pair] + word[pair : pair + 2][::-1] + word[pair + 2 :],
    ]
    return [w for w in dict.fromkeys(made) if w and w != word]


def _typos(*parts: str) -> Way:
    def way(source: Source, dice: random.Random) -> Iterator[Broken]:
        for place in trees.places(source.tree):
            if place.part not in parts:
                continue
            spans = [(m.start(), m.end()) for m in re.finditer(r"\w+", place.text)]
            texts = [
                place.text[:a] + slip + place.text[b:]
                for a, b in spans
                for slip in slips(place.text[a:b], dice)
            ]
            if place.part == "glob":  # the letters and signs of a glob are all worth leaving out
                texts += [place.text[:i] + place.text[i + 1 :] for i in range(len(place.text))]
            for text in dict.fromkeys(texts):
                yield f"{place.text} -> {text}", _put(source.tree, place, text), _preset_at(source, place)

    return way


def _put(tree: Tree, place: Place, text: str) -> Tree | None:
    if place.is_key:
        return trees.renamed(tree, place.where, text)
    changed: Tree = trees.replaced(tree, place.where, lambda _: text)
    return changed


# Rules and styles


def _rule_deleted(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob in source.tree["rules"]:
        for preset in dict.fromkeys([_preset(source, glob), BOTH]):
            yield f"{glob or 'the root'} deleted", trees.removed(source.tree, ("rules", glob)), preset


def _alternative_left_out(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob in source.tree["rules"]:
        for text in _without_one(glob):
            preset = _preset(source, glob)
            yield f"{glob} -> {text}", trees.renamed(source.tree, ("rules", glob), text), preset


def _without_one(glob: str) -> list[str]:
    """The glob with one alternative of its braces, or one letter of its brackets, left out."""
    found = []
    for match in re.finditer(r"\{([^{}]*)\}|\[([^\]]*)\]", glob):
        parts = match[1].split(",") if match[1] else list(match[2])
        for gone in range(len(parts)):
            rest = [p for i, p in enumerate(parts) if i != gone]
            inner = (
                ("{" + ",".join(rest) + "}" if len(rest) > 1 else rest[0])
                if match[1]
                else f"[{''.join(rest)}]"
            )
            found.append(glob[: match.start()] + inner + glob[match.end() :])
    return found


def _exchanged(source: Source, dice: random.Random) -> Iterator[Broken]:
    other = {"colwise": "rowwise", "rowwise": "colwise"}
    for glob, where, style, options in trees.uses(source.tree):
        if style in other:
            kept = _use(other[style], options)
            yield f"{glob}: {other[style]}", trees.replaced(source.tree, where, lambda _, k=kept: k), TENSOR


def _another_style(source: Source, dice: random.Random) -> Iterator[Broken]:
    names = ("colwise", "rowwise", "sequence", "replicate")
    for glob, where, style, options in trees.uses(source.tree):
        for new in names if style in names else ():
            if new != style and {new, style} != {"colwise", "rowwise"}:
                kept = _use(new, {k: v for k, v in options.items() if k in STYLES[new].options})
                yield f"{glob}: {new}", trees.replaced(source.tree, where, lambda _, k=kept: k), TENSOR


def _wrong_grad(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob, where, style, options in trees.uses(source.tree):
        for grad in ("partial", "replicate"):
            if style in ("sequence", "replicate"):
                use = _use("replicate", {"grad": grad})
            elif style == "prepare-input":
                use = _use(style, {**options, "local": "true", "grad": grad})
            else:
                continue
            yield f"{glob}: grad: {grad}", trees.replaced(source.tree, where, lambda _, u=use: u), TENSOR


def _local(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob, where, style, options in trees.uses(source.tree):
        for value in ("true", "false") if "local" in STYLES[style].options else ():
            use = _use(style, {**options, "local": value})
            yield f"{glob}: local: {value}", trees.replaced(source.tree, where, lambda _, u=use: u), TENSOR


def _use(style: str, options: dict[str, object]) -> object:
    return {"style": style, **options} if options else style


def _elsewhere(source: Source, dice: random.Random) -> Iterator[Broken]:
    globs = list(source.tree["rules"])
    for glob in globs:
        preset = _preset(source, glob)
        targets = [re.sub(r"\.?[^.]*$", "", glob)] if glob else []
        if preset == CONTEXT:
            targets += [g for g in globs if g != glob]
        for target in targets:
            moved = trees.renamed(source.tree, ("rules", glob), target)
            if moved is None:  # the module has a rule: a list of two
                moved = trees.removed(source.tree, ("rules", glob))
                both = [source.tree["rules"][target], source.tree["rules"][glob]]
                moved = trees.replaced(moved, ("rules", target), lambda _, b=both: b)
            yield f"{glob} -> {target or 'the root'}", moved, preset


def _fewer_layers(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob in source.tree["rules"]:
        if ".*" in glob:
            text = glob.replace(".*", ".0", 1)
            preset = _preset(source, glob)
            yield f"{glob} -> {text}", trees.renamed(source.tree, ("rules", glob), text), preset


def _too_wide(source: Source, dice: random.Random) -> Iterator[Broken]:
    for glob, text in _widened(source):
        yield f"{glob} -> {text}", trees.renamed(source.tree, ("rules", glob), text), _preset(source, glob)


def _widened(source: Source) -> Iterator[tuple[str, str]]:
    for glob in source.tree["rules"]:
        for text in {re.sub(r"\[[^\]]*\]|\{[^}]*\}", "*", glob), re.sub(r"[^.]+$", "*", glob)} - {glob}:
            yield glob, text


def _wrong_order(source: Source, dice: random.Random) -> Iterator[Broken]:
    rules = source.tree["rules"]
    for glob in rules:
        rest = {k: v for k, v in rules.items() if k != glob}
        for what, order in (("first", {glob: rules[glob], **rest}), ("last", {**rest, glob: rules[glob]})):
            yield f"{glob or 'the root'} {what}", {**source.tree, "rules": order}, _preset(source, glob)
    for glob, text in _widened(source):
        rest = {k: v for k, v in rules.items() if k not in (glob, text)}
        order = {**rest, text: rules[glob]}
        yield f"{glob} -> {text}, last", {**source.tree, "rules": order}, _preset(source, glob)


# Layouts


def _wrong_dim(source: Source, dice: random.Random) -> Iterator[Broken]:
    for place in trees.places(source.tree):
        for match in re.finditer(r"shard\((\d)\)", place.text if place.part == "placement" else ""):
            for dim in (int(match[1]) - 1, int(match[1]) + 1, int(match[1]) + 2):
                text = place.text[: match.start()] + f"shard({dim})" + place.text[match.end() :]
                for preset in (TENSOR, BOTH):
                    yield f"{place.text} -> {text}", _put(source.tree, place, text), preset


def _option_dropped(source: Source, dice: random.Random) -> Iterator[Broken]:
    for place in trees.places(source.tree):
        if place.part == "option":
            name = f"{place.where[1]}: no {place.text}"
            yield name, trees.removed(source.tree, place.where), _preset_at(source, place)


def _layout_swapped(source: Source, dice: random.Random) -> Iterator[Broken]:
    for place in trees.places(source.tree):
        if place.part != "placement" or place.where[0] == "layouts":
            continue
        sides = place.text.split(" -> ")
        texts = [" -> ".join(new) for new in _swapped(sides, source)]
        if len(sides) == 2:
            texts += [" -> ".join(sides[::-1]), *sides]
        for text in dict.fromkeys(texts):
            yield f"{place.where[1]}: {place.text} => {text}", _put(source.tree, place, text), TENSOR
    for glob, where, style, options in trees.uses(source.tree):  # one that is not there
        for option in ("input", "output"):
            if style in ("colwise", "rowwise") and option not in options:
                for text in ("replicate", "stream", "shard(2)"):
                    if text != "stream" or source.tree.get("layouts"):
                        use = _use(style, {**options, option: text})
                        done = trees.replaced(source.tree, where, lambda _, u=use: u)
                        yield f"{glob}: {option}: {text}", done, TENSOR


def _swapped(sides: list[str], source: Source) -> Iterator[list[str]]:
    for index, side in enumerate(sides):
        for new in PLACEMENTS:
            if new != side and (new != "stream" or "stream" in source.tree.get("layouts", {})):
                yield [*sides[:index], new, *sides[index + 1 :]]


def _layout_everywhere(source: Source, dice: random.Random) -> Iterator[Broken]:
    for name, value in source.tree.get("layouts", {}).items():
        where: Where = ("layouts", name)
        yield f"{name} dropped", trees.removed(source.tree, where), TENSOR
        for new in ("replicate", "shard(1)"):
            if new != value:
                for preset in (TENSOR, BOTH):
                    yield f"{name}: {new}", trees.replaced(source.tree, where, lambda _, n=new: n), preset


# Buffers and meshes


def _buffer_dropped(source: Source, dice: random.Random) -> Iterator[Broken]:
    buffers = source.tree.get("buffers", {})
    gone: list[Where] = [("buffers",), *(("buffers", s) for s in buffers)] if buffers else []
    gone += [("buffers", s, name) for s, entries in buffers.items() for name in entries]
    gone += [
        ("buffers", s, name, key)
        for s, entries in buffers.items() for name, said in entries.items() if isinstance(said, dict) for key in said
    ]  # fmt: skip
    for where in gone:
        for preset in (CONTEXT, BOTH):
            yield f"{' '.join(map(str, where))} dropped", trees.removed(source.tree, where), preset


def _buffer_dim(source: Source, dice: random.Random) -> Iterator[Broken]:
    for place in trees.places(source.tree):
        if place.part == "dim":
            for dim in {0, 1, 2} - {int(place.text)}:
                for preset in (CONTEXT, BOTH):
                    yield f"{place.where[2]}: {dim}", _put(source.tree, place, str(dim)), preset


def _presets(source: Source, text: str, dice: random.Random) -> Iterator[Mutant]:
    """What goes wrong in a preset: a degree that does not divide, a letter off in an axis."""
    for preset in (TENSOR, DATA, *((CONTEXT, BOTH) if source.has_cp else ())):
        sizes = _sizes(preset)
        for axis in sizes:
            overrides = (*source.overrides, f"parallel.mesh.{axis}=3")
            yield Mutant(source.name, "a degree that does not divide", f"{axis}=3 in {preset}", text, None, preset,
                         overrides)  # fmt: skip
            for slip in slips(axis, dice):
                mesh = ", ".join(f"{slip if a == axis else a}: {n}" for a, n in sizes.items())
                own = f"defaults: [base]\nmesh: {{{mesh}}}\n"
                yield Mutant(source.name, "a letter off in an axis", f"{axis} -> {slip} in {preset}", text, 2, preset,
                             source.overrides, own)  # fmt: skip


def _sizes(preset: str) -> dict[str, str]:
    written = trees.read_tree(Path(__file__).parents[2] / "configs" / "parallel" / f"{preset}.yaml")
    return dict(written["mesh"])


WAYS: dict[str, Way] = {
    "a rule deleted": _rule_deleted,
    "a module left out of a rule": _alternative_left_out,
    "colwise for rowwise and back": _exchanged,
    "sequence for replicate, another style": _another_style,
    "a wrong `grad`": _wrong_grad,
    "`local` set": _local,
    "a rule on another module": _elsewhere,
    "a rule on the first layer only": _fewer_layers,
    "a glob too wide": _too_wide,
    "rules in another order": _wrong_order,
    "a wrong shard dimension": _wrong_dim,
    "an option dropped": _option_dropped,
    "a layout swapped in one place": _layout_swapped,
    "a layout switched everywhere": _layout_everywhere,
    "a buffer dropped": _buffer_dropped,
    "a wrong buffer dimension": _buffer_dim,
    "a letter off in a glob": _typos("glob"),
    "a letter off in a style": _typos("style"),
    "a letter off in an option": _typos("option"),
    "a letter off in a value": _typos("placement", "choice", "layout", "name", "buffer"),
}
"""The kinds of mutation in plans. Where two ways lead to one text, it is counted with the first."""

KINDS = (*WAYS, "a degree that does not divide", "a letter off in an axis")
__all__ = ["KINDS", "WAYS", "Mutant", "Source", "mutants"]
