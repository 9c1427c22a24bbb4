"""Which exceptions say that another rank has ended."""

from __future__ import annotations

import pytest

from parallelizer.runtime.launch.failures import LaunchError
from parallelizer.runtime.lost_rank import is_of_another, what_was_said

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:10926. "
    "This is typically caused by a remote worker crashing."
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GLOO, "Connection closed by peer"),
        (
            "[gloo/transport/tcp/pair.cc:534] Connection reset by peer [127.0.0.1]:1",
            "Connection reset by peer",
        ),
        ("writev [127.0.0.1]:1: Broken pipe", "Broken pipe"),
        (
            "Connection was likely closed. Did the remote server shutdown or crash?",
            "Connection was likely closed",
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            "ncclRemoteError",
        ),
    ],
)
def test_what_gloo_nccl_and_stores_say(text: str, said: str) -> None:
    assert what_was_said(RuntimeError(text)) == said
    try:
        raise LaunchError("no rank can agree with all others") from RuntimeError(text)
    except LaunchError as error:
        assert is_of_another(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("Timed out waiting 600000ms for recv operation to complete"),
        ValueError(GLOO),
    ],
)
def test_what_is_something_else(error: Exception) -> None:
    assert not is_of_another(error)
