"""Slices of safetensors files, against the safetensors package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallelizer.hugging_face import stored_files
from parallelizer.hugging_face.stored_files import Reader, Writer, described, read_file
from tests.hugging_face.folders import safetensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8)


def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_is_read_and_written_as_from_the_whole(
    data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    # Small limits, so that little tensors are read in all the ways of large ones.
    monkeypatch.setattr(stored_files, "BLOCK", data.draw(st.sampled_from([8, 64, 1 << 20])))
    monkeypatch.setattr(stored_files, "RUN", data.draw(st.sampled_from([4, 32, 1 << 20])))
    tensors = {"first": some((3,), torch.float32), "t": some(shape, dtype), "x": some((5,), torch.uint8)}
    safetensors.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    indices = []
    for size in shape:
        start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 3))
        indices.append((start, data.draw(st.integers(1, (size - start + step - 1) // step)), step))
    chosen = tuple(slice(s, s + c * n, n) for s, c, n in indices)
    wanted = tensors["t"][chosen]

    file = read_file(tmp_path / "a.safetensors")
    into = data.draw(st.sampled_from([dtype, torch.float32 if dtype.is_floating_point else dtype]))
    target = torch.zeros(wanted.shape[::-1], dtype=into).permute(list(reversed(range(wanted.dim()))))
    if data.draw(st.booleans()):
        target = target.contiguous()
    with Reader() as reader:
        reader.read(file.path, file.entries["t"], indices, target)
    assert torch.equal(target, wanted.to(into))

    (tmp_path / "b").mkdir(exist_ok=True)
    (tmp_path / "b" / "a.safetensors").unlink(missing_ok=True)
    with Writer([file], tmp_path / "b") as writer:
        writer.write(file.path.name, file.entries["t"], indices, wanted)
    written = safetensors.load_file(tmp_path / "b" / "a.safetensors")["t"]
    expected = torch.zeros(shape, dtype=dtype)
    expected[chosen] = wanted
    assert torch.equal(written, expected) and written.dtype == dtype


def test_a_file_of_ones_own_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(2, 3), (), (5,), (0, 4), (1,)]
    tensors = {f"{i}é{dtype}": some(shapes[i % 5], dtype) for i, dtype in enumerate(DTYPES + DTYPES)}
    safetensors.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    file = described(((k, t.dtype, tuple(t.shape)) for k, t in tensors.items()), tmp_path / "b.safetensors")
    with Writer([file], tmp_path) as writer:
        for key, tensor in tensors.items():
            writer.write(file.path.name, file.entries[key], [(0, size, 1) for size in tensor.shape], tensor)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert read_file(tmp_path / "b.safetensors") == file


def test_a_file_is_not_written_over(tmp_path: Path) -> None:
    file = described([("a", torch.float32, (2,))], tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        Writer([file], tmp_path)
    assert (tmp_path / "a.safetensors").read_text() == "mine"


def test_no_more_than_a_block_is_read_for_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "BLOCK", 4096)
    tensor = some((512, 256), torch.float32)
    safetensors.save_file({"t": tensor}, tmp_path / "a.safetensors")
    file, sizes, fill = read_file(tmp_path / "a.safetensors"), [], stored_files._fill

    def filled(fd: int, at: int, target: Any) -> None:
        sizes.append(target.numel() * target.element_size())
        fill(fd, at, target)

    monkeypatch.setattr(stored_files, "_fill", filled)
    target = torch.empty(512, 8)
    with Reader() as reader:
        reader.read(file.path, file.entries["t"], [(0, 512, 1), (8, 8, 1)], target)
    assert torch.equal(target, tensor[:, 8:16]) and max(sizes) <= 4096
    sizes.clear()
    with Reader() as reader:  # rows are read alone, straight into their place
        reader.read(file.path, file.entries["t"], [(100, 64, 1), (0, 256, 1)], torch.empty(64, 256))
    assert sizes == [64 * 1024]
