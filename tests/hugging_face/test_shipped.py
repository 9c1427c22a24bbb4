"""Weights under every shipped plan for a transformers model: into its shards, and back to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import parallelizer as pz
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.diagnostics.package_folder import config_folder
from parallelizer.proof.tiny import shrink
from tests.chosen import SHARE, a_fifth
from tests.hugging_face.folders import digests, transformers
from tests.hugging_face.test_weights import differing
from tests.ranks import run_ranks

FAMILIES = sorted(path.stem for path in (config_folder() / "model").glob("hf_*.yaml"))


@pytest.mark.ranks
@pytest.mark.parametrize("share", a_fifth(range(SHARE)))
def test_every_shipped_family_comes_back_the_same(share: int, tmp_path: Path) -> None:
    setups, wanted, families = {}, {}, FAMILIES[share::SHARE]
    for family in families:
        setup, _ = shrink(from_config(*compose_config((f"model={family}", "parallel=fsdp2_tp2"))))
        model = setup.build_model().to_empty(device="cpu")
        model.tie_weights()  # type: ignore[operator]  # which to_empty has undone
        torch.manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
            for buffer in model.buffers():
                buffer.zero_()
        model.save_pretrained(tmp_path / family, max_shard_size="50KB")  # type: ignore[operator]
        cls = getattr(transformers, str(setup.model.get("auto", "AutoModelForCausalLM")))
        loaded = cls.from_pretrained(tmp_path / family, dtype=torch.float32)
        everything = {**dict(loaded.named_parameters(remove_duplicate=False)), **dict(loaded.named_buffers())}
        setups[family], wanted[family] = setup, {key: value.detach() for key, value in everything.items()}

    def worker() -> list[str]:
        wrong = []
        for family, setup in setups.items():
            model = setup.build_model()
            program = setup.compile(model)
            pz.apply(program, model, pz.build_mesh(setup.mesh, "cpu"))
            pz.load_pretrained(model, tmp_path / family, device="cpu")
            wrong += [f"{family}: {key}" for key in differing(model, wanted[family])]
            pz.save_pretrained(model, tmp_path / f"{family}-saved")
        return wrong

    assert run_ranks(worker, 4) == [[]] * 4
    for family in families:
        assert digests(tmp_path / f"{family}-saved") == digests(tmp_path / family), family
