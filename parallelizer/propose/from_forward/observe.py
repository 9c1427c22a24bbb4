"""One forward of a model, watched: which linears make what, where it goes, and what stands between."""

from __future__ import annotations

import dataclasses
import inspect
import linecache
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelizer import torch_private
from parallelizer.compiler.observe.running_module import Running
from parallelizer.compiler.observe.users_code import written_here
from parallelizer.language.workload import Entry, Workload
from parallelizer.propose.from_forward import operators
from parallelizer.propose.from_forward.atoms import (
    ARGUMENT,
    BATCH,
    FEATURE,
    PARAMETER,
    SEQUENCE,
    UNIFORM,
    WHOLE,
    Atom,
    Dim,
    align,
    contract_all,
    fresh,
    leaves,
    refuse,
    size_of,
    tie,
)
from parallelizer.propose.from_forward.modes import Functions, Operators
from parallelizer.propose.from_forward.seen import (
    Dims,
    GroupedWeight,
    Lookup,
    Projection,
    Seen,
    SeenAt,
    SeenAttention,
    SeenCall,
    Sliceable,
    Use,
    sums_over,
)
from parallelizer.propose.from_forward.stated import stated
from parallelizer.runtime.initialize import allocate
from parallelizer.runtime.step import forward
from parallelizer.styles.context_parallel.intercept import asking
from parallelizer.styles.target import forward_names
from parallelizer.torch_private import tree_leaves

LENGTHS = (13, 11, 17, 19, 23, 12, 8, 16)
"""Lengths of the sequence to try, which seldom are a size of the model."""


def watch(model: nn.Module, workload: Workload, positions: str | None = None) -> Seen:
    """Run `model`, which is on meta and is used up, once, on two short rows of fake tensors. `positions` is the argument that
    takes the tokens' positions, if one does. Raises what its forward raises, at the last length that was tried.
    """
    if positions is not None:
        entries = {**workload.entries, positions: Entry(("batch", "sequence"))}
        workload = dataclasses.replace(workload, entries=entries)
    lengths = [n for n in LENGTHS if n <= workload.seq_len] or [workload.seq_len]
    fake = torch_private.FakeTensors()
    with fake:
        allocate(model, "cpu")
    model.eval()  # dropout acts element by element, and would say nothing of its own
    for length in (*lengths, workload.seq_len):
        watcher = _Watcher(model, workload, positions)
        try:
            with fake, stated(model):
                return watcher.run(workload.example(2, length, "cpu"))
        except (Exception, SystemExit):
            if length == workload.seq_len:
                raise
        finally:
            watcher.close()
    raise AssertionError


class _Watcher:
    def __init__(self, model: nn.Module, workload: Workload, positions: str | None) -> None:
        self.model, self.workload, self.positions = model, workload, positions
        self.seen = Seen()
        self.held: list[torch.Tensor] = []  # so that nothing else gets an id
        self.clock = 0
        self.quiet = 0
        self.owners: dict[int, list[tuple[str, str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self.owners.setdefault(id(parameter), []).append((path, name))
        self.transposed: dict[int, int] = {}
        self.slices: dict[int, tuple[int, tuple[int | None, ...]]] = {}
        self.derived: dict[int, tuple[str, str]] = {}
        self.picked: dict[
            int, tuple[str, str]
        ] = {}  # rows of a parameter, as the bias of each token's expert
        self.batch: set[int] = set()
        self.running = Running(model)
        self.hooks: list[Any] = []
        self.open: list[SeenCall] = []
        self.sliced: list[dict[int, Dims]] = []  # of each open call, what its arguments were before

    @property
    def where(self) -> str:
        """The module in which the forward is, with the line of code that is running."""
        return SeenAt(self.running.current, _line())

    @property
    def module(self) -> nn.Module:
        """The running module."""
        return self.model.get_submodule(self.where)

    def argument(self, tensor: torch.Tensor) -> str | None:
        """The argument of the running module that a tensor is; None for another tensor."""
        given = self.open[-1].given if self.open and self.open[-1].module == self.where else {}
        return next((name for name, each in given.items() if each == id(tensor)), None)

    def run(self, batch: dict[str, torch.Tensor]) -> Seen:
        self._adopt(batch)
        for path, module in self.model.named_modules():
            signature = inspect.signature(module.forward)
            self.hooks += [
                module.register_forward_pre_hook(self._enter(path, signature), with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        functions = Functions(self)
        with torch.no_grad(), Operators(self), functions, asking(self._written_out):
            output = forward(self.model, batch)
        for each, names in self.owners.items():
            if each in self.seen.dims:
                self.seen.parameters[".".join(names[0]).lstrip(".")] = self.seen.dims[each]
        self.seen.output = [id(t) for t in tree_leaves(_plain(output)) if isinstance(t, torch.Tensor)]
        return self.seen

    def _written_out(self) -> None:
        """Attention that is written out and asks for all keys and values: its heads are seen from its softmax."""
        self.seen.attentions.append(SeenAttention(self.where, ()))
        self.seen.mixing.add(self.where)

    def close(self) -> None:
        self.running.remove()
        for hook in self.hooks:
            hook.remove()

    def dims(self, tensor: torch.Tensor) -> Dims:
        if id(tensor) not in self.seen.dims:
            names = self.owners.get(id(tensor))
            origin = (
                f"the parameter {'.'.join(names[0]).lstrip('.')}, which is not split"
                if names
                else "a tensor that is not split"
            )
            kind = PARAMETER if names else WHOLE
            self.note(tensor, [fresh(n, kind, origin) for n in tensor.shape])
        return self.seen.dims[id(tensor)]

    def note(self, tensor: torch.Tensor, dims: Dims) -> None:
        """Remember what a tensor is made of."""
        self.held.append(tensor)
        self.seen.dims[id(tensor)] = list(dims)
        self.seen.shapes[id(tensor)] = tuple(tensor.shape)

    def _adopt(self, batch: dict[str, torch.Tensor]) -> None:
        names = forward_names(self.model)
        words: dict[str, Dim] = {}
        for name, tensor in batch.items():
            if names is not None and name not in names:
                continue
            entry = self.workload.entries[name]
            dims: Dims = []
            for word, size in zip(entry.shape, tensor.shape, strict=True):
                if isinstance(word, str):
                    kind = BATCH if word == "batch" else SEQUENCE
                    dims.append(words.setdefault(word, fresh(size, kind, f"the {word} of the batch")))
                else:
                    dims.append(fresh(size))
            self.note(tensor, dims)
            if name != self.positions:
                self.batch.add(id(tensor))

    def _enter(self, path: str, signature: inspect.Signature) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.clock += 1
            given: dict[str, int] = {}
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError:
                bound = {}
            for name, value in bound.items():
                if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                    continue
                if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                    continue
                if isinstance(value, torch.Tensor):
                    given[name] = id(value)
                    self.dims(value)
            self.sliced.append(self._sliceable(path, bound, given))
            floats = [n for n in given if bound[n].is_floating_point()]
            passage = SeenCall(path, given, self.clock, floats=tuple(floats))
            self.seen.calls.append(passage)
            self.open.append(passage)

        return hook

    def _sliceable(self, path: str, bound: dict[str, Any], given: dict[str, int]) -> dict[int, Dims]:
        """Take the arguments that look like a bias or a mask for each head as what may be split in this call; what they were
        before, by id.
        """
        before: dict[int, Dims] = {}
        for name, tensor in given.items():
            dims = self.seen.dims[tensor]
            if path == "" or tensor in before or not _may_be_by_head(bound[name]):
                continue
            before[tensor] = dims
            own = list(dims)
            for at, dim in enumerate(dims[:-1]):
                root = dim[0].root() if len(dim) == 1 else None
                if root is not None and root.kind in (WHOLE, ARGUMENT) and not root.refused:
                    atom = Atom(root.size, ARGUMENT, root.origin)
                    self.seen.sliceable.append(Sliceable(path, name, at, atom))
                    own[at] = (atom,)
            self.seen.dims[tensor] = own
        return before

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.clock += 1
        passage = self.open.pop()
        self.seen.dims.update(self.sliced.pop())
        passage.ended = self.clock
        found = [t for t in tree_leaves(_plain(output)) if isinstance(t, torch.Tensor)]
        self.held += found
        passage.results = tuple(map(id, found))

    # what is looked at as a whole

    def linear(self, result: torch.Tensor, given: torch.Tensor, weight: torch.Tensor) -> None:
        """A product with a weight: what it takes is summed over, what it makes is new."""
        self.clock += 1
        self.seen.read_in.setdefault(id(given), set()).add(self.where)
        dims = self.dims(given)
        owner = self._owner(weight)
        if owner is None and self._grouped_product(result, weight, given, is_left=False, is_linear=True):
            return
        if owner is None:
            refuse([dims[-1]], "it is multiplied by a tensor that is not a parameter", self.where)
            self.note(result, [*dims[:-1], fresh(result.shape[-1])])
            return
        made = Atom(result.shape[-1], FEATURE, f"the output of {owner or 'the root'}")
        self.seen.projections.append(
            Projection(owner, id(given), made, dims[-1], dims[:-1], self.clock, id(result))
        )
        for atom in leaves(dims[-1])[1:]:
            atom.refuse(sums_over(owner), owner)
        # What a linear that multiplies by hand adds afterwards lies as what it has made.
        bias = dict(self.model.get_submodule(owner).named_parameters(recurse=False)).get("bias")
        if isinstance(bias, torch.Tensor) and bias.shape == result.shape[-1:]:
            self.note(bias, [(made,)])
        self.note(result, [*dims[:-1], (made,)])

    def lookup(self, result: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> None:
        """Rows of a table."""
        owner = self._owner(weight)
        # Columns of a table that no tokens index, as a bias of each head, can be split with what they meet.
        kind = WHOLE if owner is None or id(ids) in self.batch else PARAMETER
        columns = fresh(result.shape[-1], kind, "the residual stream, which is not split")
        dims = [*self.dims(ids), columns]
        if kind == PARAMETER and id(weight) not in self.seen.dims:
            self.note(weight, [fresh(weight.shape[0]), columns])
        if owner is not None:
            self.seen.lookups.append(Lookup(owner, dims, id(ids) in self.batch, id(result)))
        self.note(result, dims)

    def attention(
        self, result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[Any]
    ) -> None:
        """Attention by head: heads of queries, keys and values go together, the rest is needed whole."""
        dq, dk, dv = self.dims(q), self.dims(k), self.dims(v)
        heads: tuple[Atom | None, ...] = ()
        if q.ndim == 4:
            tops = [leaves(d[1])[:1] for d in (dq, dk, dv)]
            found = [t[0] for t in tops if t]
            for other in found[1:]:
                tie(found[0], other)
            for atom in found:
                if atom.kind == WHOLE:
                    origin = f": {atom.origin}" if atom.origin else ""
                    atom.refuse(
                        f"attention combines its heads with heads that are not split{origin}", self.where
                    )
            if len(found) < 3:  # a single head cannot be split
                for atom in found:
                    atom.refuse("there is only one key head", self.where)
            heads = tuple(t[0] if t else None for t in tops)
        for dims in (dq, dk, dv):
            contract_all(dims[-1], "attention sums over it", self.where)
        for mask in masks:
            if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[1] != 1:
                if q.ndim == 4 and all(a.kind == ARGUMENT for a in leaves(self.dims(mask)[1])):
                    align(dq[1], self.dims(mask)[1], self.where)
                else:
                    self._masked_by_head(leaves(self.dims(mask)[1]), heads)
        self.seen.attentions.append(SeenAttention(self.where, heads))
        self.seen.mixing.add(self.where)
        self.note(result, [*dq[:-1], dv[-1]])

    def _masked_by_head(self, mask: Sequence[Atom], heads: Sequence[Atom | None]) -> None:
        """A mask for each head: split with the heads where it comes from what can be split."""
        first = next((head for head in heads if head is not None), None)
        for atom in mask:
            if first is None or atom.kind == UNIFORM:
                continue
            if atom.kind in (PARAMETER, FEATURE) and len(mask) == 1:
                tie(first, atom)
            else:
                first.refuse("a mask with an entry for each head is added, which is not split", self.where)

    def _owner(self, weight: torch.Tensor) -> str | None:
        """The module that a weight belongs to; of several, the one that is running."""
        names = self.owners.get(self.transposed.get(id(weight), id(weight)), [])
        inside = next((path for path, _ in names if path == self.where), None)
        return inside

    def operator(self, func: Any, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """One operator of aten."""
        packet = func.overloadpacket
        aten = torch.ops.aten
        if (
            packet in (aten.t, aten.transpose, aten.permute)
            and id(args[0]) in self.owners
            and args[0].ndim == 2
        ):
            self.transposed[id(result)] = id(args[0])
        if packet in (aten.mm, aten.addmm):
            *_, given, weight = args[:3] if packet is aten.addmm else args[:2]
            if self._owner(weight) is not None:
                self.linear(result, given, weight)
                return
        if packet in (aten.mm, aten.bmm):
            left, right = args[:2]
            if self._grouped_product(result, right, left) or self._grouped_product(
                result, left, right, is_left=True
            ):
                return
        if packet is aten._grouped_mm and self._grouped_product(result, args[1], args[0]):
            return
        self._follow_added(packet, result, args)
        if packet.__name__.endswith("_") and args and isinstance(args[0], torch.Tensor):
            self.seen.changed.add(id(args[0]))
        self._follow_slice(packet, result, args)
        self.note_uses(args, kwargs)
        if packet is aten._softmax:
            self.seen.weighed += [atom for dim in self.dims(args[0]) for atom in leaves(dim)]
            if args[0].ndim > 2 and args[0].shape[-1] == args[0].shape[-2]:
                self.seen.written_out = self.seen.written_out or _line(quoted=True)
                self.seen.mixing.add(self.where)
        given = [t for t in tree_leaves((list(args), kwargs)) if isinstance(t, torch.Tensor)]
        if given and isinstance(result, torch.Tensor):
            if all(self._parameter(t) for t in given):
                self.derived[id(result)] = self._parameter(given[0]) or ("", "")
            if all(id(t) in self.batch for t in given):
                self.batch.add(id(result))
        if packet in operators.PARTS:
            for each, dims in zip(result, operators.parts(self, func, result, args, kwargs), strict=True):
                self.note(each, dims)
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                dims = operators.handed_on(self, func, tensor, args, kwargs)
                if len(dims) != tensor.ndim or any(
                    size_of(d) != n for d, n in zip(dims, tensor.shape, strict=True)
                ):
                    for each in given:
                        refuse(self.dims(each), f"it is an input of `{packet.__name__}`", self.where)
                    dims = [fresh(n) for n in tensor.shape]
                self.note(tensor, dims)

    def _follow_added(self, packet: Any, result: Any, args: Sequence[Any]) -> None:
        """Remember the parameters that are added to something, whole or the rows of them that were picked."""
        aten = torch.ops.aten
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        sources = [self.picked.get(id(t)) or self._parameter(t) for t in tensors]
        if packet in (aten.add, aten.add_):
            self.seen.added |= {".".join(each).lstrip(".") for each in sources if each is not None}
        elif sources and sources[0] is not None and (packet is aten.index or packet in operators.SAME_VALUES):
            self.picked[id(result)] = sources[0]

    def _follow_slice(self, packet: Any, result: Any, args: Sequence[Any]) -> None:
        """Remember which dimensions of a parameter of several matrices those of a part of it are."""
        aten = torch.ops.aten
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is None or not isinstance(result, torch.Tensor):
            return
        whole = id(source) in self.owners and source.ndim == 3
        if not whole and id(source) not in self.slices:
            return
        parameter, dims = (id(source), (0, 1, 2)) if whole else self.slices[id(source)]
        made: tuple[int | None, ...] | None = None
        if packet is aten.index and len(args[1]) == 1 and whole:
            made = (*(None for _ in range(result.ndim - 2)), 1, 2)
        elif packet is aten.select and whole and args[1] == 0:
            made = (1, 2)
        elif packet in (aten.transpose, aten.t):
            order = list(dims)
            one, other = args[1:3] if len(args) > 2 else (0, 1)
            order[one], order[other] = order[other], order[one]
            made = tuple(order)
        elif packet is aten.permute:
            made = tuple(dims[d] for d in args[1])
        elif packet in operators.SAME_VALUES and result.shape[-2:] == source.shape[-2:]:
            made = (*(None for _ in range(result.ndim - 2)), *dims[-2:])
        if made is not None:
            self.slices[id(result)] = parameter, made

    def _grouped_product(
        self,
        result: torch.Tensor,
        weight: torch.Tensor,
        given: torch.Tensor,
        *,
        is_left: bool = False,
        is_linear: bool = False,
    ) -> bool:
        """A product with matrices out of one parameter, which stand on the right unless `is_left`; those of a linear are
        transposed. False where the weight is none such.
        """
        parameter, dims = self.slices.get(id(weight), (0, ()))
        if id(weight) in self.owners and weight.ndim == 3:
            parameter, dims = id(weight), (0, 1, 2)
        outer, inner = (*dims[-2:], None, None)[:2]
        if outer is None or inner is None:
            return False
        turned = is_left or is_linear
        made_dim, taken_dim = (outer, inner) if turned else (inner, outer)
        owner, name = self.owners[parameter][0]
        path = f"{owner}.{name}".lstrip(".")
        own = self.dims(given)
        taken, kept = (own[-2], own[-1]) if is_left else (own[-1], own[-2])
        self.clock += 1
        made = Atom(weight.shape[-2 if turned else -1], FEATURE, f"the output of {path}")
        grouped = GroupedWeight(owner, made_dim, taken_dim)
        self.seen.projections.append(
            Projection(path, id(given), made, taken, [kept], self.clock, id(result), grouped)
        )
        for atom in leaves(taken)[1:]:
            atom.refuse(f"{path} sums over it", owner)
        lead = own[: result.ndim - 2]
        self.note(result, [*lead, (made,), kept] if is_left else [*lead, kept, (made,)])
        return True

    def norms(self, dim: Dim) -> bool:
        """Whether a sum over a dimension is that of a norm: of a module without others in it, over the features that it is given.
        It can be given a part of them, if sums are added up over ranks.
        """
        call = self.open[-1] if self.open else None
        if call is None or not call.module or len(call.given) != 1 or call.module != self.where:
            return False
        module = self.module
        own = list(module.parameters(recurse=False))
        (given,) = (self.seen.dims[each] for each in call.given.values())
        first = leaves(dim)[:1]
        if any(True for _ in module.children()) or not first or len(own) > 1 or len(given) != 3:
            return False
        if any(p.ndim != 1 for p in own) or size_of(dim) != size_of(given[-1]) or first[0].kind != FEATURE:
            return False
        same = leaves(given[-1])[:1]
        if not same or same[0].group() is not first[0].group():
            return False
        self.seen.normed.append((call.module, first[0]))
        return True

    def note_uses(self, args: Any, kwargs: Any) -> None:
        tensors = [t for t in tree_leaves((list(args), kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in tensors:
            self.seen.read_in.setdefault(id(tensor), set()).add(self.where)
            owner = self._parameter(tensor)
            if owner is not None:
                self.seen.uses += [Use(*owner, self.dims(t)) for t in tensors if self._parameter(t) is None]

    def _parameter(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """The parameter that a tensor is, or is computed from alone."""
        owners = self.owners.get(id(tensor), [])
        return owners[0] if owners else self.derived.get(id(tensor))


def _may_be_by_head(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the shape of a bias or a mask: [heads, 1, keys], [heads, rows, keys] or [rows, heads, rows, keys]."""
    return tensor.ndim == 4 or (tensor.ndim == 3 and tensor.shape[1] in (1, tensor.shape[2]))


def _line(quoted: bool = False) -> str:
    """The file and line that is running of somebody else's code than torch's and ours, and with `quoted` what stands there."""
    span = written_here()
    if span is None:
        return ""
    text = linecache.getline(span.file, span.line).strip() if quoted else ""
    place = f"{span.file if len(span.file) < 40 else Path(span.file).name}:{span.line}"
    return f"{place}: `{text}`" if text else place


def _plain(output: Any) -> Any:
    """An output with the entries of a dataclass or a mapping as a dict."""
    if isinstance(output, dict):
        return dict(output)
    return output
