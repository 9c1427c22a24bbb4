"""What a model does by itself to what its plan has cut: refused where a proof would fail, and not where it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallelizer.child.children import in_children
from parallelizer.diagnostics.diagnostic import Diagnostic
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.all_checks import check_followed
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.follow.flow import follow
from parallelizer.testing import assert_equivalent
from tests.findings import compiled, mesh_of, on_meta
from tests.proof import subjects

Own = Callable[[Tensor], Tensor]
TP = """rules:
  up: colwise
  down: rowwise
"""
CP = """rules:
  attend: context-parallel
  "": fsdp
buffers: {batch: {input_ids: 1, labels: 1}}
"""
IDS = Entry(("batch", "sequence"), range=(0, subjects.VOCAB))
WORK = Workload({"input_ids": IDS, "labels": IDS}, 8, 8)


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Model(nn.Module):
    """Attention, and a projection up and down with something of its own between them."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.own = own
        self.embed, self.head = nn.Embedding(subjects.VOCAB, 8), nn.Linear(8, subjects.VOCAB, bias=False)
        self.attend, self.up, self.down = Attend(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + self.attend(x.unsqueeze(1)).squeeze(1)
        result: Tensor = self.head(x + self.down(self.own(self.up(x))))
        return result


def found(own: Own, plan: str, *axes: str) -> tuple[Diagnostic, ...]:
    """The findings of one followed step over two ranks of each axis."""
    program = compiled(plan, lambda: Model(own), mesh_of(**dict.fromkeys(axes, 2)), workload=WORK)
    model = on_meta(lambda: Model(own))
    (flow,) = in_children([(follow, program, model, WORK, subjects.token_loss)])
    assert flow.failure is None, flow.failure
    return check_followed(Followed(program, model, flow))


def batch(seed: int) -> dict[str, Tensor]:
    ids, labels = torch.randint(0, subjects.VOCAB, (2, 4, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": labels}


def proven(own: Own, plan: str, axis: str) -> bool:
    try:
        assert_equivalent(
            lambda: Model(own),
            subjects.plan(plan),
            {axis: 2},
            loss=subjects.token_loss,
            batch=batch,
        )
    except AssertionError:
        return False
    return True


def in_groups(x: Tensor) -> Tensor:
    """Rows in the order of their kinds, and back: as tokens go to experts."""
    rows = x.flatten(0, 1)
    order = rows.argmax(-1).sort().indices
    return rows[order].sin()[order.argsort()].view(x.shape)


def only_looked_at(x: Tensor) -> Tensor:
    assert x.mean(-1).shape == x.shape[:-1]
    assert x.cumsum(1).shape == x.shape
    return x


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, 4)


WRONG: dict[str, tuple[str, Own]] = {
    "a norm of features": ("tp", lambda x: F.rms_norm(x, x.shape[-1:])),
    "a norm by hand": ("tp", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)),
    "a norm by a sum": ("tp", lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1)),
    "softmax over features": ("tp", lambda x: x.softmax(-1)),
    "features rolled": ("tp", lambda x: x.roll(1, -1)),
    "a running sum of features": ("tp", lambda x: x.cumsum(-1)),
    "the best features": ("tp", lambda x: x * (x >= x.topk(2).values[..., -1:])),
    "a softmax over heads": ("tp", lambda x: heads(x).softmax(2).flatten(2)),
    "a token shift": ("cp", lambda x: x + F.pad(x, (0, 0, 1, -1))),
    "a token shift by slices": ("cp", lambda x: torch.cat([x[:, :1], x[:, :-1]], 1)),
    "tokens rolled": ("cp", lambda x: x.roll(1, 1)),
    "a running sum of tokens": ("cp", lambda x: x.cumsum(1)),
    "a mean over tokens": ("cp", lambda x: x - x.mean(1, keepdim=True)),
    "a sum over tokens": ("cp", lambda x: x + x.sum(1, keepdim=True)),
    "a mean over tokens in a row": ("cp", lambda x: x - x.flatten(0, 1).mean(0)),
    "attention by hand": ("cp", lambda x: (x @ x.mT).softmax(-1) @ x),
    "linear attention": ("cp", lambda x: x @ (x.mT @ x)),
    "a convolution": (
        "cp",
        lambda x: F.conv1d(x.mT, torch.ones(16, 1, 3, dtype=x.dtype), padding=1, groups=16).mT,
    ),
}
RIGHT: dict[str, tuple[str, Own]] = {
    "tokens grouped by a whole number": ("cp", in_groups),
    "nothing": ("tp", lambda x: x),
    "elementwise": ("tp", F.silu),
    "a norm of each head": ("tp", lambda x: F.rms_norm(heads(x), (4,)).flatten(2)),
    "what is only looked at": ("tp", only_looked_at),
    "tokens rolled, features split": ("tp", lambda x: x.roll(1, 1)),
    "attention in heads by hand": (
        "tp",
        lambda x: ((h := heads(x).transpose(1, 2)) @ h.mT).softmax(-1).matmul(h).transpose(1, 2).flatten(2),
    ),
    "what is only looked at of tokens": ("cp", only_looked_at),
    "a norm of features, tokens split": ("cp", lambda x: F.layer_norm(x, (16,))),
    "tokens in a row": ("cp", lambda x: F.layer_norm(x.flatten(0, 1), (16,)).view(x.shape)),
    "a mixture of features": ("cp", lambda x: x.softmax(-1) * x.flip(-1).cumsum(-1)),
}


SPLIT_INSIDE = """rules:
  up: {style: prepare-input, axis: cp, input: replicate -> shard(1)}
  down: {style: prepare-output, axis: cp, output: shard(1) -> replicate}
  "": fsdp
"""
GATHERED_INSIDE = """rules:
  up: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}
  down: {style: prepare-io, axis: cp, input: replicate -> shard(1), output: shard(1) -> replicate}
  "": fsdp
"""


def plan_of(axis: str) -> str:
    return TP if axis == "tp" else CP


@pytest.mark.parametrize("name", WRONG)
def test_what_needs_the_whole_is_refused_at_its_line(name: str) -> None:
    axis, own = WRONG[name]
    diagnostics = found(own, plan_of(axis), axis)
    assert {(d.code, d.severity) for d in diagnostics} == {("needs-whole", "error")}
    span = diagnostics[0].span
    assert span is not None and span.line == 2  # the rule that cut it
    (written, *_) = diagnostics[0].related
    assert Path(written.span.file).name == Path(__file__).name
    assert f"of {axis} ha" in diagnostics[0].message or f"a sum over {axis}," in diagnostics[0].message


@pytest.mark.parametrize("name", RIGHT)
def test_what_each_rank_may_do_to_its_part_is_not(name: str) -> None:
    axis, own = RIGHT[name]
    assert found(own, plan_of(axis), axis) == ()


BOTH = """rules:
  attend: context-parallel
  embed: {style: rowwise, input: replicate, output: replicate}
  up: colwise
  down: rowwise
  head: {style: colwise, output: replicate}
  "": fsdp
buffers: {batch: {input_ids: 1, labels: 1}}
"""
STREAM = BOTH.replace("output: replicate}\n  up: colwise\n  down: rowwise", "output: shard(1)}\n"
    "  attend: [context-parallel, {style: prepare-io, input: shard(2) -> replicate, output: replicate -> shard(2)}]\n"
    "  up: {style: colwise, input: shard(1)}\n  down: {style: rowwise, output: shard(1)}").replace(
    "rules:\n  attend: context-parallel\n", "rules:\n").replace(
    "head: {style: colwise,", "head: {style: colwise, input: shard(1),")  # fmt: skip


@pytest.mark.parametrize("plan", [BOTH, STREAM], ids=["stream whole", "stream split"])
@pytest.mark.parametrize(
    "name",
    [
        n
        for n, (axis, _) in WRONG.items()
        if axis == "cp" and n not in ("a mean over tokens in a row", "a convolution")
    ],
)
def test_behind_what_is_split_over_tp_the_sequence_is_still_split(name: str, plan: str) -> None:
    diagnostics = found(WRONG[name][1], plan, "cp", "tp")
    assert "needs-whole" in {d.code for d in diagnostics}
    assert any("of cp has" in d.message for d in diagnostics)


@pytest.mark.parametrize("plan", [BOTH, STREAM], ids=["stream whole", "stream split"])
def test_over_both_axes_too_what_is_right_passes(plan: str) -> None:
    assert found(F.silu, plan, "cp", "tp") == ()
    assert found(RIGHT["a norm of each head"][1], plan, "cp", "tp") == ()


GATHERED_OVER_BOTH = STREAM.replace(
    "up: {style: colwise, input: shard(1)}",
    "up: [{style: colwise, input: shard(1), output: replicate}, "
    "{style: prepare-output, axis: cp, output: shard(1) -> replicate}]",
).replace(
    "down: {style: rowwise, output: shard(1)}",
    "down: [{style: rowwise, input: replicate, output: shard(1)}, "
    "{style: prepare-input, axis: cp, input: replicate -> shard(1)}]",
)


@pytest.mark.parametrize("name", ["a token shift", "a mean over tokens", "tokens rolled"])
def test_what_one_module_gathers_over_both_axes_is_whole(name: str) -> None:
    _, own = WRONG[name]
    assert "needs-whole" in {d.code for d in found(own, STREAM, "cp", "tp")}
    assert found(own, GATHERED_OVER_BOTH, "cp", "tp") == ()


def slowly(cases: dict[str, tuple[str, Own]], *quick: str) -> list[object]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in cases]


@pytest.mark.ranks
@pytest.mark.parametrize("name", slowly(WRONG, "a norm of features"))
def test_what_is_refused_cannot_be_proven(name: str) -> None:
    axis, own = WRONG[name]
    assert not proven(own, plan_of(axis), axis)


@pytest.mark.ranks
@pytest.mark.parametrize("name", slowly(RIGHT, "what is only looked at of tokens"))
def test_what_is_not_refused_is_proven(name: str) -> None:
    axis, own = RIGHT[name]
    assert proven(own, plan_of(axis), axis)


@pytest.mark.ranks
def test_a_sequence_that_a_rule_splits_inside_is_followed_too() -> None:
    _, shift = WRONG["a token shift"]
    assert {d.code for d in found(shift, SPLIT_INSIDE, "cp")} == {"needs-whole"}
    assert found(shift, GATHERED_INSIDE, "cp") == ()
    assert not proven(shift, SPLIT_INSIDE, "cp")
    assert proven(shift, GATHERED_INSIDE, "cp")
