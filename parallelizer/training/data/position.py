"""The position of a run in its data, as a checkpoint stores it; and a check that a resumed run sees the same
data.

The number of a sample determines its contents: the first run's `seed`, `seq_len` and data map numbers to
samples. With any of these changed, the next number is an arbitrary sample, so resuming is an error. The size
of the batch and the mesh may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallelizer.configuration.old_paths import current
from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.training.data.files import FileRecord, resized
from parallelizer.training.data.source import Source

SHOWN = 5
"""Files that are told one by one."""

ANEW = "start a new run in another folder (hydra.run.dir)"


@dataclass(frozen=True)
class DataPosition:
    """`samples` were trained on. `seed`, `seq_len` and the data's `fingerprint` say which ones.

    `files` and `options`, the keys of the configuration's `data`, decide nothing: they name what has changed when
    the fingerprint tells that something has.
    """

    samples: int
    seed: int
    seq_len: int
    fingerprint: str
    files: tuple[FileRecord, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `json.dump` takes."""
        return {
            "samples": self.samples,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "fingerprint": self.fingerprint,
            "files": [file.to_json() for file in self.files],
            "options": dict(self.options),
        }

    @classmethod
    def from_json(cls, document: Any) -> DataPosition:
        """What `to_json` gave. PlanError `resume-data` for anything else; keys that are not known are passed over."""
        try:
            numbers = {name: document[name] for name in ("samples", "seed", "seq_len")}
            wrong = [name for name, n in numbers.items() if type(n) is not int or n < 0]
            if wrong:
                raise TypeError(f"{wrong[0]} is {numbers[wrong[0]]!r}")
            if not isinstance(document["fingerprint"], str):
                raise TypeError("the fingerprint is no text")
            files = tuple(map(FileRecord.from_json, document["files"]))
            options = dict(document["options"])
            return cls(**numbers, fingerprint=document["fingerprint"], files=files, options=options)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            message = f"the checkpoint's place in the data cannot be read: {reason}"
            raise PlanError([Diagnostic("resume-data", message, help=ANEW)]) from None


def position_of(
    source: Source, samples: int, *, seed: int, seq_len: int, options: Mapping[str, Any] | None = None
) -> DataPosition:
    """The place in `source` after `samples`; `options` are the configuration's `data` in plain Python."""
    return DataPosition(samples, seed, seq_len, source.fingerprint(), source.files, options or {})


def check_same_data(saved: DataPosition, now: DataPosition, origins: Origins) -> list[Diagnostic]:
    """What keeps a run with the data of `now` from going on at `saved`, each at the place that set it; [] if nothing.

    `now.samples` does not matter.
    """
    found = []
    for name in ("seed", "seq_len"):
        before, here = getattr(saved, name), getattr(now, name)
        if before != here:
            message = f"train.{name} is {here}, and the checkpoint was trained with {before}"
            help = f"go on with train.{name}={before}, or {ANEW}"
            found.append(Diagnostic("resume-data", message, origins.span(f"train.{name}"), help))
    if saved.fingerprint != now.fingerprint:
        place = origins.span("data.path") or origins.span("data._target_") or origins.span("data")
        changed, others = _files(saved, now)
        options = [*_options(saved.options, now.options, origins, place)]
        # An option that was changed explains why there are other files.
        told = changed if options else [*changed, *others] or ["the data gives other samples"]
        if len(told) > SHOWN:
            more = f"{len(told) - SHOWN + 1} more files have changed since the checkpoint was saved"
            told = [*told[: SHOWN - 1], more]
        help = f"restore the earlier data, or {ANEW}"
        found += [*options, *(Diagnostic("resume-data", what, place, help) for what in told)]
    return found


def _files(saved: DataPosition, now: DataPosition) -> tuple[list[str], list[str]]:
    """What is known of files by which the data gives other samples: of those that both have, and of the others."""
    before, here = ({file.path: file for file in place.files} for place in (saved, now))
    changed = [
        f"{path} {_difference(file, here[path])} since the checkpoint was saved"
        for path, file in before.items()
        if path in here and here[path].sha256 != file.sha256
    ]
    others = [f"{path} was there when the checkpoint was saved" for path in before if path not in here]
    others += [f"{path} was not there when the checkpoint was saved" for path in here if path not in before]
    return changed, others


def _options(
    before: Mapping[str, Any], now: Mapping[str, Any], origins: Origins, place: Span | None
) -> Iterator[Diagnostic]:
    """The options that were changed, at `place` where they are not written themselves."""
    for name in dict.fromkeys([*now, *before]):
        was, here = (_shown(name, of[name]) if name in of else None for of in (before, now))
        if was != here:
            trained = f"with {was}" if was is not None else "without it"
            message = f"data.{name} is {here or 'not given'}, and the checkpoint was trained {trained}"
            span = origins.span(f"data.{name}") or place
            yield Diagnostic("resume-data", message, span, f"continue with the earlier data, or {ANEW}")


def _shown(name: str, value: Any) -> str:
    return json.dumps(current(value) if name == "_target_" else value, default=str)


def _difference(before: FileRecord, now: FileRecord) -> str:
    return f"was {resized(before.size, now.size)}" if before.size != now.size else "has got other bytes"
