"""What is wrong with a program: everything that can be found before a rank starts.

Compiling the program has found what its files, the model and the mesh tell. Here one step of it is followed on a fake world,
which shows mistakes that raise no error, and one step is traced, which shows what the plan wastes. All commands, the training
recipe and `parallelizer.validate` get their findings from here, so that the same program gets the same findings everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from parallelizer.child.shared_calls import SharedCalls
from parallelizer.compiler.checks.idle_rules import idle_rules
from parallelizer.diagnostics.diagnostic import Diagnostic, has_errors, in_order
from parallelizer.simulate.all_checks import check_followed, check_traced
from parallelizer.simulate.checks.float8_rows import float8_rows_unknown
from parallelizer.simulate.checks.followed_step import Followed
from parallelizer.simulate.checks.local_statistics import local_statistics
from parallelizer.simulate.checks.tp_crosses_nodes import nodes_of, tp_crosses_nodes
from parallelizer.simulate.checks.traced_step import Traced
from parallelizer.simulate.follow.flow import FollowedStep
from parallelizer.simulate.places import Places
from parallelizer.simulate.record.trace import Recipe, Trace
from parallelizer.simulate.steps import running_steps
from parallelizer.simulate.trace_failed import CODE as TRACE_FAILED
from parallelizer.simulate.trace_failed import fails_without_the_plan
from parallelizer.styles.application import Program


@dataclass(frozen=True)
class Validation:
    """Everything that was found, errors last. `flow` is the step that was followed and `trace` the step that was
    traced, as the rank that was asked for; None where that was not done or failed.
    """

    found: tuple[Diagnostic, ...]
    flow: FollowedStep | None = None
    trace: Trace | None = None


@contextmanager
def validating(
    program: Program,
    model: nn.Module,
    recipe: Recipe | None,
    *,
    also: Iterable[Diagnostic] = (),
    hardware: Mapping[str, Any] | None = None,
    nodes: Sequence[int] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    places: Places | None = None,
    rank: int = 0,
    classes: bool = False,
    shared: SharedCalls | None = None,
) -> Iterator[Callable[[], Validation]]:
    """Validate a program while the body of the `with` runs. The function that is yielded waits for the result.

    `model` is on meta, as it was compiled, and left as it is. Without a `recipe` no step is run. `also` are findings that
    the caller has already. `hardware` is the config of that name; `nodes` are the numbers of ranks on each node, where they
    are known, and otherwise nodes of this hardware are filled one after the other. `optimizer` is the optimizer's config;
    `places` are where the configuration says what findings name. The step is traced as `rank`; with `classes` it is traced
    as a rank of every other class too, which the findings do not need. `shared` as in `running_steps`. Steps run in child
    processes, so this process must have no process group.
    """
    places = places or Places()
    with running_steps(program, model, recipe, rank, classes, shared) as ran:

        def finish() -> Validation:
            steps = ran()
            wrong, seen = steps.not_followed, steps.not_traced
            if steps.flow is None and steps.alone is not None and steps.alone.anywhere:
                wrong = (fails_without_the_plan(steps.alone, places),)
            elif steps.flow is not None:
                wrong = check_followed(Followed(program, model, steps.flow, steps.alone, places))
            if steps.trace is not None and recipe is not None:
                workload, where = recipe.workload, places.optimizer
                seen = check_traced(Traced(program, model, steps.trace, workload, optimizer or {}, where))
            elif recipe is not None and not has_errors((*wrong, *seen)):
                seen = (*seen, *float8_rows_unknown(program))
            dealt = nodes_of(program.mesh, hardware or {}) if nodes is None else nodes
            ledger = steps.trace.ledger if steps.trace is not None else ()
            crossing = tp_crosses_nodes(program.mesh, dealt, hardware or {}, ledger)
            local = () if steps.statistics is None else local_statistics(program, steps.statistics)
            known = (*program.diagnostics, *also, *idle_rules(program))
            # One step that does not run is told of once. Where the plan is to blame, that has been explained.
            if steps.trace is None and has_errors(wrong):
                seen = tuple(one for one in seen if one.code != TRACE_FAILED)
            elif steps.trace is None:
                wrong = tuple(one for one in wrong if one.code != TRACE_FAILED)
            return Validation(in_order((*known, *crossing, *local, *wrong, *seen)), steps.flow, steps.trace)

        yield finish
