"""What was found in a model, as plain data: what a plan is written from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallelizer.propose.from_forward.counted import CountedView


@dataclass(frozen=True)
class SplitRegion:
    """Linears that are split together: what `sources` make is split, and `consumers` sum over it.

    `sources` have the parts of a fused dimension, none for a plain one. `gates` are the modules through whose arguments the
    whole stream comes in; `bare` the sources that take it without one. `within` is a module that takes the stream and gives
    these linears some of its rows, as a mixture gives them to experts. `inside` are modules whose parameters are whole, and
    work on what is split. `slices` are arguments of modules that have an entry for each head, with the dimension; `taken`
    are the parts of what consumers sum over, where each is split by itself. `divide`
    are attributes of modules, and sizes of their arguments, that state how many heads there are; `views` state so by numbers
    that cannot be divided.

    Of experts in one parameter `sources` and `consumers` are parameters of several matrices, and `grouped` has the dimension
    that is split of each; `terms` are the modules that compute with a rank's part, with their arguments that have a gradient,
    `sums` those whose output is a term of a sum. `carried` are other parameters that are split with the features that they
    meet: the dimension, and the sizes of a fused dimension's parts. `normed` are the norms over all that is split, with the
    dimension of their input, `once` the parameters that are added to a term of the sum, and count once in it,
    `changed` the consumers whose output the forward changes in place. `latent` are the modules whose parameters stay whole
    between the one gate and the sources, as what makes latents that heads are made of; `matrices` then are the parameters of
    the sources.
    """

    kind: str
    sources: Mapping[str, tuple[int, ...]]
    consumers: tuple[str, ...]
    gates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    within: str = ""
    inside: tuple[str, ...] = ()
    divide: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slices: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    views: tuple[CountedView, ...] = ()
    grouped: Mapping[str, int] = field(default_factory=dict)
    terms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    carried: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    normed: Mapping[str, int] = field(default_factory=dict)
    taken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    changed: frozenset[str] = frozenset()
    latent: tuple[str, ...] = ()
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """An embedding: `tokens` says whether it is looked up by an entry of the batch, `sequence_dim` where the tokens are in what
    it hands on, `rows` how many it has, `also` other modules that hold the same table and are not called.
    """

    module: str
    tokens: bool
    sequence_dim: int | None
    rows: int
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CalledModule:
    """A module that was called: the first tensor that it takes, if that is of three dimensions, whether it has parameters of
    its own and in it, whether tokens meet each other in it, and in which modules operators read what it hands on. `rows` are the
    arguments that have the tokens of the block around it, each along dimension 1, if what it hands on has them so too.
    """

    path: str
    argument: str | None
    own: bool
    inner: bool
    mixes: bool
    read_in: frozenset[str] = frozenset()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that a plan can be written from. `left` says of linears that no region has why, by path,
    `tied` that a head is an embedding's table, `computed_with` are the heads whose whole rows the forward itself needs, as for
    a loss that it computes. `experts` are the modules that compute tokens with some of their experts, with the style for each,
    `written_out` the line of code with the first attention that is written out. `biases` are other names of a head's bias.
    `mixing` are the modules whose own code lets tokens meet in attention, `needing` those in which another operator needs all of
    the sequence.
    """

    regions: tuple[SplitRegion, ...] = ()
    tables: tuple[Table, ...] = ()
    heads: Mapping[str, bool] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    parts: Mapping[str, CalledModule] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    tied: bool = False
    computed_with: frozenset[str] = frozenset()
    experts: Mapping[str, str] = field(default_factory=dict)
    written_out: str = ""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixing: tuple[str, ...] = ()
    needing: tuple[str, ...] = ()
