"""Safetensors files, of which slices are read and into which slices are written.

The format (github.com/huggingface/safetensors, "Format"): 8 bytes, the length N of the header as a little-endian
unsigned number; N bytes of JSON, by tensor name `dtype`, `shape` and `data_offsets` [begin, end) counted from the end of
the header, and `__metadata__`, texts by name; then the numbers of all tensors, row-major, little-endian, without holes.

They are read with pread and not mapped into memory, so that a rank's memory grows by what it asks for and not by the
pages that it touches, and a file that is cut off is an error in words and not a signal. A header is kept as its bytes,
and what is saved again has the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from parallelizer.diagnostics.diagnostic import Diagnostic, PlanError, Span

BLOCK = 8 << 20
"""Bytes that are read at once where whole rows are read for a part of each; what a rank needs beside its slice."""

RUN = 128 << 10
"""From this many contiguous bytes on, they are read alone."""

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
"""torch's dtypes by the names that safetensors gives them."""

_LONGEST_HEADER = 100_000_000  # as safetensors itself allows

Indices = Sequence[tuple[int, int, int]]
"""(start, count, step) for each dimension."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; `offset` is where its numbers begin in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """The size of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredFile:
    """A file as its header says: `head` are its bytes before the numbers, `size` those of the whole file."""

    path: Path
    head: bytes
    size: int
    entries: Mapping[str, StoredTensor]


def read_file(path: Path) -> StoredFile:
    """The header of a safetensors file. Raises PlanError when it cannot be read, is none, or the file is cut off."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise _unreadable(path, "it has no header of safetensors, or is cut off")
            text = file.read(length)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    try:
        described = json.loads(text)
        entries = {k: _entry(k, v, 8 + length) for k, v in described.items() if k != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, _Unknown) else "its header is none of safetensors"
        raise _unreadable(path, reason) from None
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.bytes)):
        if entry.offset != end:
            raise _unreadable(path, f"{entry.name} does not begin where the tensor before it ends")
        end += entry.bytes
    if end != size:
        raise _unreadable(path, f"it has {size} bytes, and its header speaks of {end}")
    return StoredFile(path, length.to_bytes(8, "little") + text, size, entries)


class _Unknown(ValueError):
    """A dtype that torch does not have."""


def _entry(name: str, described: Mapping[str, Any], start: int) -> StoredTensor:
    begin, end = map(int, described["data_offsets"])
    if described["dtype"] not in DTYPES:
        raise _Unknown(f"{name} has the dtype {described['dtype']}")
    entry = StoredTensor(name, DTYPES[described["dtype"]], tuple(map(int, described["shape"])), start + begin)
    if entry.bytes != end - begin or min(entry.shape, default=1) < 0:
        raise ValueError(name)
    return entry


def described(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], path: Path) -> StoredFile:
    """A file to be written, laid out as safetensors itself does: dtypes of more bytes first, then by name."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    rank = {name: i for i, name in enumerate(DTYPES)}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, laid = 0, []
    for name, dtype, shape in sorted(tensors, key=lambda t: (-t[1].itemsize, -rank[names[t[1]]], t[0])):
        entry = StoredTensor(name, dtype, tuple(shape), at)
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, at + entry.bytes]}
        laid.append(entry)
        at += entry.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {e.name: StoredTensor(e.name, e.dtype, e.shape, e.offset + start) for e in laid}
    return StoredFile(path, len(text).to_bytes(8, "little") + text, start + at, entries)


class Reader:
    """Reads slices of files, which it opens when they are first asked for. A context manager: it closes them."""

    def __init__(self) -> None:
        self._open, self._closing = dict[Path, int](), ExitStack()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def read(self, path: Path, entry: StoredTensor, indices: Indices, target: torch.Tensor) -> None:
        """Fill `target`, whose shape is the indices' counts, in its own dtype and wherever it lies.

        Raises PlanError when the file has got shorter or cannot be read.
        """
        if target.numel() == 0:
            return
        try:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._closing.callback(os.close, self._open[path])
            self._read(self._open[path], entry.offset, entry.dtype, entry.shape, indices, target)
        except OSError as error:
            raise _unreadable(path, f"{entry.name}: {error.strerror or error}") from None

    def _read(
        self,
        fd: int,
        at: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        indices: Indices,
        target: torch.Tensor,
    ) -> None:
        if not shape:
            self._read(
                fd,
                at,
                dtype,
                (1,),
                ((0, 1, 1),),
                target.reshape(1) if target.is_contiguous() else target[None],
            )
            return
        (start, count, step), row = indices[0], math.prod(shape[1:]) * dtype.itemsize
        inner = indices[1:]
        whole_rows = all(i == (0, s, 1) for i, s in zip(inner, shape[1:], strict=True))
        at += start * row
        if (
            whole_rows
            and step == 1
            and target.is_contiguous()
            and target.dtype == dtype
            and target.device.type == "cpu"
        ):
            _fill(fd, at, target)
            return
        if inner and (row >= BLOCK or (not whole_rows and _run(shape[1:], inner) * dtype.itemsize >= RUN)):
            for i in range(count):
                self._read(fd, at + i * step * row, dtype, shape[1:], inner, target[i])
            return
        most = max(1, BLOCK // (row * step))
        for first in range(0, count, most):
            n = min(most, count - first)
            block = self._block(((n - 1) * step + 1) * row).view(dtype).view(-1, *shape[1:])
            _fill(fd, at + first * step * row, block)
            part = block[::step]
            for dim, (s, c, by) in enumerate(inner, 1):
                part = part[(slice(None),) * dim + (slice(s, s + (c - 1) * by + 1, by),)]
            target[first : first + n].copy_(part)

    def _block(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size]


def _run(shape: Sequence[int], indices: Indices) -> int:
    """How many numbers stand together at the end of a row."""
    run = 1
    for size, (_, count, step) in zip(reversed(shape), reversed(indices), strict=True):
        if step != 1:
            return run
        run *= count
        if count != size:
            return run
    return run


def _fill(fd: int, at: int, target: torch.Tensor) -> None:
    left = _memory(target)
    while left:
        got = os.preadv(fd, [left], at)
        if got == 0:
            raise OSError(None, "the file ends before its last tensor does")
        left, at = left[got:], at + got


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # of one element, a stride may be anything
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


class Writer:
    """Writes slices of files of one folder that begin with their headers. A context manager: it closes them, with all
    that was written on the disk. Raises OSError as the system does.
    """

    def __init__(self, files: Iterable[StoredFile], folder: Path) -> None:
        self._open, self._closing = dict[str, int](), ExitStack()
        try:
            for stored in files:
                fd = os.open(
                    folder / stored.path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
                )
                self._closing.callback(os.close, fd)
                self._open[stored.path.name] = fd
                # Room for all of it is asked for now: a full disk is better found before than after an hour.
                os.posix_fallocate(fd, 0, stored.size)
                _put(fd, 0, stored.head)
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            if error is None:
                for fd in self._open.values():
                    os.fsync(fd)

    def write(self, name: str, entry: StoredTensor, indices: Indices, source: torch.Tensor) -> None:
        """Write `source`, whose shape is the indices' counts, on the CPU and in the entry's dtype, into the file of
        that name.
        """
        if source.numel():
            _write(self._open[name], entry.offset, entry.shape, indices, source.contiguous())


def _write(fd: int, at: int, shape: Sequence[int], indices: Indices, source: torch.Tensor) -> None:
    if not shape:
        _put(fd, at, _memory(source))
        return
    (start, count, step), row = indices[0], math.prod(shape[1:]) * source.dtype.itemsize
    at += start * row
    if step == 1 and all(i == (0, s, 1) for i, s in zip(indices[1:], shape[1:], strict=True)):
        _put(fd, at, _memory(source))
        return
    for i in range(count):
        _write(fd, at + i * step * row, shape[1:], indices[1:], source[i])


def _put(fd: int, at: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        put = os.pwrite(fd, left, at)
        left, at = left[put:], at + put


def _unreadable(path: Path, reason: str) -> PlanError:
    return PlanError(
        [
            Diagnostic(
                "weights-unreadable",
                f"{path.name} cannot be read: {reason}",
                Span(str(path)),
                "copy or download it again",
            )
        ]
    )
