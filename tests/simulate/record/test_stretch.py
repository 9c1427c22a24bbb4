"""Recordings of short models, stretched: the result is that of the whole model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from parallelizer.compiler.observe.equal_layers import SHORT, Run
from parallelizer.configuration.setup import Setup
from parallelizer.simulate.record.memory import Usage
from parallelizer.simulate.record.stretch import Look, NotPeriodic, stretch
from tests.chosen import marks_at
from tests.simulate.setups import CHECKPOINT, GPT, SELECTIVE, llama, setup_of, stack, traced


def highest(memory: Usage) -> dict[str, int]:
    """The highest total of each phase."""
    tops: Counter[str] = Counter()
    for point in memory.course:
        tops[point.phase] = max(tops[point.phase], point.total)
    return dict(tops)


def assert_equal_to_unfolded(setup: Setup, run: Run | None, rank: int = 0) -> None:
    folded, whole = traced(setup, rank, fold=True), traced(setup, rank)
    assert folded.folded == run and whole.folded is None
    assert folded.ledger == whole.ledger
    one, other = folded.memory, whole.memory
    assert (one.peak, one.phase, one.module, one.at_peak) == (
        other.peak,
        other.phase,
        other.module,
        other.at_peak,
    )
    assert highest(one) == highest(other)
    assert one.course[0] == other.course[0] and one.course[-1].by_category == other.course[-1].by_category
    # Beside the clipping and the optimizer, which work on all parameters at once, allocation by allocation.
    per_layer = ("forward", "loss", "backward")
    assert [p for p in one.course if p.phase in per_layer] == [
        p for p in other.course if p.phase in per_layer
    ]


meshes = st.sampled_from(
    [
        {},
        {"dp_shard": 2},
        {"dp_shard": 3},
        {"dp_shard": 512},
        {"dp_replicate": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 4},
    ]
)
options = st.fixed_dictionaries(
    {
        "train.dtype": st.sampled_from(["float32", "bfloat16"]),
        "train.accumulate": st.sampled_from([1, 1, 2]),
        "train.clip": st.sampled_from(["1.0", "null"]),
        "optim.fused": st.sampled_from(["auto", "false"]),
        "++parallel.styles.fsdp.reshard_after_forward": st.sampled_from(["null", "true", "false"]),
    }
)
checkpoints = st.sampled_from(["", CHECKPOINT.format("stacks.*"), SELECTIVE.format("stacks.*")])


def on(mesh: dict[str, int], options: dict[str, object], checkpoint: str) -> list[str]:
    data = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
    sizes = [f"parallel.mesh.{axis}={size}" for axis, size in mesh.items()]
    given = [f"{key}={value}" for key, value in options.items()]
    return [*sizes, *given, f"train.batch_size={4 * data}", *([checkpoint] if checkpoint else [])]


def check_stack(
    depth: int, mesh: dict[str, int], options: dict[str, object], checkpoint: str, rank: float
) -> None:
    setup = stack(f"model.depths=[{depth}]", *on(mesh, options, checkpoint))
    assert_equal_to_unfolded(setup, Run("stacks.0", 0, depth), int(rank * setup.mesh.world_size))


ranks = st.floats(0, 1, exclude_max=True)


# What FSDP keeps of each unit until the end of backward, and two backwards without a collective between them.
REPLICATED: tuple[Any, ...] = ({"dp_replicate": 2}, {"train.accumulate": 2}, "", 0.0)


@settings(phases=[Phase.explicit])
@example(8, *REPLICATED)
@given(st.integers(8, 10), meshes, options, checkpoints, ranks)
def test_folded_is_unfolded(
    depth: int, mesh: dict[str, int], options: dict[str, object], checkpoint: str, rank: float
) -> None:
    check_stack(depth, mesh, options, checkpoint, rank)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)  # others in each run of `make test-all`
@given(st.integers(8, 24), meshes, options, checkpoints, ranks)
def test_folded_is_unfolded_in_many_more(
    depth: int, mesh: dict[str, int], options: dict[str, object], checkpoint: str, rank: float
) -> None:
    check_stack(depth, mesh, options, checkpoint, rank)


PRESETS = [
    "single",
    "fsdp2",
    "fsdp4",
    "hsdp2x2",
    "tp2",
    "cp2",
    "fsdp2_tp2",
    "cp2_tp2",
    "fsdp2_cp2_tp2",
    "tp8_cp2",
]
OPTIONS = (
    [CHECKPOINT.format("layers")],
    [SELECTIVE.format("layers")],
    ["train.dtype=bfloat16", "train.accumulate=2"],
)
"""Each preset has one of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("fsdp2_cp2_tp2", [CHECKPOINT.format("layers"), "train.dtype=bfloat16"]),
        *((preset, OPTIONS[place % len(OPTIONS)]) for place, preset in enumerate(PRESETS)),
        ("fsdp2_tp2", ["plan=llama_tp"]),
    ],
)
def test_llama_on_the_shipped_presets(preset: str, more: list[str]) -> None:
    setup = llama(f"parallel={preset}", "model.n_layers=8", *more)
    assert_equal_to_unfolded(setup, Run("layers", 0, 8), setup.mesh.world_size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["single", "fsdp2", "fsdp2_tp2"])
def test_a_model_with_tied_embeddings(preset: str) -> None:
    setup = setup_of(*GPT, f"parallel={preset}", "model.depth=9")
    assert_equal_to_unfolded(setup, Run("blocks", 0, 9))


def rules(*written: str) -> str:
    return f"rules=[{','.join(repr(rule) for rule in written)}]".replace("'", '"')


# overrides, and the layers that two short models stand for
CASES = {
    "a wide layer near the start": (["model.depths=[12]", "model.odd=2"], Run("stacks.0", 3, 9)),
    "a wide layer at the end": (["model.depths=[9]", "model.odd=8"], Run("stacks.0", 0, 8)),
    "a wide layer in the middle": (["model.depths=[9]", "model.odd=4"], None),
    "another rule for one layer": (
        ["model.depths=[10]", rules("stacks.0.1: checkpoint")],
        Run("stacks.0", 2, 8),
    ),
    "another option for one layer": (
        ["model.depths=[9]", rules("stacks.0.8: {style: fsdp, reshard_after_forward: false}")],
        Run("stacks.0", 0, 8),
    ),
    "a rule taken from the middle one": (["model.depths=[9]", rules("stacks.0.4: {none: fsdp}")], None),
    "two lists": (["model.depths=[8,9]"], Run("stacks.1", 0, 9)),
    "two lists that are both long": (["model.depths=[10,12]"], Run("stacks.1", 0, 12)),
    "a part of the layers under a checkpoint": (
        ["model.depths=[22]", rules("stacks.0.{0..9}: checkpoint"), "train.accumulate=2"],
        Run("stacks.0", 10, 12),
    ),
    "two lists one of which is counted by the model": (["model.depths=[10,12]", "model.way=count"], None),
    "two lists of one length": (["model.depths=[8,8]"], Run("stacks.0", 0, 8)),
    "too few layers": (["model.depths=[7]"], None),
    "layers counted by the model": (["model.depths=[9]", "model.way=count"], None),
    "a layer that something is done after": (["model.depths=[9]", "model.way=skip"], None),
    "something done after every second": (["model.depths=[9]", "model.way=taps"], None),
    "one layer in all places": (["model.depths=[9]", "model.way=shared"], None),
}
QUICK = (
    "another rule for one layer",
    "two lists",
    "layers counted by the model",
    "a layer that something is done after",
    "two lists that are both long",
    "a part of the layers under a checkpoint",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=marks_at(QUICK.index(n)) if n in QUICK else pytest.mark.slow) for n in CASES],
)
def test_layers_that_differ_are_not_folded_or_in_runs(name: str) -> None:
    overrides, run = CASES[name]
    assert_equal_to_unfolded(stack("parallel=fsdp2", *overrides), run)


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing in a recording."""

    what: str
    module: str = ""


LOOK = Look[Item](module=lambda x: x.module, moved=lambda x, module: Item(x.what, module))
PARTS = ("before", "first", "ahead", "between", "last", "freed", "behind")


def parts_of(letters: str) -> st.SearchStrategy[dict[str, list[str]]]:
    words = st.lists(st.sampled_from(letters), max_size=4)
    return st.fixed_dictionaries(dict.fromkeys(PARTS, words) | {"each": words.filter(bool)})


def recorded(layers: int, parts: dict[str, list[str]], ahead: int, backward: bool, name: str) -> list[Item]:
    """A forward or a backward of that many layers: what comes before and behind, the ends with something of
    their own, in each layer something for one further on, as a prefetch is, and what is freed at the end for
    each layer.
    """
    order = list(range(layers))[:: -1 if backward else 1]
    items = [Item(w) for w in parts["before"]]
    for place, layer in enumerate(order):
        items += [Item("first", f"{name}.{layer}")] * (place == 0) * len(parts["first"])
        items += [Item(w, f"{name}.{layer}.{w}") for w in parts["each"]]
        if place + ahead < layers:
            items += [Item(w, f"{name}.{order[place + ahead]}.{w}") for w in parts["ahead"]]
        items += [Item("between")] * len(parts["between"])
        items += [Item("last", f"{name}.{layer}")] * (place == layers - 1) * len(parts["last"])
    return items + [Item("freed")] * (layers * len(parts["freed"])) + [Item(w) for w in parts["behind"]]


@settings(max_examples=500, deadline=None)
@given(parts_of("abcdef"), st.integers(5, 20), st.integers(0, 1), st.booleans())
@example({part: list[str]() for part in PARTS} | {"each": ["a", "a"]}, 7, 1, True)
def test_two_short_recordings_make_the_long_one(
    parts: dict[str, list[str]], layers: int, ahead: int, backward: bool
) -> None:
    short, longer, whole = (
        recorded(n, parts, ahead, backward, "stack.layers") for n in (SHORT, SHORT + 1, layers)
    )
    runs = [Run("stack.layers", 0, layers)]
    assert stretch(short, [longer], LOOK, runs, backward=backward) == whole


@pytest.mark.parametrize("side_by_side", [False, True])
@settings(max_examples=250, deadline=None)
@given(parts_of("abc"), parts_of("uvw"), st.integers(5, 12), st.integers(5, 12), st.booleans())
def test_three_short_recordings_make_the_one_of_two_runs(
    side_by_side: bool,
    parts: dict[str, list[str]],
    others: dict[str, list[str]],
    layers: int,
    more: int,
    backward: bool,
) -> None:
    """Runs in two lists, and one behind the other in a list that has another layer between and behind them."""
    runs = [Run("a", 0, layers), Run("a", layers + 1, more) if side_by_side else Run("b", 0, more)]

    def both(first: int, second: int) -> list[Item]:
        name = ("a", "a", "a") if side_by_side else ("a", "b", "c")
        moved = [first + 1 if side_by_side else 0, first + second + 1 if side_by_side else 0]

        def further(items: list[Item]) -> list[Item]:
            return [
                Item(i.what, ".".join([name[1], str(int(i.module.split(".")[1]) + moved[0]), *i.module.split(".")[2:]]))
                if i.module else i for i in items
            ]  # fmt: skip

        one = recorded(first, parts, 1, backward, name[0])
        other = further(recorded(second, others, 1, backward, name[1]))
        between = Item("between", f"{name[0]}.{first}")
        behind = Item("behind", f"{name[2]}.{moved[1]}")
        both = [*one, between, *other, behind]
        return [behind, *other, between, *one] if backward else both

    short = both(SHORT, SHORT)
    longer = [both(SHORT + 1, SHORT), both(SHORT, SHORT + 1)]
    assert stretch(short, longer, LOOK, runs, backward=backward) == both(layers, more)


def test_runs_that_add_in_one_place_are_refused() -> None:
    """Two lists whose layers alternate: it is not known which comes first."""
    runs = [Run("a", 0, 9), Run("b", 0, 9)]
    short = [Item("x", f"{name}.{n}") for n in range(SHORT) for name in "ab"]
    with pytest.raises(NotPeriodic):
        stretch(short, [[*short, Item("x", "a.3")], [*short, Item("x", "b.3")]], LOOK, runs, backward=False)


@pytest.mark.parametrize("backward", [False, True])
def test_recordings_that_do_not_differ_by_one_layer_are_refused(backward: bool) -> None:
    def a(layer: int) -> Item:
        return Item("a", f"layers.{layer}")

    short = [a(i) for i in range(SHORT)]
    for longer in (
        short[:-1],  # fewer
        [Item("c", "layers.0"), *short[1:], a(SHORT), Item("b")],  # something else behind, and another first
        [Item("a" if i % 2 else "b", f"layers.{i}") for i in range(SHORT + 1)],  # other layers than before
        [a(0)] * (SHORT + 1),  # always the same layer
    ):
        with pytest.raises(NotPeriodic):
            stretch(short, [longer], LOOK, [Run("layers", 0, 9)], backward=backward)
