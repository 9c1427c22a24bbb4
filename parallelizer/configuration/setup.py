"""What a configuration asks for, once it has been read: plan, mesh, workload, and how to build the model."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from parallelizer.configuration.argument_places import own_place, places
from parallelizer.configuration.dotted_path import function_at
from parallelizer.configuration.origins import Origins
from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Related, in_order
from parallelizer.diagnostics.package_folder import ROOT
from parallelizer.language.pipeline.settings import Pipeline
from parallelizer.language.plan import Mesh, Option, Plan, StyleDefaults
from parallelizer.language.routing import BALANCED, Routing

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallelizer.language.workload import Workload
    from parallelizer.simulate.record.trace import Recipe
    from parallelizer.styles.application import Program

MODEL_KEYS = ("plan", "batch", "loss", "tiny", "initialize")
"""The keys of a model config that are ours; the others are `_target_` and its arguments."""


@dataclass(frozen=True)
class Setup:
    """A configuration that was read. `model` is the model's config, `loss_path` the dotted path of its
    loss.

    `device_choice` is auto, cpu or cuda. `optim` and `hardware` are these configs in plain Python, `clip`
    bounds the gradient norm. `warnings` are findings about the configuration that do not prevent the
    launch. `max_unsharded` is the largest share of parameters that may be whole on every rank without a
    rule. `pipeline` has the schedule with all its numbers, if the mesh has the axis pp.
    `routing` is what dry runs assume of the tokens of experts.
    """

    plan: Plan
    mesh: Mesh
    defaults: Mapping[str, StyleDefaults]
    workload: Workload
    model: Mapping[str, Any]
    loss_path: str
    device_choice: str
    optim: Mapping[str, Any] = field(default_factory=dict)
    clip: float | None = None
    hardware: Mapping[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)
    redistribute: str = "greedy"
    warnings: tuple[Diagnostic, ...] = ()
    max_unsharded: Option | None = None
    pipeline: Pipeline | None = None
    routing: Routing = BALANCED

    @cached_property
    def device(self) -> Literal["cpu", "cuda"]:
        """`cpu` or `cuda`: what `auto` means is asked for once, and only where it matters, because it takes
        torch.
        """
        if self.device_choice != "auto":
            return cast(Literal["cpu", "cuda"], self.device_choice)
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def build_model(self) -> nn.Module:
        """The configured model on the meta device. Raises PlanError when it cannot be built."""
        return self._built("meta")

    def whole_model(self, model: nn.Module) -> Callable[[], nn.Module] | None:
        """A function that builds the model with its values, if only its constructor can make them or
        `model.initialize` asks for it; otherwise None, and modules initialize themselves. `model` is the
        result of `build_model`.
        """
        from parallelizer.runtime.constructor_values import needs_whole

        return (lambda: self._built("cpu")) if needs_whole(model, self.model.get("initialize")) else None

    def _built(self, device: str) -> nn.Module:
        import torch
        from hydra.utils import instantiate
        from torch import nn

        from parallelizer.runtime.constructor_values import accept, watched
        from parallelizer.styles.experts.stack import stack_experts

        arguments = {k: v for k, v in self.model.items() if k not in MODEL_KEYS}
        try:
            with torch.device(device):
                model = watched(lambda: instantiate(arguments, _convert_="all"))
        except Exception as error:  # whatever the constructor of a user's model raises
            raise self._model_error(error) from None
        if not isinstance(model, nn.Module):
            message = f"{arguments.get('_target_')} makes a {type(model).__name__}, not a torch.nn.Module"
            raise self._error("model-build", message, "model._target_", "name the model's class")
        if self.model.get("initialize") == "modules":
            accept(model)
        return stack_experts(model, self.plan)

    def loss(self) -> Callable[..., Any]:
        """The loss function. Raises PlanError when the path names none."""
        try:
            return function_at(self.loss_path)
        except Exception as error:  # whatever the import of a user's module raises
            message = f"model.loss={self.loss_path} is not a function: {_reason(error)}"
            help_text = "name a function (output of the model, batch) -> (sum of losses, number of tokens)"
            raise self._error("model-build", message, "model.loss", help_text) from None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The configured optimizer. `optim._target_` is an optimizer class, which gets parameter groups and
        the other keys, or a function of the model and the `optim` config. Without a configuration it is
        a fused AdamW. Raises PlanError if the path is neither.
        """
        import torch

        from parallelizer.optim import optimizer_of

        if not self.optim.get("_target_"):
            return torch.optim.AdamW(model.parameters(), fused=True)
        try:
            build = function_at(self.optim["_target_"])
        except Exception as error:  # whatever the import of a user's module raises
            message = f"optim._target_={self.optim['_target_']} is not a function: {_reason(error)}"
            help_text = "name a class of optimizers, or a function (model, optim config) -> optimizer"
            raise self._error("optim-invalid", message, "optim._target_", help_text) from None
        try:
            is_class = isinstance(build, type) and issubclass(build, torch.optim.Optimizer)
            optimizer: torch.optim.Optimizer = (
                optimizer_of(build, model, self.optim) if is_class else build(model, self.optim)
            )
        except PlanError:
            raise
        except Exception as error:  # whatever a user's function raises
            message = f"optim._target_={self.optim['_target_']} makes no optimizer: {_reason(error)}"
            help_text = (
                "a function is called with the model and the optim config, a class with the keys of optim"
            )
            raise self._error("optim-invalid", message, "optim._target_", help_text) from error
        return optimizer

    def recipe(self) -> Recipe:
        """The inputs of a dry run of one step, in addition to the program."""
        from parallelizer.simulate.record.trace import Recipe

        return Recipe(self.workload, self.loss(), self.build_optimizer, self.clip, self.device)

    def compile(self, model: nn.Module, *, force: bool = False, unsure: Collection[str] = ()) -> Program:
        """Compile the plan for the model. Raises PlanError; with `force`, only if no program can be made. If all errors have
        codes in `unsure`, they are diagnostics of the program.
        """
        from parallelizer.compiler.compile import compile as compile_plan
        from parallelizer.configuration.float8_hardware import float8_hardware
        from parallelizer.runtime.constructor_values import told

        compiled = functools.partial(
            compile_plan,
            self.plan,
            model,
            self.mesh,
            workload=self.workload,
            defaults=self.defaults,
            redistribute=self.redistribute,
            max_unsharded=self.max_unsharded,
            pipeline=self.pipeline,
            routing=self.routing,
        )
        try:
            program = compiled(force=force, unsure=unsure)
        except PlanError as error:
            raise PlanError(map(self._placed, error.diagnostics)) from None
        unable = tuple(float8_hardware(program, self.hardware))
        if unable and not force:
            raise PlanError(unable)
        found = map(
            self._placed,
            (*self.warnings, *program.diagnostics, *unable, *told(model, self.model.get("initialize"))),
        )
        return dataclasses.replace(program, diagnostics=in_order(found))

    def _placed(self, found: Diagnostic) -> Diagnostic:
        """A finding with a place: what stands in no rule is about the model."""
        return dataclasses.replace(found, span=found.span or own_place(self.origins))

    def _model_error(self, error: Exception) -> PlanError:
        cause = error.__cause__ or error
        target = self.model.get("_target_")
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        missing = re.search(r"Missing mandatory value: (\w+)", str(cause))
        if unknown and unknown[1] in self.model:
            message, help_text = (
                f"{target} takes no argument {unknown[1]!r}",
                "remove the argument, or correct its name",
            )
            key = f"model.{unknown[1]}"
            span = self.origins.key_span(key) or self.origins.span(key)
            return PlanError([Diagnostic("model-build", message, span, help_text)])
        if missing:
            key, help_text = f"model.{missing[1]}", "give it one"
            message = f"{key} has no value"
            return self._error("model-build", message, key, help_text)
        return self._not_built(_reason(cause) + _place_in(cause))

    def _not_built(self, reason: str) -> PlanError:
        """A model whose constructor fails: at an argument that the reason names, or else one of the command line."""
        target = self.model.get("_target_")
        no_class = re.match(r"Error (loading|locating) ", reason)
        if no_class:
            try:
                function_at(str(target))
            except ValueError as error:  # a message about the path
                reason = str(error)
            except Exception:  # whatever the import of a user's module raises: Hydra's message has it
                pass
        span, others = places(self.origins, self.model, reason, MODEL_KEYS)
        if no_class:
            span, others = self.origins.span("model._target_"), ()
        related = tuple(Related(other, "this is set here too") for other in others)
        help_text = f"check model._target_={target} and its arguments"
        if missing := re.match(r"(.* is not installed): (.+)", reason):
            reason, help_text = missing.groups()
        message = f"the model cannot be built: {reason}"
        return PlanError([Diagnostic("model-build", message, span, help_text, related=related)])

    def _error(self, code: str, message: str, key: str, help_text: str) -> PlanError:
        return PlanError([Diagnostic(code, message, self.origins.span(key), help_text)])


def _place_in(error: BaseException) -> str:
    """` (file:line)` of the user's code that an exception came from; empty if it came from none."""
    ours = (
        str(ROOT),
        os.path.join("site-packages", "hydra"),
        os.path.join("site-packages", "torch"),
    )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(o in f.filename for o in ours)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _reason(error: BaseException) -> str:
    """An exception in one line, without Hydra's advice about its environment variable."""
    advice = r",? ?set env var HYDRA_FULL_ERROR=1[^\n]*|\s*full_key: \S*|\s*Are you sure .*"
    text = " ".join(re.sub(advice, "", str(error)).split())
    name = type(error).__name__
    return (
        text
        if text and name in ("InstantiationException", "ImportError", "ValueError")
        else f"{name}: {text}"
    )
