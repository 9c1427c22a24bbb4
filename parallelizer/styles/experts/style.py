"""`experts`: the experts of a mixture are shared out among ranks, and tokens travel to them and back.

The style works around the module's own forward, which computes the rows that arrive with the experts of this rank. Where
the parameters are placed, and how the tokens lie over tp, is found while compiling (`compiler/experts.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallelizer.language.plan import EXPERT, REPLICA_AXES
from parallelizer.language.styles import OptionKind, StyleDeclaration, declare
from parallelizer.styles.registry import applies, implements
from parallelizer.styles.target import Sharding, StyleError

if TYPE_CHECKING:
    from torch import nn

    from parallelizer.styles.application import Application, Live
    from parallelizer.styles.target import Target

declare(
    StyleDeclaration(
        "experts",
        "experts",
        EXPERT,
        "share experts out among the ranks of ep; tokens travel to them and back",
        {
            "tokens": OptionKind("argument", "forward's parameter with the tokens, [tokens, features]"),
            "ids": OptionKind("argument", "forward's parameter with the experts of each token, [tokens, k]"),
            "weights": OptionKind("argument", "forward's parameter with their weights, [tokens, k]"),
            "params": OptionKind("params", "the dimension of each parameter that counts experts"),
            "whole": OptionKind(
                "names",
                "modules inside, such as a norm of every expert's output, whose parameters all ranks hold whole",
            ),
            "dispatch": OptionKind(
                "choice",
                "how tokens travel: all-to-all sends each to the ranks of its experts, all-gather sends all of them to every "
                "rank, for few experts and small batches; nccl-switch needs torch 2.15",
                ("all-to-all", "all-gather", "nccl-switch"),
            ),
        },
        defaults={
            "tokens": "hidden_states",
            "ids": "top_k_index",
            "weights": "top_k_weights",
            "params": '{"*": shard(0)}',
            "dispatch": "all-to-all",
        },
    )
)


@implements("experts")
def experts(target: Target) -> Sharding:
    """The experts' parameters on `ep`; nothing on a mesh where no rank shares a replica. Raises StyleError."""
    from parallelizer.styles.experts.find import argument_names, check_modules, check_no_list, placements

    if target.options.get("dispatch") == "nccl-switch":
        raise StyleError(
            "dispatch-missing",
            "dispatch: nccl-switch needs torch's token switch, which comes with torch 2.15",
            "write dispatch: all-to-all or all-gather, or remove the option",
            "dispatch",
        )
    check_no_list(target)
    argument_names(target)
    check_modules(target)
    return Sharding(None, (EXPERT,), placements(target))


@applies("experts")
def apply(application: Application, module: nn.Module, live: Live) -> None:
    """Place the experts' parameters, and let tokens travel around the module's forward."""
    from torch.distributed.tensor import Placement, Shard

    from parallelizer.mesh import expert_mesh
    from parallelizer.styles.experts.dispatch import share_out
    from parallelizer.styles.experts.find import counting_attributes, names_of
    from parallelizer.styles.parameter_views import run_on_local_parameters
    from parallelizer.styles.placed_parameters import place_parameters

    mesh = expert_mesh(live.mesh)[EXPERT]
    dims = {name: by_axis[EXPERT].dim or 0 for name, by_axis in application.params.items()}
    count = next(iter(module.get_parameter(name).shape[dim] for name, dim in dims.items()))
    own: dict[str, dict[str, list[Placement]]] = {"": {}}
    for name, dim in dims.items():
        path, _, leaf = name.rpartition(".")
        own.setdefault(path, {})[leaf] = [Shard(dim)]
    for path, placed in own.items():
        place_parameters(module.get_submodule(path), mesh, placed)
    run_on_local_parameters(module, own[""])
    over = tuple(a for a in REPLICA_AXES[2:] if a in (live.mesh.mesh_dim_names or ()))
    share_out(
        module,
        mesh,
        live.submesh(over) if over else None,
        experts=count,
        names=names_of(application.options),
        attributes=counting_attributes(module, count),
        layout=str(application.options.get("layout", "split")),
        routing=live.routing,
        path=application.module,
        dispatch=str(application.options.get("dispatch", "all-to-all")),
    )
