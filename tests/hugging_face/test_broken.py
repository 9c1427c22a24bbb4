"""What is wrong with a folder of weights is said in words, with its file, on every rank, and nothing hangs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.hugging_face import transformers_private
from parallelizer.hugging_face.saving import save_pretrained
from parallelizer.hugging_face.weight_folder import SINGLE
from parallelizer.hugging_face.weights import load_pretrained
from tests.hugging_face.broken import BREAKS, broken_model, cut, edited, found, raised
from tests.hugging_face.folders import built, config_of, on_meta, write
from tests.hugging_face.test_weights import parallel_model
from tests.ranks import run_ranks


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_wrong_is_one_finding_with_its_file(what: str, tmp_path: Path) -> None:
    _, _, code, words = BREAKS[what]
    [diagnostic] = found(what, tmp_path)
    assert diagnostic.code == code and words in diagnostic.message and diagnostic.help
    assert diagnostic.span is not None and diagnostic.span.file.startswith(str(tmp_path / "model"))


def test_what_the_headers_tell_leaves_the_model_on_meta(tmp_path: Path) -> None:
    model, folder = broken_model("cut off", tmp_path)
    assert raised(lambda: load_pretrained(model, folder, device="cpu"))
    assert all(p.is_meta for p in model.parameters())


def test_everything_that_the_headers_tell_comes_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama")
    edited(folder, lambda t: (t.pop("model.norm.weight"), t.update(extra=torch.ones(2))))
    diagnostics = raised(lambda: load_pretrained(on_meta(config_of("llama")), folder, device="cpu"))
    assert sorted(d.code for d in diagnostics) == ["weights-missing", "weights-unexpected"]


def test_a_model_that_is_not_transformers_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    assert [d.code for d in raised(lambda: load_pretrained(model, tmp_path, device="cpu"))] == [
        "weights-not-found"
    ]
    assert [d.code for d in raised(lambda: save_pretrained(model, tmp_path / "x"))] == ["weights-unwritable"]


def test_a_conversion_that_computes_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Doubled(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
            return {target_patterns[0]: next(iter(input_dict.values()))[0] * 2}

    doubled = [WeightConverter("up_proj.weight", "up_proj.weight", [Doubled()])]
    folder = write(tmp_path / "model", "llama")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: doubled)
    [found] = raised(lambda: load_pretrained(on_meta(config_of("llama")), folder, device="cpu"))
    assert found.code == "weights-conversion"
    assert (
        found.message.startswith("Doubled needs whole tensors (")
        and "layers.0.mlp.up_proj.weight" in found.message
    )


@pytest.mark.ranks
def test_a_file_that_one_rank_alone_sees_broken_ends_all_of_them(tmp_path: Path) -> None:
    whole, other = write(tmp_path / "whole", "llama"), write(tmp_path / "other", "llama")
    cut(other / SINGLE)

    def worker() -> list[tuple[str, str]]:
        seen = []
        for folder in (other if dist.get_rank() == 1 else whole, whole):
            model = parallel_model("llama", folder, {"dp_shard": 2})
            if folder is whole and seen and dist.get_rank() == 1:
                # The header was read, and the file gets shorter under the reader's hands.
                transformers_private.weight_map = cutting(transformers_private.weight_map, whole / SINGLE)
            with pytest.raises(PlanError) as caught:
                load_pretrained(model, folder, device="cpu")
            # Both may have met it, one by the file's length and one at its end.
            seen += sorted({(d.code, Path(d.span.file).parent.name) for d in caught.value.diagnostics})  # type: ignore[union-attr]
        return seen

    assert run_ranks(worker, 2) == [[("weights-unreadable", "other"), ("weights-unreadable", "whole")]] * 2


def cutting(function: Any, path: Path) -> Any:
    def cuts(*args: Any) -> Any:
        os.truncate(path, path.stat().st_size // 2)
        return function(*args)

    return cuts


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.ranks
@pytest.mark.parametrize("when", ["posix_fallocate", "pwrite", "fsync", "rename"])
def test_a_disk_that_is_full_leaves_nothing_and_no_rank_waits(when: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama")

    def worker() -> list[str]:
        model = parallel_model("llama", folder, {"dp_shard": 2, "tp": 1})
        load_pretrained(model, folder, device="cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, when, full)
            with pytest.raises(PlanError) as caught:
                save_pretrained(model, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        save_pretrained(model, tmp_path / "again")
        return [f"{d.code}: {d.message}" for d in caught.value.diagnostics]

    message = (
        f"weights-unwritable: the model cannot be saved as {tmp_path / 'saved'}: no space left on device"
    )
    assert run_ranks(worker, 2) == [[message]] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "model"]


@pytest.mark.parametrize("where", ["model", "file/below"])
def test_a_name_that_cannot_be_had_is_refused(where: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "llama")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    model = built(config_of("llama"))
    assert [d.code for d in raised(lambda: save_pretrained(model, tmp_path / where))] == [
        "weights-unwritable"
    ]
    assert sorted(tmp_path.iterdir()) == before and (folder / SINGLE).exists()
