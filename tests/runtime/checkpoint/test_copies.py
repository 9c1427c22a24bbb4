"""Copies for a checkpoint: one block of memory for all of them, which the next save uses again."""

from __future__ import annotations

import pytest
import torch

from parallelizer.runtime.checkpoint.copies import ALIGNMENT, HostCopies


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3, 5, 7),
        "transposed": torch.randn(4, 6).T,
        "a number": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "half": torch.randn(5).bfloat16(),
        "bits": torch.tensor([True, False, True]),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }


def test_copies_are_equal_and_have_storages_of_their_own_size() -> None:
    given = values()
    copies = HostCopies[str](page_locked=False).fill(given)
    assert list(copies) == list(given)
    for key, value in given.items():
        assert copies[key].dtype == value.dtype and torch.equal(copies[key], value), key
        assert copies[key].untyped_storage().size() == value.nbytes, key
        assert copies[key].is_contiguous(), key


def test_all_copies_are_in_one_block_which_the_next_save_uses_again() -> None:
    held, given = HostCopies[str](page_locked=False), values()
    copies = held.fill(given)
    places = {key: copy.data_ptr() for key, copy in copies.items() if copy.numel()}
    room = sum(-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in given.values())
    assert max(places.values()) - min(places.values()) < room
    again = held.fill({key: value.clone().fill_(1) for key, value in given.items()})
    assert {key: copy.data_ptr() for key, copy in again.items() if copy.numel()} == places
    assert all(bool((copy == 1).all()) for copy in again.values())


def test_other_sizes_get_other_memory() -> None:
    held = HostCopies[str](page_locked=False)
    held.fill(values())
    copies = held.fill({"wider": torch.ones(1000)})
    assert list(copies) == ["wider"] and torch.equal(copies["wider"], torch.ones(1000))


def test_the_block_is_page_locked_once_in_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def __init__(self) -> None:
            self.locked: dict[int, int] = {}
            self.calls = 0

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            self.locked[address] = size
            self.calls += 1
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del self.locked[address]
            return 0

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    held = HostCopies[str](page_locked=True)
    small = {str(n): torch.zeros(17) for n in range(9)}  # each with 68 bytes of 128
    copies = held.fill(small)
    assert runtime.locked == {copies["0"].data_ptr(): 9 * 128}
    held.fill(small)
    assert runtime.calls == 1
    del copies
    wider = held.fill({"wider": torch.zeros(1000)})
    assert runtime.locked == {wider["wider"].data_ptr(): 4032}
