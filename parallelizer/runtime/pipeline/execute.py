"""Runs a rank's actions of a schedule: stages forward and backward, messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor.parallel import loss_parallel

from parallelizer import torch_private
from parallelizer.compiler.observe.phase import phase
from parallelizer.language.pipeline.actions import Action, ActionKind, Order
from parallelizer.language.pipeline.messages import Message, sender_stage
from parallelizer.language.pipeline.stages import UnitOutput
from parallelizer.runtime.exception_notes import noted_backward
from parallelizer.runtime.object_group import object_group
from parallelizer.runtime.pipeline import progress
from parallelizer.runtime.pipeline.channels import Channels, receive_object, send_object
from parallelizer.runtime.pipeline.forms import Forms, TensorForm, root_of
from parallelizer.runtime.pipeline.live import Key, LivePipeline, key_of
from parallelizer.runtime.pipeline.microbatches import Batch
from parallelizer.runtime.pipeline.split_backward import Branches, backward_inputs, backward_weights
from parallelizer.runtime.pipeline.stage_model import StageModel
from parallelizer.styles.context_parallel.order import Order as SequenceOrder
from parallelizer.styles.context_parallel.sequence import CurrentOrder
from parallelizer.styles.sharded_logits import is_sharded
from parallelizer.torch_private import tree_leaves


@dataclass
class Computed:
    """What is kept of a microbatch on a stage from its forward to its backward. `roots` is what backward begins at:
    what the stage sent and wants a gradient, or the loss. `sharded`: the loss was taken of sharded logits; `order` is that of
    the sequence in the forward. Between the two parts of a backward, `gradients` or `branches` are what the second one takes.
    """

    inputs: list[torch.Tensor]
    roots: list[torch.Tensor]
    sharded: bool = False
    order: SequenceOrder | None = None
    gradients: list[torch.Tensor] | None = None
    branches: list[Branches] | None = None


Head = Callable[[Any, Batch], torch.Tensor | None]
"""What is done with the output of the last stage. Returns a scalar that backward begins at, or None."""


@dataclass
class Execution:
    """One pass through a schedule: `batches` are the microbatches, `head` takes the last stage's outputs. With
    `reduces`, the last backward of each stage ends the step: FSDP reduces the gradients in it. `part` counts the passes
    of a step. `forwards`: the order is one of `LivePipeline.forwards`.
    """

    pipeline: LivePipeline
    order: Order
    batches: Sequence[Batch]
    head: Head
    sequence: CurrentOrder
    part: int = 0
    reduces: bool = True
    forwards: bool = False
    key: Key = ()
    computed: dict[tuple[int, int], Computed] = field(default_factory=dict)
    handed: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    objects: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """All actions of this rank. Afterwards everything that was sent has arrived."""
        self.key = key_of(self.batches[0])
        channels = self._channels()
        mine = self.order[self.pipeline.rank]
        final = {a.stage: a for a in mine if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)}
        for action in mine:
            progress.tell((self.part, action))
            model = self.pipeline.models[action.stage]
            if action.kind is ActionKind.FORWARD:
                self._forward(action, model, channels)
            else:
                ends = final[action.stage] is action and self.reduces
                with phase("backward"):
                    self._prepare_backward(action, model, ends)
                self._backward(action, model, channels)
                with phase("backward"):
                    self._finish_backward(action, model, ends)
        progress.tell((self.part, None))
        channels.finish()
        for work, _ in self.objects:
            work.wait()

    # Forward

    def _forward(self, action: Action, model: StageModel, channels: Channels) -> None:
        batch = self.batches[action.microbatch]
        known: Forms = {}
        inputs: list[torch.Tensor] = []
        if action.stage:
            known = self._known(action.stage)
            with phase("forward"):
                parts = self._received("F", action, channels)
            forms = _forms(model.stage.receives, known)
            inputs = [_leaf(form, part, self.pipeline) for form, part in zip(forms, parts, strict=True)]
        with phase("forward"):
            output = model(inputs, known, batch)
        order = self.sequence.order
        if action.stage == self.pipeline.last:
            sharded = is_sharded(output)
            root = self.head(output, batch)
            roots = [] if root is None else [root]
        else:
            sharded = False
            self._tell(action.stage, model.forms)
            forms = _forms(model.stage.sends, model.forms)
            parts = [form.part(t.detach()) for form, t in zip(forms, output, strict=True)]
            with phase("forward"):
                self._send(("F", action.stage + 1, action.microbatch), parts, channels)
            roots = [root_of(t) for t in output if t.requires_grad]
        if torch.is_grad_enabled():
            self.computed[action.stage, action.microbatch] = Computed(inputs, roots, sharded, order)

    def _known(self, stage: int) -> Forms:
        """The forms of what earlier stages return: told once by the stage before, for each shape of batches."""
        forms = self.pipeline.forms
        if (self.key, stage) not in forms:
            before = self.pipeline.ranks[stage - 1]
            forms[self.key, stage] = receive_object(self.pipeline.world[before], object_group())
        return forms[self.key, stage]

    def _tell(self, stage: int, forms: Forms) -> None:
        there, known = self.pipeline.ranks[stage + 1], self.pipeline.forms
        if (self.key, stage + 1) in known:
            return
        known[self.key, stage + 1] = forms
        if there != self.pipeline.rank:
            self.objects += send_object(forms, self.pipeline.world[there], object_group())

    # Backward

    def _prepare_backward(self, action: Action, model: StageModel, final: bool) -> None:
        """FSDP reduces gradients once a step, and frees what it gathered for the whole step then. Where a backward is
        split in two, it keeps what it gathered from the one to the other, and reduces behind the last of them.
        """
        split = action.kind is not ActionKind.BACKWARD
        for unit in torch_private.fsdp_modules(model):
            unit.set_requires_gradient_sync(final and not split, recurse=False)
            unit.set_is_last_backward(final and not split)
            if split or unit in model.kept_gathered:
                unit.set_reshard_after_backward(final and not split, recurse=False)
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                unit.unshard()  # a forward in between may have freed it

    def _finish_backward(self, action: Action, model: StageModel, final: bool) -> None:
        """What FSDP does behind a backward, where its hooks do not see it."""
        units = torch_private.fsdp_modules(model)
        if action.kind is not ActionKind.BACKWARD_WEIGHT or not units:
            return
        if final:
            torch_private.reduce_gradients(units)
        for unit in units:
            if unit not in model.kept_gathered:
                unit.reshard()

    def _backward(self, action: Action, model: StageModel, channels: Channels) -> None:
        at = action.stage, action.microbatch
        done = self.computed[at]
        if done.order is not None:
            self.sequence.order = done.order
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            del self.computed[at]
            with phase("backward"), noted_backward():
                self._weights(done)
            return
        gradients: list[torch.Tensor] | None = None
        if action.stage < self.pipeline.last:
            with phase("backward"):
                gradients = self._received("B", action, channels)
        inputs = [t for t in done.inputs if t.requires_grad]
        with phase("backward"), noted_backward(), loss_parallel() if done.sharded else nullcontext():
            if action.kind is ActionKind.BACKWARD:
                del self.computed[at]
                if done.roots:
                    torch.autograd.backward(done.roots, gradients)
                found = [t.grad for t in inputs]
            elif not inputs or not done.roots:  # there is nothing to send, and so nothing to do early
                done.gradients = gradients
                found = [None] * len(inputs)
            elif model.backward_at_once:
                torch.autograd.backward(done.roots, gradients)
                found, done.branches, done.roots = [t.grad for t in inputs], [], []
            else:
                weights = [p for p in model.parameters() if p.requires_grad]
                given, done.branches = backward_inputs(done.roots, gradients, inputs, weights)
                found, done.roots = list(given), []
        if action.stage:
            forms = [f for f in _forms(model.stage.receives, self._known(action.stage)) if f.wants_gradient]
            parts = [
                form.part(torch.zeros_like(t) if g is None else g.detach())
                for form, t, g in zip(forms, inputs, found, strict=True)
            ]
            with phase("backward"):
                self._send(("B", action.stage - 1, action.microbatch), parts, channels)
        for tensor in inputs:
            tensor.grad = None

    def _weights(self, done: Computed) -> None:
        with loss_parallel() if done.sharded else nullcontext():
            if done.branches is not None:
                backward_weights(done.branches)
            elif done.roots:
                torch.autograd.backward(done.roots, done.gradients)

    # Messages

    def _channels(self) -> Channels:
        return Channels(
            self.pipeline.messages(self.order, forwards=self.forwards),
            self.pipeline.groups,
            self.pipeline.world,
            next(iter(self.batches[0].values())).device,
            self._shapes,
            lambda message: (self.key, _told(message)) in self.pipeline.forms,
            lambda message: self.pipeline.stages.first[_told(message)],
        )

    def _shapes(self, message: Message) -> list[TensorForm]:
        """What the tensors of a message are. Waits until its stage is told."""
        told = _told(message)
        found = _forms(self.pipeline.stages.stages[told].receives, self._known(told))
        return found if message[0] == "F" else [f for f in found if f.wants_gradient]

    def _received(self, kind: str, action: Action, channels: Channels) -> list[torch.Tensor]:
        """The local parts of a message to the action's stage."""
        message = kind, action.stage, action.microbatch
        if self.pipeline.ranks[sender_stage(message)] == self.pipeline.rank:
            return self.handed.pop(message)
        return channels.receive(message)

    def _send(self, message: Message, parts: list[torch.Tensor], channels: Channels) -> None:
        if self.pipeline.ranks[message[1]] == self.pipeline.rank:
            self.handed[message] = parts
        else:
            channels.send(message, parts)


def _told(message: Message) -> int:
    """The stage that is told the shapes of a message: the one behind the cut that the message crosses."""
    return max(message[1], sender_stage(message))


def _forms(values: Iterable[UnitOutput], forms: Forms) -> list[TensorForm]:
    return [tree_leaves(forms[value.unit, value.call])[value.leaf] for value in values]


def _leaf(form: TensorForm, part: torch.Tensor, pipeline: LivePipeline) -> torch.Tensor:
    """A received tensor, at which this stage's backward ends."""
    tensor = form.wrapped(part, pipeline.mesh).detach()
    return tensor.requires_grad_(form.wants_gradient and torch.is_grad_enabled())
