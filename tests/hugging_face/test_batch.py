"""The batch of a model whose inputs are no tokens, from the sizes in its configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from parallelizer.hugging_face import masks
from parallelizer.hugging_face.architecture import takes_tokens
from parallelizer.hugging_face.batch import CLASSIFICATION, CROSS_ENTROPY, SQUARED_ERROR, derived
from parallelizer.losses import squared_error
from parallelizer.styles.context_parallel.sequence import CurrentOrder

TOKENS = {"shape": ["batch", "sequence"], "dtype": "int64", "range": [0, 256]}
BATCH = {"input_ids": TOKENS, "labels": {**TOKENS, "ignore": -100}}


class Seeing(nn.Module):
    """Classifies images, or, without classes, returns features of their patches."""

    main_input_name = "pixel_values"

    def __init__(self, classes: int | None) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(image_size=8, num_channels=1)
        self.cut = nn.Conv2d(1, 16, 4, 4)
        self.head = nn.Linear(16, classes) if classes else None

    def forward(self, pixel_values: torch.Tensor) -> Any:
        patches = self.cut(pixel_values).flatten(2).transpose(1, 2)
        if self.head is not None:
            return SimpleNamespace(logits=self.head(patches.mean(1)))
        return SimpleNamespace(pooler_output=None, last_hidden_state=patches)


class Hearing(nn.Module):
    """Reads sound, channel by channel, and writes tokens."""

    main_input_name = "input_features"

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(num_mel_bins=6, max_source_positions=10, is_encoder_decoder=True)
        self.ear = nn.Conv1d(6, 16, 3)
        self.words, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, input_features: torch.Tensor, decoder_input_ids: torch.Tensor | None = None) -> Any:
        if decoder_input_ids is None:
            raise ValueError("what was written so far?")
        heard = self.ear(input_features).mean(-1)
        return SimpleNamespace(logits=self.head(self.words(decoder_input_ids) + heard[:, None]))


def on_meta(model: type[nn.Module], *args: Any) -> nn.Module:
    with torch.device("meta"):
        return model(*args)


def test_images_and_their_classes_are_derived() -> None:
    entries, loss = derived(on_meta(Seeing, 10), BATCH)
    assert entries["pixel_values"] == {"shape": ["batch", 1, 8, 8], "dtype": "float32"}
    assert entries["labels"] == {"shape": ["batch"], "dtype": "int64", "range": [0, 10], "ignore": -100}
    assert (set(entries), loss) == ({"pixel_values", "labels"}, CLASSIFICATION)


def test_without_a_head_the_labels_are_features() -> None:
    entries, loss = derived(on_meta(Seeing, None), BATCH)
    assert (entries["labels"], loss) == ({"shape": ["batch", 4, 16], "dtype": "float32"}, SQUARED_ERROR)
    output = SimpleNamespace(last_hidden_state=torch.ones(2, 4, 16))
    total, count = squared_error(output, {"labels": torch.zeros(2, 4, 16)})
    assert (total.item(), count.item()) == (128, 128)


def test_of_several_shapes_it_is_the_first_that_runs_and_a_decoder_has_tokens_of_its_own() -> None:
    entries, loss = derived(on_meta(Hearing), BATCH)
    assert entries["input_features"]["shape"] == ["batch", 6, 20]
    assert entries["decoder_input_ids"] == TOKENS
    assert (entries["labels"]["shape"], loss) == (["batch", "sequence"], CROSS_ENTROPY)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, True), ({"auto": "AutoModel"}, False), ({"auto": "AutoModel", "loss": "mine.loss"}, None)],
    ids=["a language model", "any other", "a loss of one's own"],
)
def test_only_the_batch_that_the_recipe_writes_is_derived(
    changed: dict[str, Any], expected: bool | None
) -> None:
    config = {"_target_": "parallelizer.hugging_face.causal_lm", "batch": BATCH, "loss": CROSS_ENTROPY}
    assert takes_tokens({**config, **changed}) is expected


def test_a_model_without_tokens_has_no_masks_to_follow() -> None:
    model = Seeing(10)
    masks.follow(model, CurrentOrder(None), 0, 1)  # type: ignore[arg-type]
    assert model(pixel_values=torch.ones(2, 1, 8, 8)).logits.shape == (2, 10)
