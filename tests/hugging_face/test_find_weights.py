"""Where a configured model's weights are."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.hugging_face.architecture import TARGET
from parallelizer.hugging_face.find_weights import weights_folder


def test_a_folder_is_itself_and_what_has_no_name_has_no_weights(tmp_path: Path) -> None:
    assert weights_folder({"_target_": TARGET, "name": str(tmp_path)}, Origins()) == tmp_path
    assert weights_folder({"_target_": TARGET, "name": None}, Origins()) is None
    assert weights_folder({"_target_": "mine.Model", "name": str(tmp_path)}, Origins()) is None


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere", "nobody/nothing"])
def test_what_is_not_there_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError) as caught:
        weights_folder({"_target_": TARGET, "name": name}, Origins())
    [found] = caught.value.diagnostics
    assert (
        found.code == "weights-not-found"
        and name in found.message
        and "train.pretrained=false" in (found.help or "")
    )


def test_a_hubs_copy_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra `hf` is not installed")
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert weights_folder({"_target_": TARGET, "name": "somebody/model"}, Origins()) == tmp_path
    assert asked == ["somebody/model"]
