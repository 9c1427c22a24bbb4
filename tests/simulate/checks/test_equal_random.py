"""Random numbers that every rank draws alike, for parts that are not alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.simulate.checks.test_followed_step import found, marked


class Dropping(nn.Module):
    """Drops what is split over tp under the plan, and what is whole."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.up, self.drop, self.down = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32, bias=False)
        self.whole = nn.Dropout(0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.whole(self.down(self.drop(self.up(self.embed(input_ids))))))


@pytest.mark.parametrize(
    ("rules", "codes"),
    [
        ("", ["equal-random"]),
        (", drop: local-random", []),
        (", drop: local-random, whole: local-random", ["unequal-random"]),
    ],
)
def test_parts_are_dropped_apart_and_replicas_alike(rules: str, codes: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"version: 1\nrules: {{up: colwise, down: rowwise{rules}}}\n")
    diagnostics = found("parallel=tp2", f"model._target_={__name__}.Dropping", f"plan={plan}")
    assert [d.code for d in diagnostics] == codes
    if codes == ["equal-random"]:
        assert marked(diagnostics[0]) == "up" and "`drop: local-random`" in (diagnostics[0].help or "")


@pytest.mark.parametrize("stream", ["shard(1)", "replicate"])
def test_one_rule_follows_the_layout_of_what_is_dropped(stream: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    rules = "up: colwise, down: {style: rowwise, output: stream}, drop: local-random"
    rules += ", whole: {style: local-random, layout: stream}, head: {style: colwise, input: stream, output: replicate}"
    plan.write_text(f"version: 1\nlayouts: {{stream: {stream}}}\nrules: {{{rules}}}\n")
    assert not found("parallel=tp2", f"model._target_={__name__}.Dropping", f"plan={plan}")


@pytest.mark.parametrize(
    ("output", "rest", "codes"),
    [
        ("", "", ["unequal-random"]),
        (", output: stream", "{style: colwise, input: stream, output: replicate}", []),
    ],
)
def test_numbers_of_each_rank_s_own_on_a_whole_tensor_are_told_at_both_rules(
    output: str, rest: str, codes: list[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    rules = f"up: colwise, down: {{style: rowwise{output}}}, drop: local-random, whole: local-random"
    rules += f", head: {rest}" if rest else ""
    plan.write_text(f"version: 1\nlayouts: {{stream: shard(1)}}\nrules: {{{rules}}}\n")
    diagnostics = found("parallel=tp2", f"model._target_={__name__}.Dropping", f"plan={plan}")
    assert [d.code for d in diagnostics] == codes
    if codes:
        assert diagnostics[0].message.startswith("whole draws different random numbers on each rank of tp")
        assert marked(diagnostics[0]) == "whole"
        assert diagnostics[0].related[0].label == "the output of down is whole on every rank of tp"
        assert "write `output: stream` into the rule of down" in (diagnostics[0].help or "")


class Counting(nn.Module):
    """Counts the features that it drops by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.width = nn.Linear(32, 64), nn.Linear(64, 32, bias=False), 64

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(hidden).view(*hidden.shape[:2], self.width), 0.1))


class Counted(nn.Module):
    """Dropout in a module that needs a style in the slot `params`."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.embed, self.head, self.mlp = nn.Embedding(256, 32), nn.Linear(32, 256), Counting()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(input_ids)))


def test_the_advice_can_be_followed_where_the_module_has_another_style(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"

    def under(styles: str) -> list[tuple[str, str]]:
        plan.write_text(f"version: 1\nrules: {{mlp.up: colwise, mlp.down: rowwise, mlp: {styles}}}\n")
        diagnostics = found("parallel=tp2", f"model._target_={__name__}.Counted", f"plan={plan}")
        return [(d.code, d.help or "") for d in diagnostics]

    divided = "{style: shard-params, divide: [width]}"
    help_text = "let each rank draw its own: add `local-random` to the styles of the rule `mlp`"
    assert under(divided) == [("equal-random", help_text)]
    assert under(f"[{divided}, local-random]") == []
