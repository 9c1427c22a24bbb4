"""Models of `transformers` as one family of models; `parallelizer/compiler/observe/families.py` says what is asked of one.

Nothing of transformers is imported until a model of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from parallelizer.hugging_face.architecture import is_model as is_model
from parallelizer.hugging_face.architecture import plan_name as plan_name
from parallelizer.hugging_face.architecture import why_no_plan as why_no_plan

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from parallelizer.compiler.compilation import Compilation
    from parallelizer.diagnostics.diagnostic import Diagnostic
    from parallelizer.styles.application import Program
    from parallelizer.styles.context_parallel.sequence import CurrentOrder


MORE_ROWS = 8
"""A table of positions may have so many rows before that of the first one: OPT's has 2."""


def inputs(model: nn.Module, taken: dict[str, Any]) -> dict[str, Any]:
    """On meta, where the model cannot guess documents from the values of positions, a mask of ones keeps it from trying. A
    balancing loss is left to `outcome`."""
    import inspect

    import torch

    from parallelizer.hugging_face.balancing import SWITCH, is_added
    from parallelizer.hugging_face.masks import of_ones

    if is_added(model):
        taken[SWITCH] = False  # the model would compute the loss too, of the tokens of one rank
    asked = {*inspect.signature(model.forward).parameters} - {*taken}
    for name, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        tokens = taken.get(name)
        if isinstance(tokens, torch.Tensor) and tokens.is_meta and mask in asked:
            taken[mask] = of_ones(tokens)
    return taken


def outcome(model: nn.Module, batch: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """With the logits of the routers, where the configuration of a mixture sets `output_router_logits`."""
    from parallelizer.hugging_face.balancing import balanced

    return balanced(model, batch, call)


def initializer(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """The `_init_weights` of the innermost transformers model around a module, which is transformers' name for it and which
    every architecture overrides.
    """
    models: dict[str, Any] = {path: m for path, m in model.named_modules() if is_model(m)}
    owners: dict[type, Any] = {}
    for path, module in model.named_modules():
        around = [p for p in models if not p or path == p or path.startswith(f"{p}.")]
        owners[type(module)] = models[max(around, key=len)]
    innermost = list(models.values())[-1]

    def fill(module: nn.Module) -> None:
        owners.get(type(module), innermost)._init_weights(module)

    return fill


def fed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `batch` and `loss` of a model config whose entries are those of tokens, where its model takes others."""
    from parallelizer.hugging_face.architecture import takes_tokens

    if takes_tokens(config) is not False:
        return None
    import torch

    from parallelizer.hugging_face import batch
    from parallelizer.hugging_face.build import causal_lm

    written = config.get("batch") or {}
    arguments = {name: config[name] for name in ("name", "config", "auto") if config.get(name) is not None}
    try:
        with torch.device("meta"):
            model = causal_lm(**arguments)
    except Exception:  # whoever builds the model tells why it cannot be built
        return None
    entries, loss = batch.derived(model, written)
    return None if loss is None else {"batch": entries, "loss": loss}


def vocabulary(model: Any) -> int | None:
    """The rows of the model's input embeddings."""
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # its inputs are no tokens
        return None
    return rows if isinstance(rows, int) else None


def longest(model: Any) -> int | None:
    """`max_position_embeddings` of the model's configuration."""
    length = getattr(model.config, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def position_table(model: Any) -> tuple[str, int] | None:
    """The embedding or buffer that has `max_position_embeddings` rows, or a few more, and is not that of the tokens."""
    from torch import nn

    most = longest(model)
    if most is None:
        return None
    for path, module in model.named_modules():
        own = [*module.named_buffers(path, recurse=False)]
        if isinstance(module, nn.Embedding) and module.num_embeddings != getattr(
            model.config, "vocab_size", None
        ):
            own.append((f"{path}.weight", module.weight))
        for name, table in own:
            if table.ndim == 2 and most <= table.size(0) <= most + MORE_ROWS:
                padding = getattr(module, "padding_idx", None)
                # RoBERTa counts the rows before its first position too, which is behind that of padding.
                before = padding + 1 if padding is not None and table.size(0) == most else 0
                return name, most - before
    return None


def check(state: Compilation) -> Iterator[Diagnostic]:
    """Attention that knows the sequence's order, positions of the whole sequence, masks of whole columns."""
    from parallelizer.hugging_face.balancing import check as check_balancing
    from parallelizer.hugging_face.checks import pretrained

    yield from pretrained(state)
    yield from check_balancing(state)


def checks_positions(state: Compilation) -> bool:
    """Whether `check` says that positions are missing, or that masks are made for a part of the sequence."""
    from parallelizer.hugging_face.checks import lacks_positions, masks_refused

    return lacks_positions(state) or masks_refused(state)


def after_apply(model: nn.Module, program: Program, mesh: DeviceMesh, sequence: CurrentOrder) -> None:
    """Attention and masks that know how the sequence is dealt out, and routers how tokens lie over tp."""
    from parallelizer.hugging_face import balancing, layout, masks
    from parallelizer.styles.context_parallel.order import Order
    from parallelizer.styles.context_parallel.sequence import CurrentOrder

    balancing.know_places(model, program, mesh)
    layout.switch(model, program)
    made = program.plan.batch.get("position_ids")
    # A model that is given all tokens makes masks of all of them.
    split = program.mesh.sizes["cp"] > 1 and not layout.splits_inside(program)
    masks.follow(
        model,
        sequence if split else CurrentOrder(Order(1)),
        mesh.get_local_rank("cp") if split else 0,
        program.mesh.sizes["tp"],
        positions_made=made is not None and made.make is not None,
    )
