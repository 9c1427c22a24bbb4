"""Calls of `flex_attention`, caught before torch compiles or refuses them. See `parallelizer.torch_private`."""

from __future__ import annotations

import math
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as _flex

from parallelizer.torch_private.compiling import stops_recomputation, wraps_compiled


@dataclass(frozen=True)
class FlexCall:
    """The arguments of one call of `flex_attention`, as documented there. `score_mod` is None where there is none, `scale`
    is a number, `statistics` says whether the log-sum-exp or the largest scores were asked for.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score_mod: Callable[..., torch.Tensor] | None
    block_mask: _flex.BlockMask | None
    scale: float
    statistics: bool


@dataclass(frozen=True)
class FlexAnswer:
    """What `flex_attention` is to return: the result [B, H, S, Dv], the natural log-sum-exp and the largest score of each
    row, both [B, H, S]; the last two may be left out where no statistics were asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    top: torch.Tensor | None = None


NOT_FLEX = object()

_ADVICE = "flex_attention_performance"

_FLEX_OPERATOR = torch.ops.higher_order.flex_attention

_IS_NESTED, _DEVICE, _REQUIRES_GRAD = (
    getattr(torch.Tensor, name).__get__ for name in ("is_nested", "device", "requires_grad")
)

_FIRST_LOOK = getattr(getattr(_flex, "_validate_no_nested_tensors", None), "__code__", None)
"""Where `flex_attention` first reads a tensor; None before torch 2.13, which does not."""

_LOOK_AT_DEVICES = tuple(
    f.__code__ for f in (_flex.flex_attention, _flex._validate_device, _flex._apply_kernel_options)
)


class FlexCalls:
    """Lets a TorchFunctionMode answer `flex_attention`, which asks no mode before it compiles itself.

    A mode asks this for every call that it sees, and is told what to return, or NOT_FLEX. What a mode does see of
    `flex_attention` is what it reads of its tensors, and the operator that it ends in; whose reading it is, is told from
    the running frame. So nothing of torch is replaced, and other code sees no change:

    - its checks of the device see CUDA, or fake tensors that no gradient is asked of: they refuse gradients on a CPU, meta
      tensors, and masks made elsewhere, all of which its answer here can do;
    - where it compares a block mask's lengths with the tensors', these are as long as the sequence that `whole` says;
    - `torch.compile` calls through to the operator, as it does inside a fake tensor's kernel. That is said in a tracing
      context, which is this thread's own, while code of `flex_attention` runs that calls nothing of torch's.
      `set_stance("force_eager")` is public, but for the whole process, and refused in a compiled region;
    - its advice to compile it, which would be wrong, counts as given while it runs. That is known to the whole process: at
      worst another thread's call at the same moment goes without it, or the next one has it twice.

    `begin` is called first with what was passed, and may raise; `answer` gives the result. Waits for a
    `flex_attention` that asks for overrides as `scaled_dot_product_attention` does.
    """

    def __init__(
        self,
        answer: Callable[[FlexCall], FlexAnswer],
        begin: Callable[[torch.Tensor, torch.Tensor, _flex.BlockMask | None], None] | None = None,
        whole: Callable[[int], int] | None = None,
    ) -> None:
        self._answer, self._begin, self._whole = answer, begin, whole
        self._through = ExitStack()
        self._frame: types.FrameType | None = None
        self._hushed = False

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode shall return for this call, or NOT_FLEX."""
        if func is _FLEX_OPERATOR:
            return self._reached(args)
        if self._frame is not None and not _is_running(self._frame):  # left by an error
            self.close()
        if self._frame is None:
            return self._begun(args[0]) if func == _IS_NESTED else NOT_FLEX
        # Always an answer of its own: if modes are nested, only the innermost has this call.
        self._through.close()
        result = self._read(func, args, kwargs)
        self._call_through()
        return result

    def close(self) -> None:
        """To be called when the mode is left, in case an error kept `flex_attention` from its end."""
        self._frame = None
        self._through.close()
        if self._hushed:
            _flex._WARNINGS_SHOWN.discard(_ADVICE)
            self._hushed = False

    def _begun(self, tensor: torch.Tensor) -> Any:
        asking = _asking()
        if asking.f_code is not _FIRST_LOOK or asking.f_back is None:
            return NOT_FLEX
        with torch._C.DisableTorchFunction():
            if tensor.is_nested:  # torch refuses it, and says why
                return NOT_FLEX
        passed = asking.f_back.f_locals
        if self._begin is not None:
            self._begin(passed["query"], passed["key"], passed["block_mask"])
        self._frame = asking.f_back
        self._call_through()
        self._hushed = _ADVICE not in _flex._WARNINGS_SHOWN
        _flex._WARNINGS_SHOWN.add(_ADVICE)
        return False

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        code = _asking().f_code
        if func == _DEVICE and code in _LOOK_AT_DEVICES:
            return torch.device("cuda", 0)
        if func == _REQUIRES_GRAD and code is _flex._validate_device.__code__:
            return False
        if func == _IS_NESTED:
            with torch._C.DisableTorchFunction():
                return args[0].is_nested
        value = func(*args, **kwargs)
        if func is torch.Tensor.size and code is _flex.flex_attention.__code__ and args[1:] == (-2,):
            return value if self._whole is None else self._whole(value)
        return value

    def _call_through(self) -> None:
        in_kernel = types.SimpleNamespace(in_kernel_invocation=True, shape_env=None)
        self._through.enter_context(torch._guards.tracing(types.SimpleNamespace(fake_mode=in_kernel)))  # type: ignore[arg-type]

    def _reached(self, args: tuple[Any, ...]) -> Any:
        frame = self._frame
        self.close()
        if frame is None:
            why = "was compiled on its own; call it as it is" if _FIRST_LOOK else "needs torch 2.13 here"
            raise RuntimeError(f"flex_attention {why}")
        query, key, value, _, _, scale, options, *_ = args
        passed = frame.f_locals
        mask, mod = passed["block_mask"], passed["score_mod"]
        answer = self._answer(
            FlexCall(
                query,
                key,
                value,
                None if mod is _flex._identity else mod,
                None if mask.BLOCK_SIZE == (_flex._LARGE_SPARSE_BLOCK_SIZE,) * 2 else mask,
                scale,
                bool(passed["return_lse"] or passed["return_aux"]),
            )
        )
        unit = 1.0 if options["BACKEND"] == "FLASH" else math.log(2)
        return answer.out, *(None if t is None else t / unit for t in (answer.lse, answer.top))


def of_compiled_flex(error: BaseException) -> bool:
    """Whether an error came out of a `flex_attention` that was compiled, by itself or in a function. Told from where it was
    raised; waits for what `FlexCalls` waits for.
    """
    if stops_recomputation(error):
        return False
    if type(error).__module__.startswith("torch._dynamo"):
        return "flex_attention" in str(error)
    raised = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    above = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    inside = next((i for i, code in enumerate(raised) if code.co_filename == _flex.__file__), None)
    # Inside it there is always a compiler, its own.
    return inside is not None and any(map(wraps_compiled, (*raised[:inside], *above)))


_MODES = ("__torch_function__", "call", "__call__", "_begun", "_read", "_asking")


def _asking() -> types.FrameType:
    """The frame whose call a TorchFunctionMode is asked about, through whatever modes it came."""
    frame = sys._getframe(1)
    while frame.f_code.co_name in _MODES and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_running(frame: types.FrameType) -> bool:
    running: types.FrameType | None = sys._getframe(1)
    while running is not None and running is not frame:
        running = running.f_back
    return running is not None
