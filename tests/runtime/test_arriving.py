"""Numbers on their way to the host: the copy is begun at once, and waited for when they are read."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from parallelizer.runtime.arriving import Arriving


def test_numbers_of_a_gpu_are_copied_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU: `calls` stands for the tensor, its page-locked copy and an event."""
    calls = mock.MagicMock()
    calls.tensor.device.type = "cuda"
    calls.copy.tolist.return_value = [7]
    made = mock.MagicMock(return_value=calls.copy)
    monkeypatch.setattr(torch, "empty_like", made)
    module = SimpleNamespace(Event=lambda: calls.event, current_stream=lambda device: ("stream of", device))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    arriving = Arriving(calls.tensor)
    assert made.call_args.kwargs == {"device": "cpu", "pin_memory": True}
    begun = [name for name, *_ in calls.mock_calls if name.split(".")[0] in ("copy", "event")]
    assert begun == ["copy.copy_", "event.record"]
    assert calls.copy.copy_.call_args.kwargs == {"non_blocking": True}
    # That of the tensor's device, whatever the current device is.
    assert calls.event.record.call_args.args == (("stream of", calls.tensor.device),)
    calls.reset_mock()
    assert arriving.tolist() == [7]
    assert [name for name, *_ in calls.mock_calls] == ["event.synchronize", "copy.tolist"]


def test_numbers_of_a_cpu_are_there() -> None:
    assert Arriving(torch.tensor([1, 2])).tolist() == [1, 2]
