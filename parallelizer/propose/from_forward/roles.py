"""From what a forward did to the roles that modules play in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch import nn

from parallelizer.propose.from_forward.atoms import BATCH, FEATURE, SEQUENCE, UNIFORM, Atom, Bond, leaves
from parallelizer.propose.from_forward.counted import CountedView
from parallelizer.propose.from_forward.experts import experts
from parallelizer.propose.from_forward.facts import CalledModule, Facts, SplitRegion, Table
from parallelizer.propose.from_forward.seen import Projection, Seen, SeenCall, Sliceable, Written, sums_over
from parallelizer.torch_private import has_empty_child


def roles(model: nn.Module, seen: Seen) -> Facts:
    """What every module does, by what was seen."""
    finder = _RoleFinder(model, seen)
    regions = tuple(finder.regions())
    named = [name for region in regions for name in (*region.grouped, *region.carried, *region.once)]
    heads = finder.heads(regions)
    biases = finder.biases(heads)
    named += [name for names in biases.values() for name in names]
    return Facts(
        regions,
        tuple(finder.tables()),
        heads,
        tuple(finder.blocks),
        tuple(dict.fromkeys(a.module for a in seen.attentions)),
        finder.parts(),
        finder.left(regions),
        _with_parameters([path for path, _ in model.named_modules()], named),
        tuple(name for name, _ in model.named_buffers()),
        finder.tied(),
        frozenset(head for head in heads if finder.is_needed_whole(head)),
        experts(model, seen),
        seen.written_out,
        biases,
        tuple(sorted(map(str, seen.mixing))),
        finder.needing(),
    )


def _with_parameters(modules: Iterable[str], parameters: Iterable[str]) -> tuple[str, ...]:
    """Modules in their order, some parameters behind their own."""
    behind: dict[str, list[str]] = {}
    for name in dict.fromkeys(parameters):
        behind.setdefault(name.rpartition(".")[0], []).append(name)
    return tuple(name for path in modules for name in (path, *behind.get(path, ())))


def blocks(model: nn.Module, called: Iterable[str]) -> list[str]:
    """The repeated blocks: children of one list that are of one class, have parameters and modules in them, and are called;
    those of the outermost lists. Of children that are lists themselves, and so not called, what is called in each of them
    and has most of its parameters.
    """
    ran = set(called)
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        if any(path.startswith(f"{block}.") for block in found):
            continue
        prefix = f"{path}." if path else ""
        children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
        if has_empty_child(module):  # parts of one thing, some of which may be missing
            continue
        kinds = {type(child) for _, child in children}
        if len(kinds) == 1 and all(
            name in ran and any(True for _ in child.children()) and any(True for _ in child.parameters())
            for name, child in children
        ):
            found += [name for name, _ in children]
        elif kinds == {nn.ModuleList} and len(children) > 1:
            main = [_main_part(name, child, ran) for name, child in children]
            if all(main):
                found += filter(None, main)
    return found


def _main_part(path: str, container: nn.Module, ran: set[str]) -> str | None:
    """The outermost called module inside a container that has more than half of its parameters."""
    half = _held(container) / 2
    inside = [(f"{path}.{name}", module) for name, module in container.named_modules() if name]
    return next((name for name, module in inside if name in ran and _held(module) > half), None)


def _held(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class _RoleFinder:
    def __init__(self, model: nn.Module, seen: Seen) -> None:
        self.model, self.seen = model, seen
        self.modules = dict(model.named_modules())
        self.refusals: dict[int, tuple[str, str]] = {}
        self.bonds: dict[int, Bond] = {}  # held, so that nothing else gets an id
        for dims in seen.dims.values():
            for dim in dims:
                self._judge(leaves(dim))
        for projection in seen.projections:
            self._judge(_made_atoms(projection.made))
        self.by_module: dict[str, list[Projection]] = {}
        for projection in seen.projections:
            self.by_module.setdefault(projection.module, []).append(projection)
        self.why: dict[str, str] = {}
        self.blocks = blocks(model, {p.module for p in seen.calls})

    def _judge(self, atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            bond = atom.group()
            self.bonds[id(bond)] = bond
            if atom.refused and id(bond) not in self.refusals:
                self.refusals[id(bond)] = (atom.refused, atom.where)

    def regions(self) -> list[SplitRegion]:
        """What can be split together, in order of execution; a linear has one part in one region."""
        made: dict[int, list[Projection]] = {}
        taken: dict[int, list[Projection]] = {}
        for projection in self.seen.projections:
            for bond in dict.fromkeys(id(a.group()) for a in _made_atoms(projection.made)):
                made.setdefault(bond, []).append(projection)
            first = leaves(projection.taken)[:1]
            if first:
                taken.setdefault(id(first[0].group()), []).append(projection)
                self._say_of_the_input(projection, first[0])
        heads = {id(a.group()) for call in self.seen.attentions for a in call.heads if a is not None}
        heads |= {id(a.group()) for a in self.seen.weighed}  # written out: a softmax for each head
        found: list[tuple[int, SplitRegion]] = []
        used: set[str] = set()
        # Heads come first: what makes latent queries could be split with what makes queries of them.
        for at, (bond, sources) in sorted(enumerate(made.items()), key=lambda item: item[1][0] not in heads):
            consumers = taken.get(bond, [])
            names = {p.module for p in sources} | {p.module for p in consumers}
            if not consumers:
                self._say(sources, bond, "its output is not the input of a linear")
                continue
            if self._reason(bond):
                self._say([*sources, *consumers], bond, "")
                continue
            if len({p.weight is None for p in (*sources, *consumers)}) > 1:
                self._say([*sources, *consumers], None, "experts and linears both use it")
                continue
            met = [name for p in consumers for name in self._met(p) if name not in self.seen.added]
            if met:
                reason = f"{met[0]} is combined with the sum"
                self._say([*sources, *consumers], None, reason)
                continue
            if bond not in heads and self._slices(bond):
                self._say([*sources, *consumers], None, "it is combined with a tensor that is not split")
                continue
            if (flat := self._flattened(bond)) is not None:
                reason = f"it is combined with {flat.name}, whose heads are not a dimension of their own, {_place(flat.module)}"
                self._say([*sources, *consumers], None, reason)
                continue
            parts = {p.module: _parts(p, bond) for p in sources}
            partial = [name for name, sizes in parts.items() if sizes is None]
            if partial or names & used or {p.module for p in sources} & {p.module for p in consumers}:
                reason = "only a part of its output can be split" if partial else "it is split in another way"
                self._say([p for p in sources if p.module not in used], None, reason)
                continue
            if not all(self._always(p.module, bond) for p in (*sources, *consumers)):
                self._say([*sources, *consumers], None, "it is called in ways that differ")
                continue
            used |= names
            grouped = sources[0].weight is not None
            kind = (
                "experts"
                if grouped
                else "attention"
                if bond in heads
                else "gated"
                if _distinct(sources) > 1
                else "mlp"
            )
            region = self._region(kind, bond, sources, consumers, parts)
            if region.views and kind == "attention":
                region = self._split_inside(heads - {bond}, sources, consumers) or region
            found.append((at, region))
        return [region for _, region in sorted(found, key=lambda item: item[0])]

    def _split_inside(
        self, heads: set[int], sources: Sequence[Projection], consumers: Sequence[Projection]
    ) -> SplitRegion | None:
        """The same linears, split by the heads in each of the blocks that the forward counts by a number (CodeGen); None where
        these are counted by a number too.
        """
        for bond in dict.fromkeys(id(a.group()) for p in consumers for a in leaves(p.taken)):
            parts = {p.module: _runs(leaves([p.made]), bond) for p in sources}
            taken = {p.module: _runs(leaves(p.taken), bond) for p in consumers}
            refused = self.refusals.get(bond, ("", ""))[0]
            own = not refused or refused in {sums_over(p.module) for p in consumers}
            if bond not in heads or not own or not all((*parts.values(), *taken.values())):
                continue
            ratios = {name: _ratios(sizes or ()) for name, sizes in parts.items()}
            region = self._region("attention", bond, sources, consumers, {**ratios})
            if not region.views:
                return dataclasses.replace(
                    region, taken={name: _ratios(sizes or ()) for name, sizes in taken.items()}
                )
        return None

    def _region(self, kind: str, bond: int, sources: Sequence[Projection], consumers: Sequence[Projection],
                parts: dict[str, tuple[int, ...] | None]) -> SplitRegion:  # fmt: skip
        ends = {met[1] for p in consumers if (met := p.made.met()) is not None}
        gates: dict[str, dict[str, None]] = {}
        bare: list[str] = []
        grouped = {p.module: p for p in (*sources, *consumers) if p.weight is not None}
        within = "" if grouped else self._within(sources)
        for source in () if grouped or within else sources:
            gate = self._gate(source, ends)
            if gate is None:
                bare.append(source.module)
            else:
                gates.setdefault(gate[0], {})[gate[1]] = None
        own = {p.module for p in (*sources, *consumers)}
        around = self._around_latents(sources, consumers) if kind == "attention" and bare else None
        latent: tuple[str, ...] = ()
        if around is not None:
            gates, bare = {around[0]: {around[1]: None}}, []
            latent = tuple(path for path in self._with_parameters_in(around[0]) if path not in own)
        normed = {module for module, atom in self.seen.normed if id(atom.group()) == bond}
        carried = self._carried(bond, {*own, *normed})
        inside: dict[str, None] = {}
        for use in self.seen.uses:
            if use.module in normed or f"{use.module}.{use.name}".lstrip(".") in {*carried, *grouped}:
                continue
            if use.module not in own and any(id(a.group()) == bond for d in use.dims for a in leaves(d)):
                inside[use.module] = None
        for p in self.seen.projections:
            if p.module not in own and any(id(a.group()) == bond for d in p.lead for a in leaves(d)):
                inside[p.module] = None
        divide = self._divided(bond)
        return SplitRegion(
            kind,
            {name: sizes or () for name, sizes in parts.items()},
            tuple(dict.fromkeys(p.module for p in consumers)),
            {path: tuple(names) for path, names in gates.items()},
            tuple(dict.fromkeys(bare)),
            within,
            tuple(inside),
            {path: tuple(names) for path, names in divide.items()},
            self._slices(bond),
            tuple(self._counted(bond)),
            {name: w.made if p in sources else w.taken for name, p in grouped.items() if (w := p.weight)},
            {p.weight.owner: self._floats(p.weight.owner) for p in sources if p.weight is not None},
            tuple(dict.fromkeys(p.weight.owner for p in consumers if p.weight is not None)),
            carried,
            dict.fromkeys(normed, 2),
            latent=latent,
            matrices={
                p.module: tuple(n for n, _ in self.modules[p.module].named_parameters(recurse=False))
                for p in sources
            }
            if latent
            else {},
            changed=frozenset(p.module for p in consumers if p.output in self.seen.changed),
            once=tuple(dict.fromkeys(name for p in consumers for name in self._met(p))),
        )

    def _met(self, consumer: Projection) -> list[str]:
        """The other parameters of a module of experts that meet what one of its parameters makes."""
        if consumer.weight is None:
            return []
        own, bond = f"{consumer.weight.owner}.".lstrip("."), id(consumer.made.group())
        return [
            name
            for name, dims in self.seen.parameters.items()
            if name.startswith(own) and any(id(a.group()) == bond for dim in dims for a in leaves(dim))
        ]

    def _floats(self, module: str) -> tuple[str, ...]:
        """The arguments of a module that may have a gradient."""
        return next((call.floats for call in self.seen.calls if call.module == module), ())

    def _carried(self, bond: int, others: set[str]) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Parameters that are split with the features that they meet, but for those of some modules."""
        found: dict[str, tuple[int, tuple[int, ...]]] = {}
        for name, dims in self.seen.parameters.items():
            for at, dim in enumerate(dims):
                if len(dim) == 1 and name not in others and name.rpartition(".")[0] not in others:
                    parts = _parts_of(dim[0], bond)
                    if parts is not None:
                        found[name] = at, parts
        return found

    def _slices(self, bond: int) -> dict[str, dict[str, int]]:
        """The arguments that meet what is split and are whole, by module, with the dimension that is to be split."""
        found: dict[str, dict[str, int]] = {}
        for each in self.seen.sliceable:
            first = leaves([each.atom])[:1]
            if first and id(first[0].group()) == bond:
                found.setdefault(each.module, {})[each.name] = each.dim
        return found

    def _flattened(self, bond: int) -> Sliceable | None:
        """An argument that is whole and has what is split behind something else in one dimension, as [rows * heads, 1, keys]."""
        inner = (e for e in self.seen.sliceable if any(id(a.group()) == bond for a in leaves([e.atom])[1:]))
        return next(inner, None)

    def _counted(self, bond: int) -> list[CountedView]:
        """The views that state how much there is of what is split, by a number that every rank has. Where one does, a size of
        an argument cannot be divided for another.
        """
        loose: list[CountedView] = []
        read: list[CountedView] = []
        for fixed in self.seen.fixed:
            first = [leaves(dim)[:1] for dim in fixed.dims]
            whole = [{a.kind for a in leaves(dim)} & {BATCH, SEQUENCE} for dim in fixed.dims]
            known = tuple(None if w or n < 2 else n for n, w in zip(fixed.sizes, whole, strict=True))
            for dim in (*fixed.loose, *fixed.read):
                if first[dim] and id(first[dim][0].group()) == bond:
                    (loose if dim in fixed.loose else read).append(CountedView(fixed.at, dim, known))
        return [*loose, *read] if loose else []

    def _divided(self, bond: int) -> dict[str, dict[str, None]]:
        """The numbers that views of what is split were given, by the module that holds them."""
        found: dict[str, dict[str, None]] = {}
        quotients: list[tuple[Written, bool]] = []
        whole = {
            each
            for written in self.seen.written
            if len(written.names) == 1 and not written.over and not _sizes_with(leaves(written.dim), bond)
            for each in written.names
        }
        for written in self.seen.written:
            sizes = _sizes_with(leaves(written.dim), bond)
            if written.over:
                quotients.append((written, bool(sizes)))
            for (path, name), value in written.names.items():
                # Of a product, what counts something that is whole elsewhere does so here.
                if (
                    value in sizes
                    and not written.over
                    and (len(written.names) == 1 or (path, name) not in whole)
                ):
                    found.setdefault(path or written.module, {})[name] = None
        # Of `C // self.n_head`, a head's size, both or neither are a rank's; of `C // self.size`, a number of heads, one.
        for written, split in quotients:
            is_over = any(name in found.get(path or written.module, {}) for path, name in written.over)
            if is_over != split:
                for path, name in written.names:
                    found.setdefault(path or written.module, {})[name] = None
            elif not split and any(
                name in found.get(path or written.module, {}) for path, name in written.names
            ):
                for path, name in written.over:
                    found.setdefault(path or written.module, {})[name] = None
        return found

    def _gate(self, source: Projection, ends: set[str]) -> tuple[str, str] | None:
        """The outermost module around a source through one of whose arguments its input comes, and that argument. What is added
        to the stream again is added outside.
        """
        around = [p for p in self.seen.calls if p.begun < source.order < p.ended]
        own = next((p for p in reversed(around) if p.module == source.module), None)
        given = next(iter(own.given.values()), source.given) if own else source.given
        for passage in around:
            if passage.module in ("", source.module) or any(_is_inside(end, passage.module) for end in ends):
                continue
            name = next((n for n, tensor in passage.given.items() if tensor == given), None)
            if name is not None:
                return passage.module, name
        return None

    def _around_latents(
        self, sources: Sequence[Projection], consumers: Sequence[Projection]
    ) -> tuple[str, str] | None:
        """The innermost module around all of these linears that takes the stream, and the argument with it, where other linears
        inside of it make what the sources take; None for a block, and where there is none.
        """
        every = (*sources, *consumers)
        own = {p.module for p in every}
        for passage in reversed(self.seen.calls):
            if passage.module in ("", *self.blocks, *own):
                continue
            if not all(passage.begun < p.order < passage.ended for p in every):
                continue
            name = next((n for n, t in passage.given.items() if len(self.seen.shapes.get(t, ())) == 3), None)
            before = max(p.order for p in sources)
            others = [
                p
                for p in self.seen.projections
                if p.module not in own
                and _is_inside(p.module, passage.module)
                and passage.begun < p.order < before
            ]
            return (passage.module, name) if name is not None and others else None
        return None

    def _with_parameters_in(self, outer: str) -> list[str]:
        """The modules inside of another that have parameters of their own."""
        return [
            path
            for path, module in self.modules.items()
            if path != outer
            and _is_inside(path, outer)
            and any(True for _ in module.parameters(recurse=False))
        ]

    def _within(self, sources: Sequence[Projection]) -> str:
        """The innermost module that takes the stream, of three dimensions, where all of these linears take rows of two; none
        where it is a block, in which other things are split.
        """
        if any(len(p.lead) != 1 for p in sources):
            return ""
        found = {self._taking_the_stream(p) for p in sources}
        return found.pop() if len(found) == 1 and not found & {*self.blocks, ""} else ""

    def _taking_the_stream(self, source: Projection) -> str:
        around = [p for p in self.seen.calls if p.begun < source.order < p.ended]
        return next(
            (
                p.module
                for p in reversed(around)
                if p.module != source.module
                and any(len(self.seen.shapes.get(t, ())) == 3 for t in p.given.values())
            ),
            "",
        )

    def _always(self, module: str, bond: int) -> bool:
        """Whether every call of a module makes or takes what is split."""
        return all(
            any(id(a.group()) == bond for a in _made_atoms(p.made))
            or any(id(a.group()) == bond for a in leaves(p.taken)[:1])
            for p in self.by_module[module]
        )

    def _reason(self, bond: int) -> str | None:
        if bond not in self.refusals:
            return None
        reason, where = self.refusals[bond]
        return f"{reason}, {_place(where)}" if where and where not in reason else reason

    def _say(self, projections: Iterable[Projection], bond: int | None, reason: str) -> None:
        """Note why linears are in no region: what became of their own output, or of what it meets, or else `reason`."""
        for projection in projections:
            met = projection.made.met() if bond is not None else None
            own = self._reason(bond) if bond is not None else None
            if met is not None:
                why = f"{met[0]}, {_place(met[1])}"
            elif own is not None:
                why = own
            else:
                why = reason
            self.why.setdefault(projection.module, why)

    def _say_of_the_input(self, projection: Projection, first: Atom) -> None:
        """Note why a linear cannot sum over what it takes."""
        reason = self._reason(id(first.group())) if first.kind == FEATURE else None
        if reason is not None:
            self.why.setdefault(projection.module, reason)

    def heads(self, regions: Sequence[SplitRegion]) -> dict[str, bool]:
        """Linears whose features the model returns as they are; whether each takes one row for each token."""
        in_regions = {n for r in regions for n in (*r.sources, *r.consumers)}
        returned = {
            id(a.group())
            for each in self.seen.output
            for d in self.seen.dims.get(each, ())[-1:]
            for a in leaves(d)
        }
        return {
            p.module: self.seen.shapes.get(p.given, ()).__len__() == 3
            for p in self.seen.projections
            if p.module not in in_regions
            and p.weight is None
            and (p.output in self.seen.output or self._is_untouched(p.made, returned))
            and len(self.by_module[p.module]) == 1
        }

    def is_needed_whole(self, head: str) -> bool:
        """Whether the forward itself does something with whole rows of what a head makes."""
        return any(id(a.group()) in self.refusals for p in self.by_module[head] for a in _made_atoms(p.made))

    def _is_untouched(self, made: Atom, returned: set[int]) -> bool:
        """Whether features are returned, each by itself."""
        root, bond = made.root(), id(made.group())
        return (
            root.kind == FEATURE
            and not root.children
            and not root.cuts
            and bond in returned
            and bond not in self.refusals
        )

    def tables(self) -> list[Table]:
        """The embeddings, each once."""
        found: dict[str, Table] = {}
        for lookup in self.seen.lookups:
            dims = lookup.dims[:-1]
            at = [d for d, dim in enumerate(dims) if any(a.kind != UNIFORM for a in leaves(dim))]
            weight = getattr(self.modules[lookup.module], "weight", None)
            rows = 0 if weight is None else weight.shape[0]
            table = Table(
                lookup.module, lookup.of_batch, at[-1] if at else None, rows, self._idle(lookup.module)
            )
            found.setdefault(lookup.module, table)
        return list(found.values())

    def _idle(self, table: str) -> tuple[str, ...]:
        """The other embeddings that hold a table's parameter, and are not called."""
        weight = getattr(self.modules[table], "weight", None)
        called = {call.module for call in self.seen.calls}
        return tuple(
            path
            for path, module in self.model.named_modules(remove_duplicate=False)
            if path not in called and isinstance(module, nn.Embedding) and module.weight is weight
        )

    def biases(self, heads: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The names under which other modules hold a head's bias."""
        found: dict[str, tuple[str, ...]] = {}
        for head in heads:
            bias = getattr(self.modules[head], "bias", None)
            others = tuple(
                f"{path}.{name}".lstrip(".")
                for path, module in self.modules.items()
                for name, parameter in module.named_parameters(recurse=False)
                if parameter is bias and path != head
            )
            if others:
                found[head] = others
        return found

    def tied(self) -> bool:
        """Whether a table is the weight of a linear too."""
        tables = {id(getattr(self.modules[lookup.module], "weight", None)) for lookup in self.seen.lookups}
        return any(
            p.weight is None and id(getattr(self.modules[p.module], "weight", None)) in tables
            for p in self.seen.projections
        )

    def parts(self) -> dict[str, CalledModule]:
        """Every module that was called."""
        found: dict[str, CalledModule] = {}
        for passage in self.seen.calls:
            module = self.modules[passage.module]
            found.setdefault(passage.module, self._part(passage, module))
        return found

    def _part(self, passage: SeenCall, module: nn.Module) -> CalledModule:
        argument = next((n for n, t in passage.given.items() if len(self.seen.shapes.get(t, ())) == 3), None)
        return CalledModule(
            passage.module,
            argument,
            any(True for _ in module.parameters(recurse=False)),
            any(True for _ in module.parameters()),
            any(_is_inside(m, passage.module) for m in self.seen.mixing),
            frozenset(m for result in passage.results for m in self.seen.read_in.get(result, ())),
            self._rows(passage),
        )

    def _rows(self, passage: SeenCall) -> tuple[str, ...]:
        """The arguments that have a block's tokens along dimension 1, none where what is handed on has other rows."""
        around = [
            call
            for call in self.seen.calls
            if call.module in self.blocks and call.begun <= passage.begun and passage.ended <= call.ended
        ]
        if not around or not passage.results:
            return ()
        block = around[0]
        shapes, floats = self.seen.shapes, set(block.floats)
        stream = next((n for n, t in block.given.items() if n in floats and len(shapes[t]) == 3), None)
        handed_on = shapes.get(passage.results[0], ())
        if stream is None or len(handed_on) != 3 or handed_on[:2] != shapes[block.given[stream]][:2]:
            return ()
        if passage is block:
            return (stream,)
        # What a block is given beside its stream, such as an encoder's output, is whole.
        whole = {t for n, t in block.given.items() if n != stream} - {block.given[stream]}
        return tuple(
            n
            for n in passage.floats
            if len(shape := shapes[passage.given[n]]) == 3
            and shape[:2] == handed_on[:2]
            and passage.given[n] not in whole
        )

    def needing(self) -> tuple[str, ...]:
        """The modules in which an operator needs a dimension of the sequence whole."""
        atoms = (a for dims in self.seen.dims.values() for dim in dims for a in (*dim, *leaves(dim)))
        return tuple(sorted({str(place) for atom in atoms for place in atom.needed}))

    def left(self, regions: Sequence[SplitRegion]) -> dict[str, str]:
        """Why linears are in no region."""
        in_regions = {n for r in regions for n in (*r.sources, *r.consumers)}
        why = {name: reason for name, reason in self.why.items() if name not in in_regions}
        known = {*in_regions, *why, *self.by_module, *(lookup.module for lookup in self.seen.lookups)}
        known |= {p.weight.owner for p in self.seen.projections if p.weight is not None}
        known |= {name.rpartition(".")[0] for region in regions for name in region.carried}
        known |= {path for table in self.tables() for path in table.also}
        for path, module in self.modules.items():
            if path not in known and any(p.ndim > 1 for p in module.parameters(recurse=False)):
                why[path] = (
                    "the forward does not use it as a linear, an embedding or experts, which `init` splits; its class is "
                    f"{type(module).__name__}"
                )
        return why


def _place(where: str) -> str:
    line = getattr(where, "line", "")
    return f"in {where or 'the root'}" + (f" ({line})" if line else "")


def _segments(made: Atom) -> list[list[Atom]]:
    """What a linear makes, as the runs that it is cut into, each with its factors."""
    root = made.root()
    if not root.cuts or root.children:
        return [leaves([root])]
    pieces, at = [], 0
    for (start, stop), piece in sorted(root.cuts.items(), key=lambda item: item[0]):
        if start != at:
            return [[root]]
        pieces.append(leaves([piece]))
        at = stop
    return pieces if at == root.size else [[root]]


def _made_atoms(made: Atom) -> list[Atom]:
    """Every atom of what a linear makes."""
    return [atom for segment in _segments(made) for atom in segment]


def _parts(projection: Projection, bond: int) -> tuple[int, ...] | None:
    """The sizes of the parts that each rank has its slice of, none where it is one; None where a part of it is not split."""
    return _parts_of(projection.made, bond)


def _parts_of(made: Atom, bond: int) -> tuple[int, ...] | None:
    sizes: list[int] = []
    for segment in _segments(made):
        at = next((i for i, atom in enumerate(segment) if id(atom.group()) == bond), None)
        if at is None:
            return None
        outer = math.prod(atom.size for atom in segment[:at])
        whole = math.prod(atom.size for atom in segment)
        sizes += [whole // outer] * outer
    return _ratios(sizes)


def _runs(atoms: Sequence[Atom], bond: int) -> list[int] | None:
    """The sizes of the runs of a dimension that each rank has its slice of; None where a part of it is not split."""
    for at, atom in enumerate(atoms):
        ahead = math.prod(a.size for a in atoms[:at])
        behind = math.prod(a.size for a in atoms[at + 1 :])
        if id(atom.group()) == bond:
            return [atom.size * behind] * ahead
        ends = sorted(atom.root().cuts.items(), key=lambda item: item[0])
        inner = [_runs(leaves([piece]), bond) for _, piece in ends]
        if ends and all(inner) and sum(piece.size for _, piece in ends) == atom.size:
            return [size * behind for sizes in inner for size in sizes or ()] * ahead
    return None


def _ratios(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of parts as an option `packed` has them, none where there is one."""
    if len(sizes) == 1:
        return ()
    common = math.gcd(*sizes)
    return tuple(size // common for size in sizes)


def _sizes_with(atoms: Sequence[Atom], bond: int) -> set[int]:
    """How much there is of what is split, alone and with its neighbours; nothing where it is none of these atoms."""
    at = next((i for i, atom in enumerate(atoms) if id(atom.group()) == bond), None)
    if at is None:
        return set()
    ends = range(at + 1, len(atoms) + 1)
    return {math.prod(a.size for a in atoms[start:end]) for start in range(at + 1) for end in ends}


def _distinct(sources: Sequence[Projection]) -> int:
    return len({p.module for p in sources})


def _is_inside(path: str, module: str) -> bool:
    return path == module or not module or path.startswith(f"{module}.")
