"""How tokens are drawn, what a terminal is shown, and lengths: without a model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelizer.training.data.tokenizer import BYTES
from parallelizer.training.sampling.draw import draw
from parallelizer.training.sampling.settings import Sampling
from parallelizer.training.sampling.stream import TextStream, printable
from parallelizer.training.sampling.text import multiple

LOGITS = torch.tensor([0.1, 3.0, -1.0, 2.9, 0.0])


def drawn(sampling: Sampling, times: int = 400, seed: int = 0) -> dict[int, float]:
    generator = torch.Generator().manual_seed(seed)
    found = [draw(LOGITS.clone(), sampling, generator) for _ in range(times)]
    return {token: found.count(token) / times for token in sorted(set(found))}


def test_at_temperature_0_the_likeliest_token_is_taken() -> None:
    assert drawn(Sampling(temperature=0), 3) == {1: 1.0}


def test_tokens_are_drawn_as_often_as_the_softmax_says() -> None:
    shares = drawn(Sampling(temperature=2.0), 4000)
    expected = torch.exp(LOGITS.double() / 2)
    for token, share in enumerate((expected / expected.sum()).tolist()):
        assert shares[token] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 4000))


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    hot = {"temperature": 100.0}
    assert list(drawn(Sampling(**hot, top_k=2))) == [1, 3]
    assert list(drawn(Sampling(**hot, top_k=99))) == [0, 1, 2, 3, 4]
    assert list(drawn(Sampling(**hot, top_p=0.01))) == [1]
    assert list(drawn(Sampling(**hot, top_p=0.21))) == [1, 3]
    assert list(drawn(Sampling(**hot, top_p=1.0))) == [0, 1, 2, 3, 4]


def test_a_seed_draws_the_same_again_and_another_others() -> None:
    texts = [
        [draw(LOGITS, Sampling(temperature=1.0), generator) for _ in range(30)]
        for generator in (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("cp", "tp", "length"), [(1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 2, 4), (2, 8, 16), (3, 4, 12)]
)
def test_lengths_divide_by_what_the_mesh_asks_for(cp: int, tp: int, length: int) -> None:
    assert multiple(cp, tp) == length


@given(st.text())
def test_a_text_that_grows_byte_by_byte_is_written_whole_and_once(text: str) -> None:
    wrote: list[str] = []
    stream = TextStream(BYTES, quiet=False)
    stream._write = lambda new: (wrote.append(new), setattr(stream, "shown", stream.shown + len(new)))  # type: ignore
    tokens = [0, *text.encode(errors="replace").replace(b"\0", b" ")]
    for count in range(1, len(tokens) + 1):
        stream.show(tokens[:count])
    stream.end()
    expected = text.encode(errors="replace").replace(b"\0", b" ").decode()
    assert "".join(wrote) == expected + "\n"
    assert all("�" not in part for part in wrote) or "�" in expected


def test_no_control_character_reaches_a_terminal() -> None:
    assert printable("a\x1b[2J\tb\n\x07é") == "a�[2J\tb\n�é"
