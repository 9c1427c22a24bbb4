"""The only file that reaches into torch's private modules and operators.

Each entry says why it is needed and which public replacement it waits for.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor
from torch.nn.attention import flex_attention as _flex

# Both are how torch's own debug modes are written, and wait for a public home.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Fold a sub-mesh into one axis of that name. `DeviceMesh._flatten` is the documented way to share a root
    mesh between a folded axis and its parts, which FSDP over `dp_shard x cp` needs; a second call gives the
    same mesh. Waits for a public `flatten`.
    """
    return mesh._flatten(name)


def join_meshes(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Two axes of one root mesh, one of them perhaps folded, as one mesh of both. `DeviceMesh._concatenate`
    is what FSDP itself uses; slicing the root by a folded name is deprecated.
    """
    return DeviceMesh._concatenate([outer, inner])


def multiply_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply many tensors in place in few kernels. `torch._foreach_mul_` is what torch's own clipping uses;
    there is no public spelling.
    """
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> Any:
    """Euclidean norms of many tensors in few kernels, in `dtype`: `torch._foreach_norm`, as above."""
    return torch._foreach_norm(tensors, 2.0, dtype=dtype) if tensors else ()


# Attention that also returns its log-sum-exp, and its backward from a given log-sum-exp. Context
# parallelism merges blocks by it. Waits for a public attention function with `return_lse` that runs, and
# differentiates, on CPU: `flex_attention` returns one but refuses its backward there. Shapes and meaning:
# parallelizer/styles/context_parallel/kernels.py.


def assert_all(condition: torch.Tensor, text: str) -> None:
    """Raise RuntimeError where a condition is false: at once on a CPU, later on a GPU, which no host read waits for. What
    torch's own losses do inside their kernels. Waits for a public `assert_async`.
    """
    torch._assert_async(condition.all(), text)


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a state dict has this buffer of the module's own. torch keeps the names of those that it has not in an
    attribute, and a state dict itself runs everybody's hooks. Waits for a public question.
    """
    return name not in module._non_persistent_buffers_set


def has_empty_child(module: nn.Module) -> bool:
    """Whether one of the module's children is None, as a ModuleList may hold: `named_children` leaves those out."""
    return None in module._modules.values()


def twin(
    module: nn.Module,
    kind: type[nn.Module],
    *,
    parameter: Callable[[nn.Parameter], nn.Parameter] | None = None,
    buffer: Callable[[torch.Tensor], torch.Tensor] | None = None,
    child: Callable[[nn.Module], nn.Module] | None = None,
) -> nn.Module:
    """Another module of the class `kind` with all that `module` has: its own parameters, buffers and children are what
    the functions make of them, or the same. No constructor runs. A module keeps these three in private dictionaries, where
    None stands for one that is not there; torch has no public way to copy a module without its values.
    """
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    for name, function in (("_parameters", parameter), ("_buffers", buffer), ("_modules", child)):
        if function is not None:
            own: dict[str, Any] = getattr(module, name)
            made.__dict__[name] = {n: None if one is None else function(one) for n, one in own.items()}
    return made


def in_written_classes(model: nn.Module) -> nn.Module:
    """The same model with the classes that it was written with: FSDP puts its own in front, by which a library that looks
    something up by a class's name does not find it. Modules are copied, tensors and settings shared.
    """
    written = next(
        c for c in type(model).__mro__ if issubclass(c, nn.Module) and not issubclass(c, FSDPModule)
    )
    return twin(model, written, child=in_written_classes)


def version(tensor: torch.Tensor) -> int:
    """How many operations have changed a tensor in place. Torch's own checks of backward stand on it, and its notes on
    autograd describe it; it has no public name.
    """
    return tensor._version


def map_pending(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace the tensors of collectives that are under way, which torch hands out as a class of their own, in a tree of
    arguments. Waits for a public name of the class.
    """
    return tree_map_only(AsyncCollectiveTensor, function, tree)


def tree_map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace the tensors in a tree of arguments, as `tree_leaves` finds them. Waits for a public pytree."""
    return tree_map_only(torch.Tensor, function, tree)


def arrived(pending: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a collective brings, waited for."""
    plain: torch.Tensor = pending.wait()  # type: ignore[attr-defined]
    return plain.view_as(plain)


def flash_attention_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the fused CPU kernel: any float dtype, grouped heads, equal head sizes; a mask of q's dtype is added."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)


def flash_attention_cpu_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return op(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)


def flash_attention_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by FlashAttention: float16 or bfloat16, grouped heads, head size a multiple of 8."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    out, lse, *_ = op(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def flash_attention_cuda_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    # The state of the random numbers of the forward's dropout: there was none, so its content is not read.
    # The lengths of packed sequences are None, as the forward returns them for dense ones.
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    offset = torch.empty((), dtype=torch.uint64, device=q.device)
    lengths = (q.size(2), k.size(2))
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    return op(grad_out, q, k, v, out, lse, None, None, *lengths, 0.0, is_causal, seed, offset, scale=scale)


def attention_written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention with grouped heads in single operators, as torch's attention falls back to where no kernel fits. The
    public way is a choice of backends for a whole process or thread, which a model may have made for itself.
    """
    op = torch.ops.aten._scaled_dot_product_attention_math.default
    out: torch.Tensor = op(q, k, v, mask, 0.0, is_causal, None, scale=scale, enable_gqa=True)[0]
    return out


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by cuDNN, which torch itself prefers on Hopper: float16 or bfloat16, grouped heads, any size of v's heads."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = op(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse.squeeze(-1)


def cudnn_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v. `grad_out` has the strides of `out`, or torch copies it with a warning."""
    # There was no dropout, so that the state of its random numbers is not read.
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    lengths = (q.size(2), k.size(2))
    given = (grad_out, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, None, None, *lengths)
    return op(*given, 0.0, is_causal, scale=scale)


_LSE_ROWS = 32
"""The memory-efficient kernels keep the log-sum-exp of a multiple of so many rows."""


def efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the memory-efficient kernels of CUDA in float32: one key head for each query head, a float32 bias that is
    added to the scores.
    """
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = op(q, k, v, bias, True, 0.0, is_causal, scale=scale)
    return out, lse[:, :, : q.size(2)]


def efficient_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    lse = torch.nn.functional.pad(lse, (0, -lse.size(-1) % _LSE_ROWS), value=float("inf")).contiguous()
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    wanted = [True, True, True, False]
    return op(grad_out, q, k, v, bias, out, lse, seed, offset, 0.0, wanted, is_causal, scale=scale)[:3]


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward` without its own check for overrides.

    torch takes a function mode off while it handles a call, so that a mode never sees the attention call
    inside this function; put on again, it would be asked about the same function for ever.
    `nn.MultiheadAttention` is built on it, and context parallelism must see inside. Waits for a mode that can
    step into a function.
    """
    function = torch.nn.functional.multi_head_attention_forward
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    unchecked = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    unchecked.__kwdefaults__ = function.__kwdefaults__
    return unchecked(*args, **kwargs)


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
    return inside is not None and any(map(_compiles, (*raised[:inside], *above)))


def raised_while_compiling(error: BaseException) -> str | None:
    """What torch.compile met, in a line, where the error is the compiler's wrapping around it; None for any other.

    Inductor and its backends keep the exception; Dynamo only quotes it in its text.
    """
    seen: set[int] = set()
    inner: object = error
    while isinstance(inner, BaseException) and id(inner) not in seen and _is_compilers(inner):
        seen.add(id(inner))
        error, inner = inner, getattr(inner, "inner_exception", None) or inner.__cause__
    if seen and isinstance(inner, BaseException) and not _is_compilers(inner):
        return f"{type(inner).__name__}: {inner}"
    quoted = re.search(r"(?:got|raised exception) (\w+)\((['\"])(.*?)\2,?\)", str(error)) if seen else None
    return None if quoted is None else f"{quoted[1]}: {quoted[3]}"


def _is_compilers(error: BaseException) -> bool:
    return type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc") and (
        hasattr(error, "inner_exception") or type(error).__module__ == "torch._dynamo.exc"
    )


def _compiles(code: types.CodeType) -> bool:
    """Whether it is what `torch.compile` puts around a function."""
    return code.co_name == "compile_wrapper" and os.path.join("torch", "_dynamo") in code.co_filename


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


# The names of the operators whose results selective checkpointing keeps: matrix products, attention, and collectives whose
# results are no larger than the tensors that a rank gives. A name that this torch does not have matches nothing.
# `all_gather` is left out: checkpointing would keep the whole stream that sequence parallelism divides. Operators that
# write into their arguments, as those of `c10d` do, are left out because torch cannot keep their results.
# Waits for a public list; torch's own is in `torch._functorch.partitioners`.
COSTLY_OPERATORS = (
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::convolution",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention.quantized",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_cudnn_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_forward.quantized",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_to_all_single",
    "_dtensor::shard_dim_alltoall",
    "flex_attention",  # a higher-order operator
)


def fake_store() -> Any:
    """A store for the `fake` backend, and the backend itself, which importing its module registers. It is
    documented for dry runs and kept under `torch.testing._internal`; waits for a public place.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_name(value: Any) -> str | None:
    """The name of the process group in one argument of a collective operator, or None when it is no group.
    Operators of `c10d` carry a boxed ProcessGroup, which only `torch._C` can open.
    """
    if isinstance(value, torch.ScriptObject):
        try:
            name: str = torch._C._distributed_c10d.ProcessGroup.unbox(value).group_name
            return name
        except (RuntimeError, ValueError):
            return None
    return None


def opened_group(value: Any) -> Any:
    """The process group that an operator of `c10d` was given, boxed as such operators have it. Waits for operators that take
    a group's name.
    """
    return torch._C._distributed_c10d.ProcessGroup.unbox(value)


def finished_work() -> Any:
    """What an operator of `c10d` returns for a collective that has nothing left to wait for, boxed as such operators have it.
    torch's own collectives in Python are written so; waits for operators that return the tensor alone.
    """
    work = torch._C._distributed_c10d
    return work.Work.boxed(work.FakeWork())


def opened_work(value: Any) -> Any:
    """What an operator of `c10d` has returned to wait for, out of its box."""
    return torch._C._distributed_c10d.Work.unbox(value)


def compiled_graphs() -> int:
    """How many graphs `torch.compile` has made in this process. Its counters are documented for debugging and have no public
    home.
    """
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def set_group_timeout(timeout: timedelta) -> None:
    """From now on process groups that are made without a timeout, as those of a DeviceMesh are, have this one. torch
    gives them 30 minutes (10 with NCCL) whatever the default group's is. Waits for `init_device_mesh` to take a
    timeout, or to pass on the default group's.
    """
    module = torch.distributed.distributed_c10d
    module.default_pg_timeout = timeout
    if module.default_pg_nccl_timeout is not None:
        module.default_pg_nccl_timeout = timeout


class _OwnGenerators:
    """What DTensor asks before a random operator, if ranks draw from their own generators: nothing is done."""

    distribute_region_enabled = False

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        yield


def draw_from_own_generators() -> None:
    """From now on random operators on DTensors draw from each rank's default generator, on GPUs as on CPUs.

    Without this the first such operator on GPUs makes an `OffsetBasedRNGTracker`, which broadcasts rank 0's generator to the
    whole world, whatever the ranks were seeded with, and then reads the generator's state at each operator. torch keeps the
    tracker in a module's variable, which it makes only if there is none. `distribute_region_enabled` is the switch that
    torch's own tracker has; reaching it needs this variable too. Waits for a public way to switch the tracker off.
    """
    from torch.distributed.tensor import _random

    _random._rng_tracker = _OwnGenerators()  # type: ignore[assignment]


def forked_after_cuda() -> bool:
    """Whether this process was forked from one that had initialised CUDA. The name is private, and the documentation of
    torch.multiprocessing describes the state. Waits for a public question.
    """
    return torch.cuda._is_in_bad_fork()


def group_ranks(name: str) -> tuple[int, ...]:
    """The global ranks of a group by its name. Functional collectives carry only the name."""
    return tuple(torch.distributed.get_process_group_ranks(group_of(name)))


def group_of(name: str) -> torch.distributed.ProcessGroup:
    """The group of a name, which is all that an operator can be given of it; waits for a public spelling."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def split_axis(mesh: DeviceMesh, axis: str, into: dict[str, int]) -> DeviceMesh:
    """The mesh with one axis unfolded into several, under the same root: `DeviceMesh._unflatten`, which waits
    for a public name. Making a new DeviceMesh instead would make all its process groups anew.
    """
    return mesh._unflatten(axis, tuple(into.values()), tuple(into))


def replace_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer by `function` of it, as `to_empty` does, which takes one device for
    all of them. `Module._apply` is what FSDP watches to take up the new ones; there is no public spelling.
    """
    module._apply(function)


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors over the same memory have in common, fake ones too, which have no `data_ptr`: the
    storage's own address.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references a tensor and its storage have, from C++ and Python. Autograd decides by them
    whether a gradient may be written into; there is no public way to ask.
    """
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@contextmanager
def allocating() -> Iterator[list[int]]:
    """A list that has, once it is left, the bytes that the CPU allocator handed out (positive) and took back (negative)
    inside, in order, of this thread. By the profiler of old, which starts in no time and prints nothing; waits for
    memory statistics of the CPU.
    """
    kind = torch.autograd.ProfilerState.CPU
    experimental = torch._C._profiler._ExperimentalConfig()
    config = torch.autograd.ProfilerConfig(kind, False, True, False, False, False, experimental)
    found: list[int] = []
    torch.autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        threads = torch.autograd._disable_profiler_legacy()
        found += [e.cpu_memory_usage() for events in threads for e in events if e.kind() == "memory_alloc"]


def allocations(function: Callable[[], object]) -> list[int]:
    """As `allocating`, while a function runs."""
    with allocating() as found:
        function()
    return found


@contextmanager
def memory_history(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write what CUDA's allocator did inside, with stacks, for https://pytorch.org/memory_viz. Documented by torch under
    these names, underscores and all; waits for public ones.
    """
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(os.fspath(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be read, which those of meta and fake ones cannot; waits for a public question."""
    from torch._subclasses.fake_tensor import is_fake

    return not tensor.is_meta and not is_fake(tensor) and not torch.compiler.is_compiling()


class FakeTensors:
    """Under it tensors have shapes and no memory; it may be entered again. `FakeTensorMode` is documented for tools
    like ours and has no public home yet.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._modes = FakeTensorMode(allow_non_fake_inputs=True), _RealIndices()

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _RealIndices(TorchDispatchMode):
    """Lets DTensor compute indices for real under fake tensors.

    A dimension that was flattened with a sharded one behind another lies as `_StridedShard`, which reads its
    offsets from an `arange`: a value, which a fake tensor has not. Waits for a `local_shard_size_and_offset`
    in whole numbers, as `Shard` has it.
    """

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        super().__init__()
        self._fake, self._without = FakeTensor, unset_fake_temporarily

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Nearly every operator has a fake tensor first: those are let through at once.
        if args and isinstance(args[0], self._fake):
            return func(*args, **kwargs)
        fake = any(isinstance(leaf, self._fake) for leaf in tree_leaves((args, kwargs)))
        if fake or _caller("local_shard_size_and_offset", 24) is None:
            return func(*args, **kwargs)
        with self._without():
            return func(*args, **kwargs)


def _caller(name: str, depth: int) -> types.FrameType | None:
    """The innermost running frame of a function of that name, if it is not further up than `depth`."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def redistributed_to() -> tuple[str, ...]:
    """The mesh axes over which DTensor is laying a local tensor out right now, as other shards or as terms of a sum;
    none outside a redistribution. Read from the running frames: cutting a shard out of what is whole, or has been
    gathered, is a plain `narrow` to a mode that watches operators. Terms of a sum become shards by a collective, which
    everybody sees, and are left out. Waits for a hook into redistributions; `torch.utils._debug_mode` has one that
    only prints.
    """
    frame = _caller("redistribute_local_tensor", 24)
    if frame is None:
        return ()
    here, there = frame.f_locals["current_spec"], frame.f_locals["target_spec"]
    names = there.mesh.mesh_dim_names or ()
    pairs = zip(names, here.placements, there.placements, strict=False)
    return tuple(name for name, a, b in pairs if a != b and not (a.is_partial() or b.is_replicate()))


def propagates_shapes() -> bool:
    """Whether DTensor runs an operator on fake tensors right now, to learn the shapes of its results. It keeps what it has
    learnt, but in torch 2.11 not of operators on lists of tensors. Told from the running frames: to a mode such a tensor is
    one of the step. Waits for a propagation that leaves other modes out.
    """
    return _caller("_propagate_tensor_meta_non_cached", 24) is not None


_TO_LOCAL = _ToTorchTensor.forward.__code__


def made_plain() -> DTensor | None:
    """The DTensor whose local part `to_local` hands out right now, or None. Told from the running frames, since all that
    operators show of it is a view. Waits for a hook into the border between DTensor and plain tensors.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return None
        if frame.f_code is _TO_LOCAL:
            tensor: DTensor = frame.f_locals["input"]
            return tensor
        frame = frame.f_back
    return None


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local part of a DTensor itself. `to_local` hands out a view of a parameter's, which forgets what the part was
    tagged with. Waits for a `to_local` that promises the part itself.
    """
    part: torch.Tensor = tensor._local_tensor
    return part


def is_sharded(placement: Any) -> bool:
    """Whether a placement spreads elements over its axis, `_StridedShard` too, whose `is_shard` is false."""
    return not (placement.is_replicate() or placement.is_partial())


@contextmanager
def planned_redistributions(plan: Callable[[Any, Any], Sequence[Any] | None]) -> Iterator[None]:
    """Inside, DTensor asks `plan(source, target)`, two specs, for the hops of every redistribution; None means
    its own choice.

    torch's switch, `use_min_cost_redistribution_plan`, is for all or nothing: under it the backward of a
    row-sharded embedding finds no path and fails, and plans made before it stay in torch's cache. Ours asks
    each time, leaves that cache alone, and leaves alone what torch estimates when it chooses how an operator
    is sharded: that question comes without the third argument, and its answers are kept. Waits for a
    public way to choose the plan of one redistribution.
    """
    from torch.distributed.tensor import _redistribute

    cached, uncached = _redistribute._gen_transform_infos, _redistribute._gen_transform_infos_non_cached
    own = functools.cache(uncached)

    def chosen(source: Any, target: Any, *more: Any) -> Any:
        return (plan(source, target) if more else None) or own(source, target, *more)

    # The second is what torch asks under fake tensors and in compilation.
    _redistribute._gen_transform_infos = chosen  # type: ignore[assignment]
    _redistribute._gen_transform_infos_non_cached = chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        _redistribute._gen_transform_infos = cached
        _redistribute._gen_transform_infos_non_cached = uncached


def redistribution_path(source: Any, target: Any, *, cheapest: bool) -> Sequence[Any] | None:
    """The hops between two specs by torch's greedy planner, or by the one that looks for the cheapest; None
    where that one has no path, which it says by an AssertionError. Each hop has `mesh_dim` and
    `src_dst_placements`.
    """
    from torch.distributed.tensor import _redistribute

    planner = _redistribute.get_redistribute_planner(source.device_mesh, source.tensor_meta)
    if not cheapest:
        return planner.generate_greedy_transform_infos(source, target)
    try:
        return planner.generate_graph_based_transform_infos(source, target, source.shape)
    except (AssertionError, ValueError):
        return None


def stops_recomputation(error: BaseException) -> bool:
    """Whether an exception is how a checkpoint stops its recomputation early, and no mistake of anybody. Its class is
    private; waits for a hook argument that tells.
    """
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, _StopRecomputationError)
