"""A forward that fails over a size of the whole model: the numbers that it read, and what to write of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.simulate.whole_numbers import WholeNumbers, whole_numbers_of
from tests.simulate.reading import Attention, Config, Configured
from tests.simulate.setups import CONFIGS, GPT, followed_findings, setup_of, traced

READING = (
    *GPT[:1],
    "model=reading",
    f"plan={CONFIGS}/plans/reading.yaml",
    "train.seq_len=16",
    "train.batch_size=4",
)
"""Without a rule that divides anything."""


def told(kind: str, degree: int = 2) -> WholeNumbers | None:
    """What is told of the attention on a rank's features, as the plan leaves it."""
    attention = (Configured if kind == "configured" else Attention)(16, kind, Config(), 2)
    attention.qkv = nn.Linear(16, 64 // degree)
    attention.out = nn.Linear(32 // degree, 16)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        attention(torch.zeros(3, 5, 16))
    return whole_numbers_of(caught.value, degree, lambda m: "layers.0" if m is attention else None)


@pytest.mark.parametrize(
    ("kind", "values", "certain"),
    [
        ("view", {"heads": 4}, True),  # the outermost of the sizes: neighbouring features share a head
        ("sizes", {"q_size": 32, "kv_size": 16}, True),
        ("halves", {"q_size": 32}, True),  # sizes that the message does not have: those of the statement
        ("rest", {"q_size": 32}, False),  # -1 takes what there is: an earlier size than those of the view
        ("configured", {"config.heads": 4, "size": 8, "config.kv_heads": 2}, False),  # it fails further on
    ],
)
def test_what_was_read_and_does_not_fit_is_told(kind: str, values: dict[str, int], certain: bool) -> None:
    assert told(kind) == WholeNumbers("layers.0", values, certain)


def test_numbers_that_equal_a_size_by_accident_are_not_told() -> None:
    """Of `block_size` and `heads`, both as many as a size of the view, the forward divides the one that stands there."""
    attention = Attention(16, "accident", Config(), 2)
    attention.qkv, attention.block_size = nn.Linear(16, 32), 4
    with pytest.raises(RuntimeError) as caught:
        attention(torch.zeros(4, 5, 16))
    found = whole_numbers_of(caught.value, 2, lambda m: "layers.0" if m is attention else None)
    assert found == WholeNumbers("layers.0", {"heads": 4}, True)


def test_a_bound_that_the_forward_asserts_is_not_told() -> None:
    error = followed("asserted")
    assert error.code == "does-not-run" and "divide" not in (error.help or "")
    assert [(Path(r.span.file).name, r.label) for r in error.related[:1]] == [("reading.py", "it fails here")]


def test_a_change_in_place_is_not_about_sizes() -> None:
    class Adding(nn.Module):
        size = 16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.reshape(-1, self.size)
            raise RuntimeError(f"Output 0 of _ToTorchTensor is a view and is being modified inplace {y.ndim}")

    with pytest.raises(RuntimeError) as caught:
        Adding()(torch.zeros(2, 16))
    assert whole_numbers_of(caught.value, 2, lambda _: "layers.0") is None


def test_of_sizes_that_no_number_has_to_do_with_nothing_is_told() -> None:
    assert told("other") is None


def test_numbers_that_the_degree_does_not_divide_are_left_out() -> None:
    error = RuntimeError("shape '[3, 5, 4, 8]' is invalid for input of size 1")
    assert whole_numbers_of(error, 2, lambda _: "") is None  # nobody's forward
    found = told("configured", 4)
    assert found is not None and found.values == {"config.heads": 4, "size": 8}


class FewHeads(nn.Module):
    """Attention whose forward views keys as all its key-value heads."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.heads, self.kv, self.size = 8, 2, 8
        self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.q, self.k, self.o = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        q = self.q(x).view(*input_ids.shape, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(*input_ids.shape, self.kv, self.size).transpose(1, 2)
        y = scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return self.head(self.o(y.transpose(1, 2).flatten(2)))


def test_a_number_of_heads_below_tp_is_taken_from_the_tensor_and_not_divided(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "rules:\n  q: colwise\n  k: {style: colwise, replicate_kv: kv}\n  o: rowwise\n"
        '  "": {style: shard-params, divide: [heads]}\n'
    )
    setup = setup_of(
        *GPT[:1], f"plan={plan}", "parallel=tp4", f"model._target_={__name__}.FewHeads",
        "train.seq_len=16", "train.batch_size=4",
    )  # fmt: skip
    model = setup.build_model()
    (found,) = followed_findings(setup, setup.compile(model), model)
    assert found.code == "does-not-run" and found.help == (
        "the forward of the root reads `kv` (2) of the unsharded model, which tp=4 does not divide: write -1 in place of `kv` "
        "in the forward, as in `view(batch, sequence, -1, size)`, which takes the heads that a rank has, or use a tp that "
        "divides 2"
    )


def followed(kind: str, *overrides: str) -> Diagnostic:
    setup = setup_of(*READING, "parallel=tp2", f"model.kind={kind}", *overrides)
    model = setup.build_model()
    (found,) = followed_findings(setup, setup.compile(model), model)
    return found


def test_validate_says_what_to_divide_and_where() -> None:
    found = followed("view")
    assert (found.code, found.severity) == ("does-not-run", "error")
    assert found.help == (
        "the forward of layers.0 reads `heads` (4) of the unsharded model, but a rank has 2: add the rule "
        "`layers.*: {style: shard-params, divide: [heads]}`"
    )
    assert found.span is not None and (found.span.line, found.span.column) == (3, 3)  # where it is split


def test_a_rule_that_is_there_is_added_to() -> None:
    rule = "layers.*: {style: prepare-input, input: {x: replicate}, local: true, grad: partial}"
    found = followed("sizes", f'rules=["{rule}"]')
    assert found.help is not None
    assert found.help.endswith(
        "add `{style: shard-params, divide: [q_size, kv_size]}` to the rule `layers.*`"
    )
    assert found.span is not None and found.span.file.startswith("<override rules")


def test_what_it_says_is_the_remedy() -> None:
    setup = setup_of(
        *READING, "parallel=tp2", "model.kind=sizes",
        'rules=["layers.*: {style: shard-params, divide: [q_size, kv_size]}"]',
    )  # fmt: skip
    model = setup.build_model()
    assert followed_findings(setup, setup.compile(model), model) == ()


def test_features_of_a_linear_that_is_stored_the_other_way_round_are_followed_too() -> None:
    rules = 'rules=["layers.*: {style: shard-params, divide: [q_size, kv_size]}"%s]'
    plain = followed("transposed", rules % ', "layers.*.qkv: colwise"')
    assert plain.code == "fused-features" and plain.help == (
        "write `packed: [2, 1, 1]`, which splits each part separately"
    )
    setup = setup_of(*READING, "parallel=tp2", "model.kind=transposed", rules % "")
    model = setup.build_model()
    assert followed_findings(setup, setup.compile(model), model) == ()


def test_plan_says_the_same_of_a_step_that_it_cannot_trace() -> None:
    with pytest.raises(PlanError) as caught:
        traced(setup_of(*READING, "parallel=tp2", "model.kind=halves"))
    [found] = caught.value.diagnostics
    assert found.code == "trace-failed" and found.help is not None
    assert (
        "layers.0 reads `q_size` (32) of the unsharded model, but a rank has 16: add the rule" in found.help
    )
    assert [(r.span.line, r.label) for r in found.related] == [(3, "the rule of layers.0.qkv")]
