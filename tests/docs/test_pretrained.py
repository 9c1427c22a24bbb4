"""docs/pretrained.md: the model config of one's own builds the model that the page describes, with the shipped plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parallelizer.configuration.read_setup import from_overrides
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs/pretrained.md").read_text()


def test_a_configuration_alone_makes_a_model_with_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    [(name, text)] = re.findall(r"```yaml\n# conf/model/(\w+)\.yaml\n(.*?)```", TEXT, re.S)
    (tmp_path / "model").mkdir()
    (tmp_path / f"model/{name}.yaml").write_text(text)
    setup = from_overrides([f"model={name}", "parallel=fsdp2_tp2"], config_dir=str(tmp_path))
    model = setup.build_model()
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.hidden_size == 256
    assert not any(found.severity == "error" for found in setup.compile(model).diagnostics)
    assert f"configs/plans/{setup.plan.name}.yaml on {setup.mesh}: valid" in TEXT
