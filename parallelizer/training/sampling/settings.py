"""The configuration keys of a sampling command, in one table; checked before a rank starts."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from parallelizer.configuration.origins import Origins
from parallelizer.configuration.reading import Reading
from parallelizer.diagnostics.diagnostic import PlanError
from parallelizer.training import settings
from parallelizer.training.keys import Key, Kind, key, keys_of, number, optional, read, share, whole


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and how many, with the shipped defaults."""

    max_new_tokens: int = key("", 256, whole(1), "the most tokens to sample for a text")
    temperature: float = key("", 0.8, number, "the divisor of the logits; 0: always the most likely token")
    top_k: int | None = key(
        "", None, optional(whole(1)), "sample only from this number of most likely tokens; null: from all"
    )
    top_p: float | None = key(
        "",
        None,
        optional(share),
        "sample only from the most likely tokens that together have this probability; null: from all",
    )
    samples: int = key("", 1, whole(1), "the number of texts, one after another")
    seed: int = key("", 0, whole(0), "the seed of sampling")


KEYS = (
    Key(
        "checkpoint",
        None,
        Kind("a folder's name, or null"),
        "a run's output folder, a folder of checkpoints, one of them (step_<N>), or a saved model (train.save)",
    ),
    Key(
        "prompt",
        "",
        Kind("a text"),
        "the beginning of the text; without one, the text begins a document",
    ),
    *keys_of(Sampling),
)
"""What the root configuration says beside a training's."""


def read_sampling(config: DictConfig, origins: Origins) -> Sampling:
    """Sampling of a composed configuration. Raises PlanError with every value that is of no use."""
    reading = Reading(config, origins)
    found = read(reading, Sampling, fill=True)
    if reading.findings.items:
        raise PlanError(reading.findings.items)
    return Sampling(**found)


def check(reading: Reading) -> None:
    """Report every value of sampling that is of no use, and what a training's check reports: the configuration's
    `checks` names it.
    """
    read(reading, Sampling, fill=True)
    settings.check(reading, more_keys=tuple(one.name for one in KEYS))
