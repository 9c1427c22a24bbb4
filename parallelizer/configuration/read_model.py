"""What a model config says of the model and of the batches that it is fed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parallelizer.compiler.observe.families import families
from parallelizer.configuration.reading import Reading, is_whole
from parallelizer.diagnostics.diagnostic import quoted

if TYPE_CHECKING:
    from parallelizer.language.workload import Entry, Workload

MODEL_HELP = "a model config has _target_ with its arguments, plan, batch and loss"
INITIALIZE = ("whole", "modules")
"""Who makes the values of a model: its constructor, or each module its own by `reset_parameters()`."""

ENTRY_HELP = "write {shape: [batch, sequence], dtype: int64, range: [0, 256]}"


def read_model(reading: Reading, builds: bool = True) -> dict[str, Any]:
    """The model's config in plain Python; what it lacks is reported. With `builds`, its batch and loss are those that a family
    derives from the model, which it may build for that.
    """
    before = len(reading.findings.items)
    model = reading.get("model")
    if not isinstance(model, Mapping):
        if len(reading.findings.items) == before:
            reading.error("model-build", "no model is configured", "model", "set model=<name>")
        return {}
    for key in ("_target_", "batch", "loss"):
        if not model.get(key):
            where = f"model.{key}" if key in model else "model"
            reading.error("model-build", f"the model config has no `{key}`", where, MODEL_HELP)
    if model.get("initialize") not in (None, *INITIALIZE):
        message = f"model.initialize is {quoted(str(model['initialize']))}"
        help_text = (
            "write whole, modules or null; whole is for models whose values only the constructor can make"
        )
        reading.error("unknown-value", message, "model.initialize", help_text)
    read = {str(k): v for k, v in model.items()}
    for family in families() if builds else ():
        read.update(family.fed(read) or {})
    return read


def read_workload(reading: Reading, model: Mapping[str, Any]) -> Workload | None:
    """The batches of a step; None, reported, when a size is missing or wrong."""
    from parallelizer.language.workload import Workload

    batch = model.get("batch") or {}
    if not isinstance(batch, Mapping):
        reading.error("wrong-type", "model.batch takes a map of entries", "model.batch", ENTRY_HELP)
        batch = {}
    entries = {str(name): _entry(reading, str(name), written) for name, written in batch.items()}
    reading.mapping("train", resolve=False)
    read = {key: reading.whole_number(f"train.{key}", f"train.{key}", 1) for key in _SIZES}
    sizes = {key: size for key, size in read.items() if size is not None}
    if len(sizes) < len(_SIZES):
        return None
    known = {name: entry for name, entry in entries.items() if entry is not None}
    spans = {key: reading.span(f"train.{key}") for key in _SIZES}
    spans |= {
        f"batch.{name}": span for name in known if (span := reading.origins.key_span(f"model.batch.{name}"))
    }
    return Workload(known, **sizes, spans=spans)


_SIZES = ("batch_size", "seq_len", "accumulate")


def _entry(reading: Reading, name: str, written: Any) -> Entry | None:
    """What the model config says of one batch entry; None, reported, when it does not describe a tensor."""
    from parallelizer.language.workload import DTYPES, Entry

    says = written if isinstance(written, Mapping) else {}
    shape, dtype = says.get("shape"), str(says.get("dtype", "int64"))
    bounds, ignore, data = says.get("range", [0, 2]), says.get("ignore"), says.get("data")
    ascending = says.get("ascending", False)
    if not isinstance(shape, list) or not all(d in ("batch", "sequence") or is_whole(d) for d in shape):
        key, wrong = "shape", "needs a shape of the words batch and sequence, and of numbers"
    elif dtype not in DTYPES:
        key, wrong = "dtype", f"has the dtype {quoted(dtype)}, which is not one of {', '.join(DTYPES)}"
    elif not _is_range(bounds):
        key, wrong = "range", "needs a range of two whole numbers, the first below the second"
    elif ignore is not None and not is_whole(ignore):
        key, wrong = "ignore", "has an `ignore` that is not a whole number"
    elif data is not None and not isinstance(data, str):
        key, wrong = "data", "has a `data` that is not the name of an entry"
    elif not isinstance(ascending, bool) or (ascending and "sequence" not in shape):
        key, wrong = "ascending", "needs `ascending` true or false, and true only with a sequence"
    else:
        return Entry(tuple(shape), dtype, (bounds[0], bounds[1]), ignore, data, ascending)
    here = f"model.batch.{name}"
    span = reading.origins.span(f"{here}.{key}") or reading.span(here)
    reading.findings.error("wrong-type", f"{here} {wrong}", span, ENTRY_HELP)
    return None


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_whole, value)) and value[0] < value[1]
