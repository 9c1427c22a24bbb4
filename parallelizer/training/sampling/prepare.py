"""The checks of a sampling command before a rank starts: its arguments, its checkpoint, its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from parallelizer.compiler.observe.families import family_of, vocabulary_of
from parallelizer.compiler.observe.position_reads import position_sources
from parallelizer.configuration.compose import compose_config
from parallelizer.configuration.read_setup import from_config
from parallelizer.configuration.setup import Setup
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span
from parallelizer.hugging_face.find_weights import weights_folder
from parallelizer.hugging_face.model_tensors import model_tensors
from parallelizer.hugging_face.weights import look_up
from parallelizer.runtime.checkpoint.fit import misfits
from parallelizer.runtime.checkpoint.folder import resolved
from parallelizer.runtime.checkpoint.loading import Opened, open_checkpoint
from parallelizer.styles.application import Program
from parallelizer.training.data.choose_tokenizer import tokenizer_of, with_tokenizer
from parallelizer.training.data.tokenizer import Tokenizer
from parallelizer.training.job.recipe_file import RecipeFile
from parallelizer.training.keep.recorded import overrides_for
from parallelizer.training.sampling.job import SamplingJob
from parallelizer.training.sampling.settings import read_sampling
from parallelizer.training.sampling.text import multiple
from parallelizer.training.settings import read_settings

UNBOUNDED = 1 << 20
"""Tokens that are fed to a model that says nothing of its longest text."""


@dataclass(frozen=True)
class Words:
    """A command line: what goes to Hydra, and two values that do not, because they are texts and paths as they stand."""

    overrides: tuple[str, ...]
    prompt: str = ""
    checkpoint: Path | None = None
    config_dirs: tuple[str, ...] = ()
    config_name: str = "generate"


def read_words(argv: Sequence[str], recipe: RecipeFile) -> Words:
    """The words behind the command's name. Quotes around a prompt, which Hydra would ask for, are left out."""
    known = recipe.words(["", *argv])
    found, overrides = {"prompt": "", "checkpoint": ""}, []
    for word in known.rest:
        key, is_one, value = word.lstrip("+").partition("=")
        if is_one and key in found:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[key] = value[1:-1] if quoted else value
        else:
            overrides.append(word)
    path = found["checkpoint"] if found["checkpoint"] not in ("", "null") else None
    checkpoint = Path(path).expanduser() if path else None
    folders = tuple(recipe.folders(["", *argv]))
    return Words(tuple(overrides), found["prompt"], checkpoint, folders, known.config_name)


def prepare(words: Words, folder: Path) -> SamplingJob:
    """Everything that can be checked before a rank starts; what a checkpoint tells is laid out in `folder`, which is empty.

    Raises PlanError and OverrideSyntaxError.
    """
    opened, chosen = _stored(words, folder)
    config, origins = compose_config([*chosen, *words.overrides], words.config_dirs, words.config_name)
    setup, settings = from_config(config, origins), read_settings(config, origins)
    sampling = read_sampling(config, origins)
    model = setup.build_model()
    fill = entries_to_fill(setup)
    tokenizer = tokenizer_of(with_tokenizer(config.data, setup.model).get("tokenizer"))
    multiple_of = multiple(setup.mesh.sizes["cp"], setup.mesh.sizes["tp"])
    longest = context_length(setup, model) // multiple_of * multiple_of
    prompt = tokens_of(words.prompt, tokenizer, vocabulary_of(model, setup.model), longest)
    program = _compiled(setup, model, multiple_of)
    job = SamplingJob(setup, program, settings, sampling, tokenizer, prompt, longest, fill)
    if opened is not None:
        found = misfits(model, None, opened.metadata, opened.about, Span(str(opened.path)))
        if found:
            raise PlanError(found)
        return replace(job, checkpoint=opened.path)
    weights = weights_folder(setup.model, origins)
    if weights is None:
        help_text = "checkpoint=FOLDER: a run's output folder, a checkpoint (step_<N>), or a saved model"
        raise PlanError([Diagnostic("checkpoint-not-found", "no checkpoint is given", None, help_text)])
    look_up(model_tensors(model), weights)
    return replace(job, weights=weights)


def _stored(words: Words, folder: Path) -> tuple[Opened | None, list[str]]:
    """The checkpoint that a command names, if it is one of a run's, and the overrides that choose its configuration."""
    if words.checkpoint is None:
        return None, []
    if (words.checkpoint / "config.json").is_file():
        return None, ["model=hf", f"model.name='{words.checkpoint}'"]
    span = Span(f"<override checkpoint={words.checkpoint}>", 1, 12)
    opened = open_checkpoint(resolved(words.checkpoint, span, "checkpoint"))
    record = opened.state
    if not isinstance(record, Mapping) or not {"config", "plan"} <= {*record}:
        return opened, []  # of a user's own loop: the command names the model
    return opened, overrides_for(record, folder, words.overrides)


def _compiled(setup: Setup, model: nn.Module, length: int) -> Program:
    """The program for a text, whatever batches the model was trained with."""
    work = replace(setup.workload, batch_size=setup.mesh.size("dp_replicate", "dp_shard"), accumulate=1)
    return replace(setup, workload=replace(work, seq_len=length, spans={})).compile(model)


def entries_to_fill(setup: Setup) -> dict[str, str]:
    """The batch entries that a model takes beside its tokens, and what they are filled with: `zeros` for the numbers of
    documents, `positions` for places. Raises PlanError `data-mismatch` for a model that is not given a text.
    """
    entries, plan = setup.workload.entries, setup.plan.batch
    text, tokens = ("batch", "sequence"), setup.workload.name_of("input_ids")
    found, other = {}, []
    for name, entry in entries.items():
        told = plan.get(name)
        if name in (tokens, setup.workload.name_of("labels")) and tuple(entry.shape) == text:
            continue
        if told is not None and told.make:
            continue
        if told is not None and told.documents:
            found[name] = "zeros"
        elif (entry.data or name) == "position_ids" and tuple(entry.shape) == text:
            found[name] = "positions"
        else:
            other.append(name)
    if other or tokens not in entries:
        what = f"takes {', '.join(other)}" if other else "takes no input_ids"
        message = f"the model {what}: text can be made from a model that takes input_ids, [batch, sequence], and gives logits"
        span = setup.origins.span("model.batch") or setup.origins.span("model._target_")
        raise PlanError([Diagnostic("data-mismatch", message, span, "choose a run of a language model")])
    return found


def context_length(setup: Setup, model: nn.Module) -> int:
    """The longest text that a model takes: as a model of transformers says, or an argument `max_seq_len`, or the tables that it
    is seen to read by position.
    """
    said = [setup.model.get("max_seq_len")]
    family = family_of(model)
    if family is not None:
        said.append(family.longest(model))
    given = [name for name, buffer in setup.plan.batch.items() if buffer.make == "positions"]
    said += [source.rows for source in position_sources(model, setup.workload, given)]
    return min((length for length in said if isinstance(length, int)), default=UNBOUNDED)


def tokens_of(prompt: str, tokenizer: Tokenizer, vocabulary: int | None, longest: int) -> list[int]:
    """A prompt's tokens, for an empty one the end of a document before. Raises PlanError `prompt-invalid`."""
    content = prompt.encode("utf-8", "surrogateescape")
    refused = tokenizer.refuses(content)
    tokens = [int(t) for t in tokenizer.encode([content])[0]] if content and not refused else []
    tokens = tokens or [tokenizer.separator]
    unknown = [t for t in tokens if vocabulary is not None and t >= vocabulary]
    if refused:
        why, help_text = f"cannot be read: {refused}", "give a text"
    elif unknown:
        why = f"has the {tokenizer.unit} {unknown[0]}, and the model's vocabulary is {vocabulary:,}"
        help_text = "data.tokenizer names the tokenizer that the model was trained with"
    elif len(tokens) > longest:
        why = f"has {len(tokens):,} {tokenizer.unit}s, and the model takes {longest:,} on this mesh"
        help_text = "give a shorter one"
    else:
        return tokens
    raise PlanError([Diagnostic("prompt-invalid", f"the prompt {why}", None, help_text)])
