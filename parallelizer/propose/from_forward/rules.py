"""From roles to the rules of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parallelizer.propose.from_forward.facts import CalledModule, Facts, SplitRegion
from parallelizer.propose.from_forward.gathered import gathered
from parallelizer.propose.globs import pattern

SMALL_TABLE = 16
"""Rows below which an embedding is left whole: splitting it costs a sum and saves nothing."""


@dataclass(frozen=True)
class ProposedRule:
    """A rule for some modules, each style as text, with what is said of it."""

    modules: tuple[str, ...]
    styles: tuple[str, ...]
    comment: str


@dataclass(frozen=True)
class Choice:
    """What of a proposal stands. `stream` is how the residual stream lies over tp, `units` what is split over tp, by key,
    `context` whether the sequence is split over cp, `divided` whether numbers of heads that modules hold are divided,
    `gathered` what is given the whole of a sequence that is split inside the model, as in `gathered.py`,
    `sharded_logits` whether the loss is given the head's output as it lies, `random` the modules that draw random numbers of
    each rank's own, `experts` says whether experts are shared out on meshes with ep, `apart` whether the embedding and the head
    are fsdp units of their own.
    """

    units: frozenset[str] = frozenset()
    stream: str = "shard(1)"
    context: bool = True
    gathered: str = ""
    divided: bool = True
    sharded_logits: bool = True
    experts: bool = True
    apart: bool = True
    random: frozenset[str] = frozenset()
    batch: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        """Whether the stream is split over tp."""
        return self.stream != "replicate"


def key(region: SplitRegion) -> str:
    """What regions of the same modules in other layers have in common."""
    return " ".join(sorted(pattern(path) for path in region.sources))


TABLES, HEADS = "embeddings", "heads"


def units(facts: Facts) -> dict[str, str]:
    """What can be split over tp or not, each by itself: keys, and in words what it is."""
    found: dict[str, str] = {}
    for region in facts.regions:
        found.setdefault(key(region), _WORDS[region.kind])
    if any(t.tokens and t.rows >= SMALL_TABLE for t in facts.tables):
        found[TABLES] = "the token embedding"
    if facts.heads and facts.tied and TABLES in found:
        found[TABLES] = "the token embedding, which is the head too,"  # they are split together or not at all
    elif facts.heads:
        found[HEADS] = "the head"
    return found


_WORDS = {"attention": "attention", "gated": "gated MLP", "mlp": "MLP", "experts": "experts"}


def lines(facts: Facts, choice: Choice) -> list[ProposedRule]:
    """The rules of a choice, in the order of the model's modules, fsdp and stages last."""
    order = {path: at for at, path in enumerate(facts.modules)}
    tensor = list(_tensor(facts, choice)) if choice.units else []
    context = [
        ProposedRule((path,), ("context-parallel",), "exact attention over a split sequence")
        for path in facts.attentions
    ]
    shared = [
        ProposedRule((path,), (style,), "on meshes with ep, each rank has some experts")
        for path, style in facts.experts.items()
    ]
    split = gathered(facts, choice.gathered) if choice.gathered else None
    inside = [
        ProposedRule(modules, (style,), comment) for modules, style, comment in (split.rules if split else ())
    ]
    model = [*tensor, *inside, *(context if choice.context else ()), *(shared if choice.experts else ())]
    model += ends(facts) if choice.apart else ()
    styled = {module for line in model for module in line.modules}
    blocks = ProposedRule(facts.blocks, ("fsdp", "stage"), "one block at a time")
    root = ProposedRule(
        ("",), ("fsdp",), "the root: what is in no block" if facts.blocks else "the whole model"
    )
    # A module has one rule: a block that has another style has these beside it.
    beside = [
        ProposedRule((m,), line.styles, line.comment)
        for line in (blocks, root)
        for m in line.modules
        if m in styled
    ]
    merged = _together([*model, *beside])
    merged.sort(key=lambda line: min(order[m] for m in line.modules))
    data = [
        ProposedRule(tuple(m for m in line.modules if m not in styled), line.styles, line.comment)
        for line in (blocks, root)
    ]
    return [*merged, *(line for line in data if line.modules)]


def ends(facts: Facts) -> list[ProposedRule]:
    """The token embedding and the head as fsdp units: in the root's unit they would be whole for all of the step. A table that
    modules share stays there, because one unit has it.
    """
    if facts.tied or not facts.blocks:
        return []
    tables = [t.module for t in facts.tables if t.tokens and t.rows >= SMALL_TABLE and not t.also]
    kept = "{style: fsdp, reshard_after_forward: false}"
    return [
        *(ProposedRule((table,), ("fsdp",), "") for table in tables),
        *(
            ProposedRule((head,), (kept,), "kept after forward: backward begins here")
            for head in facts.heads
            if head in facts.modules
        ),
    ]


def _together(single: list[ProposedRule]) -> list[ProposedRule]:
    """The styles of one module in one line, and modules of one parent, alike in styles and comment, as one line."""
    by_module: dict[str, list[ProposedRule]] = {}
    for line in single:
        for module in line.modules:
            by_module.setdefault(module, []).append(line)
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for module, own in by_module.items():
        styles = tuple(dict.fromkeys(style for line in own for style in line.styles))
        comment = ", ".join(dict.fromkeys(line.comment for line in own if line.comment))
        parent = pattern(module).rpartition(".")[0]
        groups.setdefault((parent, styles, comment), []).append(module)
    return [ProposedRule(tuple(modules), styles, comment) for (_, styles, comment), modules in groups.items()]


def _tensor(facts: Facts, choice: Choice) -> Iterator[ProposedRule]:
    chosen = [r for r in facts.regions if key(r) in choice.units]
    for table in facts.tables:
        if table.tokens and table.rows >= SMALL_TABLE and TABLES in choice.units:
            style = "{style: rowwise, input: replicate, output: stream}"
            yield ProposedRule((table.module, *table.also), (style,), "rows of tokens")
        elif choice.is_sharded and table.sequence_dim is not None:
            laid = layout_of(table.sequence_dim)
            style = f"{{style: prepare-output, output: replicate -> {laid}}}"
            yield ProposedRule((table.module,), (style,), "whole, and each rank takes its part of the stream")
    for region in chosen:
        yield from _region(facts, region, choice)
    heads = _head_unit(facts)
    if heads in choice.units:
        for head, by_token in facts.heads.items():
            arrives = "stream" if by_token else "replicate"
            sharded = choice.sharded_logits and head not in facts.computed_with
            leaves = "shard(-1), local: false" if sharded else "replicate"
            comment = "the loss takes its part of the logits" if sharded else "what the model returns"
            style = f"{{style: colwise, input: {arrives}, output: {leaves}}}"
            yield ProposedRule((head,), (style,), comment)
            for name in facts.biases.get(head, ()):
                yield ProposedRule((name,), (_shard(0, ()),), "the head's bias, by its other name")
    for module in facts.modules:
        if module in choice.random:
            yield ProposedRule((module,), ("local-random",), "each rank drops of its own part")
    yield from _beside(facts, chosen, choice)


def layout_of(sequence_dim: int) -> str:
    """The name of the layout that a table hands on, whose tokens are along this dimension: the stream's where they lie as in
    the stream.
    """
    return "stream" if sequence_dim == 1 else "rows" if sequence_dim == 0 else f"rows_{sequence_dim}"


def other_layouts(facts: Facts, choice: Choice) -> dict[str, str]:
    """The layouts beside the stream's that the rules name."""
    if not choice.is_sharded or not choice.units:
        return {}
    return {
        layout_of(dim): f"shard({dim})"
        for table in facts.tables
        if (dim := table.sequence_dim) is not None
        and dim != 1
        and not (table.tokens and table.rows >= SMALL_TABLE and TABLES in choice.units)
    }


def _experts(region: SplitRegion) -> Iterator[ProposedRule]:
    """A slice of every expert on each rank: what comes out is a term of a sum, and so are the gradients of what comes in."""
    for owner in dict.fromkeys([*region.terms, *region.sums]):
        flows = ", ".join(f"{name}: replicate" for name in region.terms.get(owner, ()))
        taken = f"input: {{{flows}}}, grad: partial"
        if owner not in region.sums:
            yield ProposedRule((owner,), (f"{{style: prepare-input, {taken}, local: true}}",), "experts")
        elif not flows:
            yield ProposedRule(
                (owner,), ("{style: prepare-output, output: partial -> replicate}",), "experts"
            )
        else:
            style = f"{{style: prepare-io, {taken}, local_input: true, output: partial -> replicate}}"
            yield ProposedRule((owner,), (style,), "experts: each rank has a slice of every one")
    for name, dim in region.grouped.items():
        style = _shard(dim, region.sources.get(name, ()))
        yield ProposedRule((name,), (style,), "up" if name in region.sources else "down: adds up over ranks")
    for name in region.once:
        yield ProposedRule((name,), ("{style: replicate, value: partial}",), "added once over all ranks")


def _shard(dim: int, parts: tuple[int, ...]) -> str:
    packed = f", packed: [{', '.join(map(str, parts))}]" if parts else ""
    return f"{{style: shard-params, params: shard({dim}){packed}}}"


def _region(facts: Facts, region: SplitRegion, choice: Choice) -> Iterator[ProposedRule]:
    for name, (dim, parts) in region.carried.items():
        yield ProposedRule((name,), (_shard(dim, parts),), "split with what it meets")
    for module, dim in region.normed.items():
        style = f"{{style: sequence, layout: shard({dim}), local: true}}"
        yield ProposedRule((module,), (style,), "a norm over all ranks' features")
    if region.grouped:
        yield from _experts(region)
        return
    for gate, names in region.gates.items():
        plain = any(
            part.own
            and path.startswith(f"{gate}.")
            and path not in (*region.sources, *region.consumers, *region.inside)
            for path, part in facts.parts.items()
        )
        slices = region.slices.get(gate, {})
        inputs = ", ".join((*(f"{name}: stream -> replicate" for name in names), *_sliced(slices)))
        local = ", local: true" if plain or slices else ""
        partial = ", local: true, grad: partial" if region.latent else local
        style = f"{{style: prepare-input, input: {{{inputs}}}{partial}}}"
        comment = "takes the whole stream" + (f", and {', '.join(slices)} of its heads" if slices else "")
        yield ProposedRule((gate,), (style,), comment)
    for module, slices in region.slices.items():
        if module not in region.gates:
            style = f"{{style: prepare-input, input: {{{', '.join(_sliced(slices))}}}, local: true}}"
            yield ProposedRule((module,), (style,), f"takes {', '.join(slices)} of a rank's heads")
    divided = region.divide if choice.divided else {}
    for module in region.latent:
        if module not in region.inside:
            yield ProposedRule((module,), ("replicate",), "whole, for a rank's heads: gradients are summed")
    for source, parts in region.sources.items():
        if region.latent:
            placed = ", ".join(f"{name}: shard(0)" for name in region.matrices[source])
            packed = f", packed: [{', '.join(map(str, parts))}]" if parts else ""
            style = f"{{style: shard-params, params: {{{placed}}}{packed}}}"
            yield ProposedRule((source,), (style,), "makes heads of latents")
            continue
        options = ["style: colwise"]
        if source in region.bare:
            options.append("input: stream")
        if parts:
            options.append(f"packed: [{', '.join(map(str, parts))}]")
        comment = {"attention": "feeds the attention", "gated": "gate and up", "mlp": "up"}[region.kind]
        if parts:
            comment = f"{comment}, {len(parts)} parts in one"
        style = "colwise" if len(options) == 1 else f"{{{', '.join(options)}}}"
        yield ProposedRule((source,), (style,), comment)
    for module in region.inside:
        yield ProposedRule((module,), ("replicate",), "whole, on a rank's heads: gradients are summed")
    for module, names in divided.items():
        if module not in (*region.sources, *region.consumers):  # these know their own sizes
            numbers = ", ".join(f'"{name}"' if "[" in name else name for name in names)
            style = f"{{style: shard-params, divide: [{numbers}]}}"
            yield ProposedRule((module,), (style,), "its forward counts heads: a rank has its share")
    for consumer in region.consumers:
        comment = "adds up over ranks" if region.kind == "attention" else "down: adds up over ranks"
        leaves = "replicate" if region.within else "stream"
        taken = region.taken.get(consumer, ())
        packed = f", packed: [{', '.join(map(str, taken))}]" if taken else ""
        own = ", own: true" if consumer in region.changed and not taken else ""
        yield ProposedRule((consumer,), (f"{{style: rowwise, output: {leaves}{packed}{own}}}",), comment)


def _sliced(slices: Mapping[str, int]) -> Iterator[str]:
    """Arguments with an entry for each head, as an option of `prepare-input` has them."""
    return (f"{name}: replicate -> shard({dim})" for name, dim in slices.items())


def may_shard_logits(facts: Facts, choice: Choice) -> bool:
    """Whether a chosen head's output can be left as it lies."""
    return _head_unit(facts) in choice.units and any(head not in facts.computed_with for head in facts.heads)


def _head_unit(facts: Facts) -> str:
    return TABLES if TABLES in units(facts) and facts.tied else HEADS


def _beside(facts: Facts, chosen: list[SplitRegion], choice: Choice) -> Iterator[ProposedRule]:
    """What stands on the stream between the regions: it runs on a part of the sequence where it can, and is given the whole
    where it cannot.
    """
    if not choice.is_sharded:
        return
    taken = {
        name for r in chosen if not r.grouped for name in (*r.sources, *r.consumers, *r.inside, *r.normed)
    }
    taken |= {t.module for t in facts.tables}
    taken |= set(facts.heads) if _head_unit(facts) in choice.units else set()
    gates = {gate for r in chosen for gate in r.gates}
    within = {r.within for r in chosen if r.within}
    for path in within:
        yield _whole_inside(facts.parts[path], "gives its parts rows of the whole stream")
    around = {outer for path in taken | gates for outer in _lineage(path)}
    for path, part in facts.parts.items():
        if (
            not path
            or path in around
            or not part.inner
            or part.argument is None
            or (gates | within).intersection(_lineage(path))
        ):
            continue  # it has a style, or what is in it has one
        outer = (p for each in _lineage(path) if (p := facts.parts.get(each)) is not None)
        if any(p.path != path and p.argument is not None and p.path not in around for p in outer):
            continue  # it is in one that is left whole
        if part.mixes or not part.own or _has_children(facts, path):
            yield _whole_inside(part, "not split: every rank computes all of it")
        else:
            # What code of no rule reads must be a plain tensor, as the stream is.
            plain = any(not (gates | taken).intersection(_lineage(m)) for m in part.read_in)
            local = ", local: true" if plain else ""
            style = f"{{style: sequence, layout: stream{local}}}"
            yield ProposedRule((path,), (style,), "each rank on its part of the sequence")


def _whole_inside(part: CalledModule, comment: str) -> ProposedRule:
    """A module that takes the whole stream and gives it back whole."""
    flows = f"input: {{{part.argument}: stream -> replicate}}, output: replicate -> stream, local_input: true"
    return ProposedRule((part.path,), (f"{{style: prepare-io, {flows}}}",), comment)


def _lineage(path: str) -> list[str]:
    """A module's path and those of the modules around it, outermost first, without the root."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)] if path else []


def _has_children(facts: Facts, path: str) -> bool:
    return any(other.startswith(f"{path}.") and part.own for other, part in facts.parts.items())


def unsplit(facts: Facts) -> dict[str, str]:
    """Modules of the model that stay whole over tp because of what its forward does, each with why, by pattern."""
    return {pattern(path): pattern(why) for path, why in facts.left.items() if path not in facts.heads}
