"""The rows of layers add up to the ledger, and layers that send the same are one row."""

from __future__ import annotations

import pytest

from parallelizer.report.rows.layers import axes_of, by_layer, layer_of, layer_rows
from tests.report.rows.plans import collective

LEDGER = [
    *(
        collective(f"layers.{i}.wq", phase=phase, payload=8)
        for i in range(3)
        for phase in ("forward", "backward")
    ),
    *(collective(f"layers.{i}", axis="dp_shard+cp", payload=100) for i in range(2)),
    collective("norm", axis="world", payload=2),
]


def test_what_layers_send_adds_up_to_the_ledger() -> None:
    layers = by_layer(LEDGER)
    for axis in axes_of(LEDGER):
        of_axis = [e for e in LEDGER if e.axis == axis]
        assert sum(layer.sent(axis) for layer in layers.values()) == sum(e.wire_bytes for e in of_axis)
        assert sum(layer.count[axis] for layer in layers.values()) == len(of_axis)
    assert sum(layer.total for layer in layers.values()) == sum(e.wire_bytes for e in LEDGER)


def test_layers_that_send_the_same_are_one_row() -> None:
    rows = layer_rows(by_layer(LEDGER))
    assert [(row.names, row.layer.total) for row in rows] == [
        (("layers.0", "layers.1"), 58),
        (("layers.2",), 8),
        (("norm",), 1),
    ]
    assert rows[0].paths == ["layers.{0,1}"]


def test_axes_are_innermost_first_and_one_that_is_no_axis_last() -> None:
    assert axes_of(LEDGER) == ["tp", "dp_shard+cp", "world"]


def test_the_loss_counts_as_forward_and_what_follows_as_backward() -> None:
    phases = ("forward", "loss", "backward", "clip", "optimizer")
    ledger = (collective("norm", phase=phase, payload=2 * 10**i) for i, phase in enumerate(phases))
    layer = by_layer(ledger)["norm"]
    assert (layer.up["tp"], layer.down["tp"], layer.count["tp"]) == (11, 11100, 5)


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("", ""),
        ("norm", "norm"),
        ("layers.7.attention.wq", "layers.7"),
        ("model.h.0.mlp.experts.3", "model.h.0"),
        ("a.b", "a"),
    ],
)
def test_a_layer_is_a_path_up_to_its_first_number(module: str, layer: str) -> None:
    assert layer_of(module) == layer
