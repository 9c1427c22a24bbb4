"""What the dimensions of tensors are made of.

A dimension is a run of atoms, outermost first: what a projection makes is one atom until a `view` splits it into heads and
their sizes; a flattened dimension has the atoms of what it was. Atoms that meet element by element are the same atom from
then on. An atom that can be split over ranks has met nothing that would need the whole of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Dim = tuple["Atom", ...]
"""The atoms of one dimension; none of a dimension of size 1."""

WHOLE, UNIFORM, FEATURE, BATCH, SEQUENCE = "whole", "uniform", "feature", "batch", "sequence"
ARGUMENT, PARAMETER = "argument", "parameter"
"""Kinds: of what nobody splits; made by `expand`, so that every index has the same; what a projection makes; of the batch's
entries; of an argument that is whole, and of which a rank can be given its part; of a parameter, which can be split with the
features that it meets.
"""

_PRECEDENCE = (BATCH, SEQUENCE, WHOLE, FEATURE, PARAMETER, ARGUMENT, UNIFORM)

_numbers = itertools.count()


@dataclass(eq=False)
class Bond:
    """Shared by atoms that can only be split together."""

    same: Bond | None = None

    def root(self) -> Bond:
        bond = self
        while bond.same is not None:
            bond = bond.same
        return bond


@dataclass(eq=False)
class Atom:
    """A factor of a dimension, or a piece cut from one.

    `origin` says in words what it comes from, `refused` why it cannot be split, `where` the module in which that was seen.
    `children` are its factors, `cuts` the pieces by (start, stop). `needed` are, of the sequence, all modules in which that
    was seen.
    """

    size: int
    kind: str
    origin: str = ""
    refused: str | None = None
    where: str = ""
    children: tuple[Atom, ...] | None = None
    cuts: dict[tuple[int, int], Atom] = field(default_factory=dict)
    same: Atom | None = None
    bond: Bond = field(default_factory=lambda: Bond())
    needed: set[str] = field(default_factory=set)
    number: int = field(default_factory=_numbers.__next__)

    def root(self) -> Atom:
        """The atom that stands for all that are the same as this one."""
        atom = self
        while atom.same is not None:
            atom = atom.same
        return atom

    def met(self) -> tuple[str, str] | None:
        """The first reason why this very atom cannot be split, and where that was seen."""
        atom: Atom | None = self
        while atom is not None:
            if atom.refused is not None:
                return atom.refused, atom.where
            atom = atom.same
        return None

    def group(self) -> Bond:
        """What all atoms share that can only be split together with this one."""
        return self.root().bond.root()

    def refuse(self, reason: str, where: str = "") -> None:
        """Note why this atom, or any factor of it, cannot be split; the first reason stays."""
        atom = self.root()
        if atom.refused is None:
            atom.refused, atom.where = reason, where
        if atom.kind == SEQUENCE:
            atom.needed.add(where)
        for inner in (*(atom.children or ()), *atom.cuts.values()):
            inner.refuse(reason, where)

    def split(self, outer: int) -> None:
        """Into factors of sizes `outer`, which divides it, and the rest. Only of an atom that has no factors yet."""
        atom = self.root()
        sizes = (outer, atom.size // outer)
        atom.children = tuple(Atom(n, atom.kind, atom.origin, atom.refused, atom.where) for n in sizes)
        atom.children[0].bond = atom.bond


def leaves(dim: Iterable[Atom]) -> list[Atom]:
    """The atoms of a dimension as they are factored by now, outermost first."""
    found: list[Atom] = []
    for atom in dim:
        root = atom.root()
        found += leaves(root.children) if root.children else [root]
    return found


def size_of(dim: Dim) -> int:
    """How many indices a dimension has."""
    return math.prod(atom.size for atom in dim)


def refuse(dims: Iterable[Dim], reason: str, where: str = "") -> None:
    """Note of all atoms in some dimensions that they cannot be split."""
    for dim in dims:
        for atom in dim:
            atom.refuse(reason, where)


def tie(one: Atom, other: Atom) -> None:
    """These can only be split together, whatever their sizes."""
    a, b = one.group(), other.group()
    if a is not b:
        b.same = a


def unify(one: Atom, other: Atom, where: str = "") -> Atom:
    """Two atoms of one size that meet element by element; what stands for both."""
    a, b = one.root(), other.root()
    if a is b:
        return a
    if UNIFORM in (a.kind, b.kind):
        return b if a.kind == UNIFORM else a
    if _PRECEDENCE.index(b.kind) < _PRECEDENCE.index(a.kind):
        a, b = b, a
    may_meet = b.kind == ARGUMENT or (a.kind, b.kind) == (FEATURE, PARAMETER)
    if a.kind != b.kind and not may_meet:  # what is whole meets what may be split
        b.refuse(f"it is combined with {a.origin or 'a tensor that is not split'}", where)
    refused, place = (a.refused, a.where) if a.refused else (b.refused, b.where)
    tie(a, b)
    if a.children is None and b.children is not None:
        a.children = b.children
    elif a.children is not None and b.children is not None:
        if [x.size for x in leaves([a])] != [x.size for x in leaves([b])]:
            refused, place = refused or "it is reshaped in two ways that do not agree", place or where
        else:
            for x, y in zip(leaves([a]), leaves([b]), strict=True):
                unify(x, y, where)
    for cut, piece in b.cuts.items():
        if cut in a.cuts:
            unify(a.cuts[cut], piece, where)
        else:
            a.cuts[cut] = piece
    b.same = a
    if refused:
        a.refused, a.where = None, ""
        a.refuse(refused, place)
    return a


def align(one: Dim, other: Dim, where: str = "") -> Dim:
    """The atoms of two dimensions of one size that meet element by element, factored alike."""
    left, right = _more_than_one(one), _more_than_one(other)
    met: list[Atom] = []
    while left and right:
        a, b = left[0].root(), right[0].root()
        if a.children or b.children:
            left, right = _more_than_one(left), _more_than_one(right)
            continue
        if a.size == b.size:
            met.append(unify(a, b, where))
            left, right = left[1:], right[1:]
        elif max(a.size, b.size) % min(a.size, b.size):
            refuse([tuple(left), tuple(right)], "it is combined with a tensor that has other factors", where)
            return (*met, *left)
        else:
            (a if a.size > b.size else b).split(min(a.size, b.size))
            left, right = leaves(left), leaves(right)
    return tuple(met)


def _more_than_one(dim: Iterable[Atom]) -> list[Atom]:
    """The atoms that have several indices: a piece of one index has none to meet others by."""
    return [atom for atom in leaves(dim) if atom.size > 1]


def view(dims: Sequence[Dim], sizes: Sequence[int], where: str = "") -> list[Dim]:
    """The dimensions of a tensor that is seen with other sizes."""
    flat = leaves(atom for dim in dims for atom in dim)
    seen: list[Dim] = []
    for size in sizes:
        taken: list[Atom] = []
        missing = size
        while missing > 1:
            if not flat:
                return _unknown(dims, sizes, where)
            atom = flat[0]
            if missing % atom.size == 0:
                taken.append(flat.pop(0))
                missing //= atom.size
            elif atom.size % missing == 0:
                atom.split(missing)
                flat = leaves(flat)
            else:
                return _unknown(dims, sizes, where)
        seen.append(tuple(taken))
    return seen


def _unknown(dims: Sequence[Dim], sizes: Sequence[int], where: str) -> list[Dim]:
    refuse(dims, "it is reshaped to sizes that are not computed from its own", where)
    return [fresh(size) for size in sizes]


def fresh(size: int, kind: str = WHOLE, origin: str = "") -> Dim:
    """A dimension of one new atom; none for a size of 1."""
    return (Atom(size, kind, origin),) if size != 1 else ()


def cut(dim: Dim, start: int, stop: int, where: str = "") -> Dim:
    """A run of indices out of a dimension."""
    whole, atoms = size_of(dim), leaves(dim)
    if (start, stop) == (0, whole) or not atoms:
        return dim if stop - start == whole else ()
    first, inner = atoms[0], whole // atoms[0].size
    if start % inner or stop % inner or first.kind == UNIFORM:
        if any(a.kind != UNIFORM for a in atoms):
            refuse([tuple(atoms)], "a slice of it does not follow its factors", where)
        return fresh(stop - start, UNIFORM if first.kind == UNIFORM else WHOLE)
    at = (start // inner, stop // inner)
    if first.kind == SEQUENCE:  # the others see it cut
        first.refuse("tokens are cut from the sequence", where)
        return (*fresh(at[1] - at[0]), *atoms[1:])
    if at not in first.cuts:
        first.cuts[at] = Atom(at[1] - at[0], first.kind, first.origin, first.refused, first.where)
    return (first.cuts[at], *atoms[1:])


def every_nth(dim: Dim, step: int, start: int, length: int, where: str = "") -> Dim:
    """One of each `step` indices of a dimension: where that is a factor of it, all of the others."""
    atoms = leaves(dim)
    last = atoms[-1] if atoms else None
    if last is not None and last.kind != UNIFORM and start < step <= last.size and last.size % step == 0:
        if last.size > step:
            last.split(last.size // step)
        return (*atoms[:-1], *(last.children or ())[:1])
    refuse([dim], "only some of its indices are used", where)
    return fresh(length)


def contract_all(dim: Dim, reason: str, where: str = "") -> None:
    """Note of every factor of a dimension that it is needed whole."""
    for atom in leaves(dim):
        atom.refuse(reason, where)
