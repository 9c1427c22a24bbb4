"""What one forward did, as it was seen: calls of linears, tables, attention and modules, with the atoms of their tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelizer.diagnostics.diagnostic import Span
from parallelizer.propose.from_forward.atoms import Atom, Dim

Dims = list[Dim]


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix out of a parameter that holds several, as those of experts: the module that owns the parameter, and which of
    its dimensions are the features that are made and those that are taken.
    """

    owner: str
    made: int
    taken: int


@dataclass
class Projection:
    """A call of a linear: `module` owns the weight, `given` is the input's id, `made` the atom of its output features, `taken`
    the input's last dimension. `order` counts calls. Of a `weight` that is one of several in a parameter, `module` is the
    parameter's name.
    """

    module: str
    given: int
    made: Atom
    taken: Dim
    lead: Dims
    order: int
    output: int = 0
    weight: GroupedWeight | None = None


def sums_over(module: str) -> str:
    """Why the inner factors of what a linear takes cannot be split as if they were all of it."""
    return f"{module} sums over it"


@dataclass
class Lookup:
    """A call of an embedding: its module, how many indices it was given along each dimension, and whether these are the tokens
    of the batch.
    """

    module: str
    dims: Dims
    of_batch: bool
    output: int


@dataclass
class SeenAttention:
    """An attention call, of the innermost module around it; `heads` are the atoms of its queries' and keys' heads."""

    module: str
    heads: tuple[Atom | None, ...]


@dataclass
class SeenCall:
    """A call of a module: the tensors that it is given, by argument, those that it gives back, and when it began and ended.
    `floats` are the arguments that may have a gradient.
    """

    module: str
    given: dict[str, int]
    begun: int
    results: tuple[int, ...] = ()
    ended: int = 0
    floats: tuple[str, ...] = ()


@dataclass
class Sliceable:
    """A dimension of an argument of `module` that is whole, and that a rank can be given its part of; `atom` is what it is in
    this call.
    """

    module: str
    name: str
    dim: int
    atom: Atom


@dataclass
class Use:
    """A parameter of `module`, which is no linear and no embedding, met `dims` in an operator."""

    module: str
    name: str
    dims: Dims


@dataclass
class Meeting:
    """Where something of a linear met what is whole."""

    module: str


@dataclass
class Written:
    """A view in `module` of a dimension of these atoms, whose size comes from attributes: their values by (module, name), the
    module empty for what a configuration holds; `over` those that it was divided by.
    """

    module: str
    names: dict[tuple[str, str], int]
    dim: Dim
    over: dict[tuple[str, str], int] = field(default_factory=dict)


class SeenAt(str):
    """The path of a module, and the line of somebody's own code in it, where something was seen."""

    line: str = ""

    def __new__(cls, path: str, line: str = "") -> SeenAt:
        place = super().__new__(cls, path)
        place.line = line
        return place

    def __reduce__(self) -> tuple[type[SeenAt], tuple[str, str]]:
        return SeenAt, (str(self), self.line)


@dataclass
class Fixed:
    """A view that was given numbers: the dimensions that it made, and what was passed for each, -1 as the size that it became.

    `loose` are the dimensions, from the end, whose sizes are no numbers of attributes or arguments that a plan could divide,
    `read` those whose sizes come from an argument's.
    """

    at: Span
    sizes: tuple[int, ...]
    dims: Dims
    loose: tuple[int, ...]
    read: tuple[int, ...]


@dataclass
class Seen:
    """What one forward did. `normed` are the modules that sum over all features that they are given, with these; `parameters`
    has the dimensions of those that are no linear's, `added` the names of those that were added to something;
    `changed` are the tensors that were changed in place, `written_out` is
    the line with the first softmax over pairs of tokens.
    """

    projections: list[Projection] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    attentions: list[SeenAttention] = field(default_factory=list)
    calls: list[SeenCall] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    sliceable: list[Sliceable] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    fixed: list[Fixed] = field(default_factory=list)
    mixing: set[str] = field(default_factory=set)
    dims: dict[int, Dims] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    output: list[int] = field(default_factory=list)
    read_in: dict[int, set[str]] = field(default_factory=dict)
    weighed: list[Atom] = field(default_factory=list)
    normed: list[tuple[str, Atom]] = field(default_factory=list)
    parameters: dict[str, Dims] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    written_out: str = ""
