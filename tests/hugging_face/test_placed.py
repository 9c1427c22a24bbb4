"""A rearrangement on tensors without values says where each number stands, as torch's own on tensors with values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelizer.hugging_face import placed
from parallelizer.hugging_face.placed import NotPlaced, Placed, regions, stored
from tests.hugging_face.folders import config_of

STORED = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0).view(4, 6) + 100}
LEAVES = {name: stored(name, tensor.shape, tensor.dtype) for name, tensor in STORED.items()}


def read(whole: Placed, box: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
    """A box of a Placed, number by number out of the stored tensors."""
    box = [(0, size) for size in whole.shape] if box is None else box
    out = torch.full([count for _, count in box], torch.nan)
    for region in regions(whole, box):
        indices = [torch.arange(s, s + c * step, step) for s, c, step in region.indices]
        part = out[tuple(slice(at, at + count) for at, count in region.box)]
        region.as_stored(part).copy_(STORED[region.name][torch.meshgrid(*indices, indexing="ij")])
    return out


def moves(draw: Any, tensor: torch.Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    """Any rearrangement of one tensor that its shape allows."""
    dims = st.integers(0, tensor.dim() - 1)
    dim = draw(dims)
    size = tensor.shape[dim]
    factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
    split = [*tensor.shape[:dim], factor, size // factor, *tensor.shape[dim + 1 :]]
    merged = [*tensor.shape[:dim], -1, *tensor.shape[dim + 2 :]]
    found: list[tuple[str, tuple[Any, ...]]] = [
        ("transpose", (dim, draw(dims))),
        ("permute", tuple(draw(st.permutations(range(tensor.dim()))))),
        ("unsqueeze", (dim,)),
        ("squeeze", (dim,)),
        ("reshape", (split,)),
        ("contiguous", ()),
    ]
    if dim + 1 < tensor.dim():
        found.append(("reshape", (merged,)))
    start = draw(st.integers(0, size - 1))
    found.append(("narrow", (dim, start, draw(st.integers(1, size - start)))))
    if tensor.dim() > 1:
        found.append(("select", (dim, start)))
    return found


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_every_rearrangement_is_torchs(data: st.DataObject) -> None:
    def draw(strategy: Any) -> Any:
        return data.draw(strategy)

    real, ours = [STORED["a"], STORED["b"]], [LEAVES["a"], LEAVES["b"]]
    for _ in range(draw(st.integers(1, 6))):
        way = draw(st.sampled_from(["one", "one", "one", "cat", "stack", "chunk", "split", "unbind"]))
        i = draw(st.integers(0, len(real) - 1))
        dim = draw(st.integers(0, real[i].dim() - 1))
        if way == "one":
            name, args = draw(st.sampled_from(moves(draw, real[i])))
            made, placed_too = [getattr(real[i], name)(*args)], [getattr(ours[i], name)(*args)]
        elif way in ("cat", "stack"):
            alike = [k for k in range(len(real)) if real[k].shape == real[i].shape]
            function = getattr(torch, way)
            made, placed_too = [function([v[k] for k in alike], dim) for v in (real, ours)]
            made, placed_too = [made], [placed_too]
        else:
            args = {"chunk": (2, dim), "split": (draw(st.integers(1, 4)), dim), "unbind": (dim,)}[way]
            if way == "unbind" and real[i].dim() == 1:
                continue
            made, placed_too = list(getattr(real[i], way)(*args)), list(getattr(ours[i], way)(*args))
        real, ours = made, placed_too
    k = draw(st.integers(0, len(real) - 1))
    wanted, whole = real[k], ours[k]
    assert tuple(whole.shape) == tuple(wanted.shape)
    try:
        assert torch.equal(read(whole), wanted)
        box = []
        for size in wanted.shape:
            start = draw(st.integers(0, size - 1))
            box.append((start, draw(st.integers(1, size - start))))
        assert torch.equal(read(whole, box), wanted[tuple(slice(s, s + c) for s, c in box)])
    except NotPlaced as error:
        assert "walked twice" in str(error)  # a dimension that was split and not merged again


CONVERSIONS: dict[str, Any] = {
    "experts": lambda ops: [ops.MergeModulelist(0), ops.Concatenate(1)],
    "chunks": lambda ops: [ops.Chunk(0)],
    "interleaved": lambda ops: [ops.Interleave(0)],
    "interleaved back": lambda ops: [ops.Interleave(0, inverse=True)],
    "rotary": lambda ops: [ops.PermuteForRope()],
    "transposed": lambda ops: [ops.Transpose(0, 1)],
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_transformers_own_operations_run_on_it(name: str) -> None:
    from transformers import core_model_loading

    def converted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        many = name == "experts"
        targets = ["x", "y"] if name == "chunks" else ["x"]
        sources = ["a", "b"] if many else ["a"]
        collected: dict[str, Any] = {s: [tensors[s], tensors[s]] if many else [tensors[s]] for s in sources}
        for op in CONVERSIONS[name](core_model_loading):
            collected = op.convert(
                collected,
                source_patterns=sources,
                target_patterns=targets,
                config=config_of("llama", num_attention_heads=2),
                full_layer_name="x",
            )
        return collected

    wanted, found = converted(dict(STORED)), converted(dict(LEAVES))
    assert wanted.keys() == found.keys()
    for key, tensor in wanted.items():
        assert torch.equal(read(found[key]), tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "name"),
    [(lambda t: t * 2, "mul"), (lambda t: t.to(torch.float16), "to"), (lambda t: torch.zeros_like(t), "zeros_like"),
     (lambda t: t[::2], "indexing"), (lambda t: t.sum(0), "sum")],
)  # fmt: skip
def test_what_is_no_rearrangement_is_refused_by_name(operation: Any, name: str) -> None:
    with pytest.raises(NotPlaced, match=name):
        operation(LEAVES["a"])


def test_a_part_of_a_split_dimension_begins_where_its_rows_do() -> None:
    split = LEAVES["a"].reshape(2, 2, 6)
    assert torch.equal(read(split.narrow(0, 1, 1)), STORED["a"].reshape(2, 2, 6)[1:])
    assert torch.equal(read(split.select(1, 1)), STORED["a"][1::2])
    assert torch.equal(read(split.select(1, 1), [(1, 1), (2, 3)]), STORED["a"][3:, 2:5])


def test_very_many_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed, "MOST_PIECES", 5)
    with pytest.raises(NotPlaced, match="very many pieces"):
        LEAVES["a"].t().reshape(-1)
    assert len(LEAVES["a"].reshape(-1).pieces) == 4  # its rows


def test_a_scalar_is_one_number() -> None:
    [region] = regions(stored("s", (), torch.float32), ())
    assert region.indices == () and region.as_stored(torch.ones(())).shape == ()
