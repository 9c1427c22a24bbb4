"""What fully_shard cannot do."""

from __future__ import annotations

import pytest

from tests.findings import finding, findings, marked, mesh_of
from tests.runtime.test_step import llama
from tests.styles.models import Mlp, around

NUMBER = 'rules:\n  "": {style: fsdp, reshard_after_forward: 2}\n  output: colwise'


def test_a_number_must_make_smaller_groups_of_the_data_axes() -> None:
    assert findings(NUMBER, llama(), mesh_of(dp_shard=4)) == ()
    assert findings(NUMBER, llama(), mesh_of(dp_replicate=2, dp_shard=4)) == ()
    assert findings(NUMBER, llama(), mesh_of(tp=2)) == ()  # no unit at all


@pytest.mark.parametrize(
    ("text", "sizes", "message", "help_text"),
    [
        (NUMBER, {"dp_shard": 2}, "reshard_after_forward=2 is not the size of a smaller group of the 2 ranks",
         "it can be true, false"),
        (NUMBER.replace("2}", "3}"), {"dp_shard": 4}, "reshard_after_forward=3 is not the size of a smaller group of the 4 ranks",
         "it can be true, false, 2"),
        (NUMBER.replace("2}", "1}"), {"dp_shard": 8}, "reshard_after_forward=1 is not the size of a smaller group of the 8 ranks",
         "it can be true, false, 2, 4"),
        (NUMBER, {"dp_shard": 4, "tp": 2}, "reshard_after_forward=2 cannot be used with tp=2",
         "a number needs a mesh with only data axes above 1: write true or false"),
    ],
)  # fmt: skip
def test_other_numbers_are_refused_where_they_are_written(
    text: str, sizes: dict[str, int], message: str, help_text: str
) -> None:
    found = finding(text, llama(), mesh_of(**sizes))
    assert (found.code, found.message, found.help) == ("reshard-size", message, help_text)
    assert marked(text, found) == "reshard_after_forward"


def test_a_container_is_no_unit() -> None:
    text = "extends: llama\nrules: {layers: fsdp}"
    found = finding(text, llama(), mesh_of(dp_shard=2))
    assert (found.code, found.help) == ("style-module", "write the rule for the modules inside: `layers.*`")
    assert marked(text, found) == "layers"


def test_a_parameter_that_divides_nowhere_is_told_of_where_it_was_to_be_sharded() -> None:
    text = 'rules: {"": {style: fsdp, shard_dim: largest}}'
    [found] = findings(text, around(Mlp), mesh_of(dp_shard=5))
    assert (found.code, found.severity) == ("fsdp-uneven", "warning")
    assert "inner.{up,down}.{weight,bias}" in found.message and "that 5 ranks divide" in found.message
    assert marked(text, found) == "shard_dim"


def test_what_divides_or_is_padded_or_small_is_fine() -> None:
    largest = 'rules: {"": {style: fsdp, shard_dim: largest}}'
    assert findings(largest, around(Mlp), mesh_of(dp_shard=2)) == ()
    assert findings('rules: {"": fsdp}', around(Mlp), mesh_of(dp_shard=5)) == ()
    small = 'rules: {"": {style: fsdp, shard_dim: largest, min_size: 10_000}}'
    assert findings(small, around(Mlp), mesh_of(dp_shard=5)) == ()
