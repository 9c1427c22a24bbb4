"""The command: what it prints, what it compares, and what it says of models that it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.commands import main as cli

pytest.importorskip("transformers", reason="models of transformers are an optional extra")

Captured = pytest.CaptureFixture[str]

SMALL = ("train.batch_size=2", "train.seq_len=16")
QWEN = ("model=hf_qwen3", "model.config.hidden_size=64", "model.config.intermediate_size=128", *SMALL)

WRITTEN = """\
version: 1
rules:
  # tp_plan: behind each rule stands transformers' string; (added) to every plan, by transformers itself.
  model.embed_tokens:                               [rowwise, fsdp]                      # embedding_rowwise (added), (free)
  model.layers.*.self_attn.{q,k,v}_proj:            colwise                              # colwise
  model.layers.*.self_attn.o_proj:                  rowwise                              # rowwise
  model.layers.*.self_attn.{q,k}_norm:              replicate                            # replicated_with_grad_allreduce
  model.layers.*.mlp.{gate,up}_proj:                colwise                              # colwise
  model.layers.*.mlp.down_proj:                     rowwise                              # rowwise
  lm_head:                                          {style: colwise, output: replicate}  # colwise_gather_output
  # Ours: what no entry names lies whole on every rank, with one gradient; as DTensors, like everything else.
  model.layers.*.{input,post_attention}_layernorm:  {style: replicate, grad: replicate}
  model.norm:                                       {style: replicate, grad: replicate}
  # Ours: exact attention over a sequence that is split over cp, where the attention interface is called.
  model.layers.*.self_attn:                         context-parallel
  # fsdp_plan: behind each rule stands transformers' string; the others keep full weights, as the root does.
  model.layers.*:                                   [fsdp, stage]  # free_full_weight, in its pp_plan
  "":                                               fsdp           # the root: everything else, kept after forward
buffers:
  batch: {input_ids: 1, labels: {dim: 1, pad: -100}, position_ids: positions}
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan as the command prints it."""
    import contextlib
    import io

    path, out = tmp_path_factory.mktemp("imported") / "qwen.yaml", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["import-plan", *QWEN]) == 0
    path.write_text(out.getvalue())
    return path


def test_the_plan_is_printed_with_where_each_line_came_from(written: Path) -> None:
    header, _, body = written.read_text().partition("version: 1\n")
    assert header.startswith("# Qwen3ForCausalLM by the tp_plan of transformers ")
    assert "`python -m parallelizer import-plan model=hf_qwen3 " in header
    assert "version: 1\n" + body == WRITTEN.replace("(free)", "free_full_weight")


@pytest.mark.parametrize("preset", ["single", "tp2", "fsdp2", "cp2"])
def test_it_is_a_plan_that_validates(preset: str, written: Path, capsys: Captured) -> None:
    assert cli.main(["validate", "--no-proof", *QWEN, f"plan={written}", f"parallel={preset}"]) == 0, (
        capsys.readouterr().err
    )


def test_a_plan_that_is_as_it_would_be_written_passes(written: Path, capsys: Captured) -> None:
    assert cli.main(["import-plan", *QWEN, "--check", str(written)]) == 0
    assert f"{written} is what transformers " in capsys.readouterr().out


def test_what_differs_is_told_with_its_line(written: Path, tmp_path: Path, capsys: Captured) -> None:
    text = written.read_text()
    lines = [line for line in text.splitlines() if "{q,k}_norm" not in line]
    edited = tmp_path / "edited.yaml"
    edited.write_text(
        "\n".join(lines).replace(
            "o_proj:                  rowwise", "o_proj: {style: rowwise, output: shard(1)}"
        )
    )
    line = next(i for i, one in enumerate(edited.read_text().splitlines(), 1) if "o_proj" in one)
    assert cli.main(["import-plan", *QWEN, "--check", str(edited)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"model.layers.*.self_attn.o_proj: now rowwise (rowwise); rowwise in {edited}:{line}" in out
    assert (
        f"model.layers.*.self_attn.{{q,k}}_norm: now replicate (replicated_with_grad_allreduce); {edited} has no rule"
        in out
    )
    assert "down_proj" not in out


def test_rules_that_are_yours_are_not_compared(written: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited.yaml"
    edited.write_text(written.read_text().replace("context-parallel", "[context-parallel, checkpoint]"))
    assert cli.main(["import-plan", *QWEN, "--check", str(edited)]) == 0


def test_a_rule_that_names_nothing_any_more_is_told(written: Path, tmp_path: Path, capsys: Captured) -> None:
    edited = tmp_path / "edited.yaml"
    edited.write_text(written.read_text().replace("lm_head:", "head:"))
    assert cli.main(["import-plan", *QWEN, "--check", str(edited)]) == 1
    out = capsys.readouterr().out
    assert "`head` matches no module" in out and "lm_head: now {style: colwise, output: replicate}" in out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["model=hf_gpt2"], "no-tp-plan"),
        (["model=llama_debug"], "no-tp-plan"),
        (["model=hf_qwen3", "--check", "nowhere.yaml"], "plan-not-found"),
        (["model=hf", "model.config={model_type: nope}"], "model-build"),
    ],
)
def test_what_cannot_be_imported_is_a_finding(arguments: list[str], code: str, capsys: Captured) -> None:
    assert cli.main(["import-plan", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"error[{code}]" in err


def test_parameters_that_other_modules_read_stay_plain(capsys: Captured) -> None:
    sizes = (
        "model_type: longcat_flash, vocab_size: 64, hidden_size: 32, ffn_hidden_size: 48, expert_ffn_hidden_size: 16, "
        "num_layers: 1, num_hidden_layers: 2, num_attention_heads: 4, n_routed_experts: 4, zero_expert_num: 2, moe_topk: 2, "
        "kv_lora_rank: 16, q_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 16, head_dim: 8, "
        "pad_token_id: 0, bos_token_id: 1, eos_token_id: 2"
    )
    assert cli.main(["import-plan", "model=hf", f"model.config={{{sizes}}}", *SMALL]) == 0
    out = capsys.readouterr().out
    assert (
        "another module reads these" in out and "  #   model.layers.*.mlp.router.classifier.weight\n" in out
    )
