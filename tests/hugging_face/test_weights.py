"""Weights of a folder arrive in every rank's slice as from_pretrained loads them, and go back to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import parallelizer as pz
from parallelizer.hugging_face import saving, stored_files
from parallelizer.hugging_face.saving import save_pretrained
from parallelizer.hugging_face.weights import load_pretrained
from parallelizer.language.plan import Mesh
from parallelizer.runtime.initialize import local_slice
from parallelizer.runtime.state import state_of
from parallelizer.styles.tied_parameters import tied_names
from tests.chosen import a_fifth
from tests.hugging_face.broken import edited
from tests.hugging_face.folders import (
    CONFIGS,
    SMALL,
    built,
    config_of,
    digests,
    named,
    on_meta,
    plan_text,
    safetensors,
    transformers,
    values,
    write,
)
from tests.parity import gathered, plan
from tests.ranks import run_ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8},  # an embedding with a buffer of its own, two kinds of rotary frequencies
    "gpt_neox": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bert": {"is_decoder": True},
    "falcon": {},
    "mamba": {},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "jamba": {"num_experts": 4, "mamba_dt_rank": 4},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "minimax": {"num_local_experts": 4},
}  # fmt: skip
"""What is special in others, beside SMALL."""

MESHES = {
    1: [{}],
    2: [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}],
    4: [
        {"dp_shard": 4},
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "tp": 2},
    ],
}
"""Sizes of meshes by number of ranks."""


def parallel_model(name: str, folder: Path, sizes: dict[str, int]) -> torch.nn.Module:
    """A tiny model on meta, made parallel, as a person's own loop makes it."""
    model = on_meta(transformers.AutoConfig.from_pretrained(folder))
    mesh = pz.build_mesh(Mesh(sizes), "cpu")
    return pz.apply(pz.compile(plan(plan_text(name)), model, mesh), model, mesh)


def differing(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names whose local values are not this rank's slice of what is wanted, to the bit."""
    packed, found = state_of(model).packed, []  # type: ignore[union-attr]
    tensors = named(model)
    assert tensors.keys() == wanted.keys()
    for key, tensor in tensors.items():
        full = packed[key].pack(wanted[key]) if key in packed else wanted[key]
        local = tensor
        if isinstance(tensor, DTensor):
            full, local = local_slice(full, tensor.device_mesh, tensor.placements), tensor.to_local()
        if not (torch.equal(local, full) and local.dtype == full.dtype):
            found.append(key)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "turn"),
    [pytest.param(1, 0, marks=pytest.mark.slow), (2, 0), (4, 1), pytest.param(2, None, marks=pytest.mark.slow),
     pytest.param(4, None, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_folder_goes_through_every_mesh_and_comes_back_the_same(
    ranks: int, turn: int | None, tmp_path: Path
) -> None:
    """Every model on one mesh, another for each, or on all."""
    folders, wanted, meshes = {}, {}, {}
    for i, name in enumerate(CONFIGS):
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        folders[name] = write(tmp_path / name, name, dtype=dtype, file_size=("5GB", "20KB")[i // 2 % 2])
        wanted[name] = {k: v.detach() for k, v in values(folders[name]).items()}
        every = MESHES[ranks]
        meshes[name] = every if turn is None else [every[(i + turn) % len(every)]]

    def worker() -> list[str]:
        wrong = []
        for name, folder in folders.items():
            for i, sizes in enumerate(meshes[name]):
                model = parallel_model(name, folder, sizes)
                tied = tied_names(model)
                assert load_pretrained(model, folder, device="cpu") is model
                wrong += [f"{name} {sizes}: {key}" for key in differing(model, wanted[name])]
                assert tied_names(model) == tied
                save_pretrained(model, tmp_path / f"{name}-{i}")
        return wrong

    assert run_ranks(worker, ranks) == [[]] * ranks
    for name, folder in folders.items():
        for i in range(len(meshes[name])):
            assert digests(tmp_path / f"{name}-{i}") == digests(folder), name
        again = values(tmp_path / f"{name}-0")
        assert [key for key, value in wanted[name].items() if not torch.equal(again[key], value)] == []
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


SHARED_OUT = """
version: 1
rules:
  model.layers.*.mlp.experts: experts
  model.layers.*: fsdp
  "": fsdp
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "ep"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_experts_that_are_shared_out_come_from_a_folder_and_go_back_the_same(
    ranks: int, ep: int, tmp_path: Path
) -> None:
    folders = {name: write(tmp_path / name, name) for name in ("mixtral", "qwen3_moe")}

    def worker() -> list[str]:
        placed = []
        for name, folder in folders.items():
            model = on_meta(transformers.AutoConfig.from_pretrained(folder))
            mesh = Mesh({"dp_shard": ranks}, ep=ep)
            program = pz.compile(plan(SHARED_OUT), model, mesh)
            model = pz.apply(program, model, pz.build_mesh(mesh, "cpu"))
            load_pretrained(model, folder, device="cpu")
            save_pretrained(model, tmp_path / f"{name}-again")
            placed.append(str(model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").placements))  # type: ignore[attr-defined]
        return placed

    (placed, *others) = run_ranks(worker, ranks)
    assert all(other == placed for other in others)
    assert all("Shard(dim=0)" in one for one in placed), placed
    for name, folder in folders.items():
        assert digests(tmp_path / f"{name}-again") == digests(folder), name


@pytest.mark.parametrize("kind", a_fifth(FAMILIES))
def test_one_process_loads_and_saves_what_transformers_does(kind: str, tmp_path: Path) -> None:
    """A folder is saved as it lay, and a model that came from none byte for byte as save_pretrained writes it."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **FAMILIES[kind]})
    made = built(config, torch.bfloat16)
    made.save_pretrained(tmp_path / "a", max_shard_size="50KB")  # type: ignore[operator]
    model = load_pretrained(on_meta(config), tmp_path / "a", device="cpu")
    ours, wanted = named(model), values(tmp_path / "a")
    assert ours.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(ours[key], value)] == []
    save_pretrained(model, tmp_path / "b")
    assert digests(tmp_path / "b") == digests(tmp_path / "a")
    made.save_pretrained(tmp_path / "c")  # type: ignore[operator]
    save_pretrained(made, tmp_path / "d")
    assert digests(tmp_path / "d") == digests(tmp_path / "c")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "largest", "files"),
    [
        ("llama_tied", 20_000, 4),
        ("mixtral", 10**9, 1),
        pytest.param("phi3", 20_000, 6, marks=pytest.mark.slow),
    ],
)
def test_a_parallel_model_that_came_from_no_folder_is_saved_as_transformers_would(
    name: str, largest: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LARGEST_FILE", largest)
    monkeypatch.setattr(saving, "PART", 300)

    def worker() -> dict[str, torch.Tensor]:
        model = on_meta(config_of(name))
        mesh = pz.build_mesh(Mesh({"dp_shard": 2, "tp": 2}), "cpu")
        pz.apply(pz.compile(plan(plan_text(name)), model, mesh), model, mesh)
        pz.materialize(model, device="cpu", seed=3)
        save_pretrained(model, tmp_path / "ours")
        return gathered(model, dict(model.named_parameters()))

    params = run_ranks(worker, 4)[0]
    model = built(config_of(name))
    model.load_state_dict(params, strict=name != "llama_tied")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=largest)  # type: ignore[operator]
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) == files
    assert digests(tmp_path / "ours") == digests(tmp_path / "theirs")


def test_what_the_model_does_not_use_is_carried_over(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama_tied")
    old = torch.arange(4.0)
    edited(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": old}))
    edited(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load_pretrained(on_meta(config_of("llama_tied")), folder, device="cpu")
    save_pretrained(model, tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # type: ignore[union-attr, operator]
    save_pretrained(model, tmp_path / "trained")
    saved = safetensors.load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    assert torch.equal(saved["lm_head.weight"], model.lm_head.weight)  # type: ignore[union-attr]
    assert torch.equal(saved["model.layers.0.self_attn.rotary_emb.inv_freq"], old)


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=["fsdp2", "tp2"])
def test_a_rank_reads_its_slice_and_nothing_else(
    sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows are read in part; so a rank reads just the bytes that it keeps."""
    monkeypatch.setattr(stored_files, "RUN", 1)
    folder = write(tmp_path / "model", "mixtral")

    def worker() -> tuple[int, int]:
        read, fill = [], stored_files._fill

        def counted(fd: int, at: int, target: torch.Tensor) -> None:
            read.append(target.numel() * target.element_size())
            fill(fd, at, target)

        monkeypatch.setattr(stored_files, "_fill", counted)
        model = parallel_model("mixtral", folder, sizes)
        load_pretrained(model, folder, device="cpu")
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        return sum(read), sum(s.numel() * s.element_size() for s in shards)

    for read, kept in run_ranks(worker, 2):
        assert read == kept
    whole = sum(p.numel() * 4 for p in values(folder).values())
    assert kept < 0.82 * whole  # tp2 leaves the embedding and the router whole
