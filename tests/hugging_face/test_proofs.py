"""Imported plans compute what one process computes: every gradient and update, on two ranks in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.commands import main as cli

pytest.importorskip("transformers", reason="models of transformers are an optional extra")

SIZES = (
    "vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, pad_token_id: 0, bos_token_id: 1, eos_token_id: 2"
)
LATENT = (
    "kv_lora_rank: 16, q_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 16, head_dim: 8, "
    "n_routed_experts: 4"
)

CONFIGS = {
    "qwen3": ["model=hf_qwen3"],
    "mixtral": ["model=hf_mixtral"],
    "phi3": ["model=hf_phi3"],
    "gemma3_text": ["model=hf_gemma3_text"],
    "deepseek_v3": ["model=hf_deepseek_v3"],
    "glm4": ["model=hf", f"model.config={{model_type: glm4, head_dim: 8, {SIZES}}}"],
    "llama4_text": [
        "model=hf",
        "model.config={model_type: llama4_text, head_dim: 8, num_local_experts: 4, num_experts_per_tok: 1, "
        f"intermediate_size_mlp: 48, {SIZES}}}",
    ],
    "command r+": ["model=hf", f"model.config={{model_type: cohere, use_qk_norm: true, {SIZES}}}"],
    "olmo2": ["model=hf", f"model.config={{model_type: olmo2, {SIZES}}}"],
    "granite_swa": [
        "model=hf",
        "model.attention=eager",
        f"model.config={{model_type: granite_swa, {SIZES}}}",
    ],
    "deepseek_v2": [
        "model=hf",
        "model.config={model_type: deepseek_v2, moe_intermediate_size: 16, num_experts_per_tok: 2, n_shared_experts: 1, "
        f"first_k_dense_replace: 1, n_group: 1, topk_group: 1, {LATENT}, {SIZES}}}",
        "model.config.num_key_value_heads=4",
    ],
    "longcat_flash": [
        "model=hf",
        "model.config={model_type: longcat_flash, vocab_size: 256, hidden_size: 32, ffn_hidden_size: 48, num_layers: 1, "
        "expert_ffn_hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, zero_expert_num: 2, moe_topk: 2, "
        f"pad_token_id: 0, bos_token_id: 1, eos_token_id: 2, {LATENT}}}",
    ],
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_an_imported_plan_is_proven(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.yaml"
    assert cli.main(["import-plan", *CONFIGS[name]]) == 0
    plan.write_text(capsys.readouterr().out)
    assert cli.main(["verify", *CONFIGS[name], f"plan={plan}", "parallel=tp2"]) == 0, capsys.readouterr()
