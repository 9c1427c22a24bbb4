"""A linear in float8 gets rows that kernels take: those of its own calls in the step, whatever the sequence is."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import parallelizer as pz
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError
from parallelizer.language.workload import Entry, Workload
from parallelizer.simulate.all_checks import check_traced
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.simulate.record.trace import trace
from tests.findings import marked, on_meta
from tests.proof import subjects
from tests.proof.test_float8_experts import Mixture
from tests.simulate.setups import MIXTURES, setup_of

pytest.importorskip("torchao", reason="float8 needs torchao")


def found(*overrides: str) -> list[Diagnostic]:
    """The findings about sizes of a traced step, without the proof."""
    setup = setup_of(*overrides)
    model = setup.build_model()
    program = setup.compile(model)
    step = trace(program, model, setup.recipe())
    every = check_traced(Traced(program, model, step, setup.workload))
    return [one for one in every if one.code == "precision-size"]


VIT = ("model=vit_tiny", "model.class_token=true", "train.batch_size=6", "model.depth=2")


@pytest.mark.parametrize(
    ("preset", "rows"),
    [("fsdp2", 3 * 65), pytest.param("tp2", 6 * 65, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def test_patches_and_a_class_token_are_no_sequence(preset: str, rows: int, device: str) -> None:
    rule = "blocks.*.mlp.fc[12]: {style: float8, recipe: rowwise}"
    whole = "++parallel.layouts.stream=replicate"  # tp does not divide 65 tokens
    [error] = found(*VIT, f"parallel={preset}", whole, f"device={device}", f'rules=["{rule}"]')
    assert error.message == (
        f"a rank computes {rows} tokens at once in blocks.{{0,1}}.mlp.fc{{1,2}}: float8 kernels need a multiple of 16"
    )
    assert error.span is not None and error.span.file.startswith("<override rules=")


@pytest.mark.slow
def test_a_linear_of_another_rank_s_stage_is_seen_too() -> None:
    """The traced rank is of the first stage; four microbatches of two rows each."""
    rule = "blocks.1.mlp.fc1: {style: float8, recipe: rowwise}"
    [error] = found(*VIT, "parallel=pp2", "train.batch_size=8", f'rules=["{rule}"]')
    assert error.message.startswith(f"a rank computes {2 * 65} tokens at once in blocks.1.mlp.fc1: ")


def test_options_under_which_the_rows_do_not_matter() -> None:
    options = ("pad: true", "recipe: rowwise-gw-hp", "emulate: true")
    rules = [f"blocks.{at}.mlp.fc1: {{style: float8, {option}}}" for at, option in enumerate(options)]
    assert found(*VIT, "model.depth=3", "parallel=fsdp2", f"rules=[{','.join(map(repr, rules))}]") == []


def test_rows_that_kernels_take_are_fine() -> None:
    overrides = (
        *VIT[:1],
        "model.class_token=false",
        "model.depth=1",
        "train.batch_size=6",
        "parallel=fsdp2",
    )
    assert found(*overrides, 'rules=["blocks.*.mlp.fc[12]: float8"]') == []


class Translator(nn.Module):
    """An encoder of a fixed length, whose mean is added to the decoder's sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(subjects.VOCAB, 32)
        self.target = nn.Embedding(subjects.VOCAB, 32)
        self.encoder = nn.ModuleList([nn.Linear(32, 32)])
        self.decoder = nn.ModuleList([nn.Linear(32, 32)])
        self.pooled = nn.Linear(32, 32)
        self.head = nn.Linear(32, subjects.VOCAB)

    def forward(self, source_ids: Tensor, input_ids: Tensor) -> Tensor:
        seen = self.pooled(self.encoder[0](self.source(source_ids)).mean(1))
        out: Tensor = self.head(self.decoder[0](self.target(input_ids)) + seen[:, None])
        return out


def translated(rules: str, mesh: dict[str, int]) -> tuple[str, list[Diagnostic]]:
    source, ids = Entry(("batch", 12), range=(0, 16)), Entry(("batch", "sequence"), range=(0, 16))
    work = Workload({"source_ids": source, "input_ids": ids, "labels": ids}, 4, 16)
    text = f"version: 1\nrules:\n  '': fsdp\n  {rules}\n"
    every = pz.validate(
        on_meta(Translator), subjects.plan(text), mesh, workload=work, loss=subjects.token_loss
    )
    return text, [one for one in every if one.code == "precision-size"]


def test_an_encoder_has_a_length_of_its_own() -> None:
    """Two rows a rank: 2 x 12 tokens in the encoder, 2 x 16 in the decoder, and two means."""
    text, every = translated('"{encoder.0,decoder.0}": float8\n  pooled: float8', {"dp_shard": 2})
    assert {marked(text, one): one.message for one in every} == {
        '"{encoder.0,decoder.0}"': "a rank computes 24 tokens at once in encoder.0: float8 kernels need a multiple of 16",
        "pooled": "a rank computes 2 tokens at once in pooled: float8 kernels need a multiple of 16",
    }


@pytest.mark.slow
def test_groups_of_stacked_experts_have_any_number_of_rows() -> None:
    """A rank has 9 tokens, each of which chooses two experts."""
    pytest.importorskip("transformers", reason="the optional extra `hf`")
    rule = "model.layers.*.{self_attn.q_proj,mlp.experts}: {style: float8, recipe: rowwise}"
    sizes = (*MIXTURES["hf_qwen3_moe"], "train.batch_size=2", "train.seq_len=9", "parallel=fsdp2")
    # The linear is refused before a step is traced; the experts are not.
    with pytest.raises(PlanError, match="a rank computes 9 tokens at once"):
        found("model=hf_qwen3_moe", *sizes, f'rules=["{rule}"]')
    alone = rule.replace("{self_attn.q_proj,mlp.experts}", "mlp.experts")
    assert found("model=hf_qwen3_moe", *sizes, f'rules=["{alone}"]') == []


def test_experts_whose_tokens_values_choose_are_filled_up_or_refused() -> None:
    """Such a step cannot be traced, so that no number of tokens is known."""
    ids = Entry(("batch", "sequence"), range=(0, subjects.VOCAB))
    work = Workload({"input_ids": ids, "labels": ids}, 4, 16)

    def sized(options: str) -> list[Diagnostic]:
        text = f"version: 1\nrules:\n  experts.*.*: {{style: float8, {options}}}\n  '': fsdp\n"
        plan = subjects.plan(text)
        every = pz.validate(on_meta(Mixture), plan, {"dp_shard": 2}, workload=work, loss=subjects.token_loss)
        return [one for one in every if one.code == "precision-size"]

    [error] = sized("recipe: rowwise")
    assert error.message.startswith(
        "the step cannot be traced, so the tokens that experts.{0..3}.{up,down} computes"
    )
    assert (
        error.severity == "error"
        and error.span is not None
        and (error.span.line, error.span.column) == (3, 3)
    )
    assert sized("recipe: rowwise, pad: true") == sized("recipe: rowwise-gw-hp") == []
