"""Anchors: the float32 values, at one version, of everything that can move; and safetensors files written as a stream.

Where Updates are of aligned bases, an anchor holds those in force too (tensor "basis.NAME", int8), since Updates that go on with
a basis leave it out; the file's metadata say which they are and which Update each travelled in.

The safetensors library has no writer that takes one tensor at a time. An anchor of a 7B model has 28 GB: `encode_tensors`
holds one matrix of it in memory. Files are read by the library, which validates them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from logra.errors import DamagedUpdateError, UpdateError, WrongBaseError
from logra.sketch.aligned import LARGEST
from logra.sketch.block import Block

BASIS = "basis."  # and the name of what it belongs to
METADATA = "bases"
_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class AnchorInfo:
    """What is known of an anchor without reading it.

    run, base: as in every packet. version: Updates applied. step: the trainer's step of the last of them (0: none). head:
    checksum of that packet (the base digest at version 0). digest: of the values. sha256, bytes: of the file.
    """

    run: str
    base: str
    version: int
    step: int
    head: str
    digest: str
    sha256: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Any) -> AnchorInfo:
        """Read and check; raises `DamagedUpdateError`."""
        if not isinstance(values, dict) or values.keys() != {f.name for f in fields(AnchorInfo)}:
            raise DamagedUpdateError("the description of an anchor is malformed: it has other fields")
        for name, value in values.items():
            if name in ("version", "step", "bytes"):
                good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
            else:
                good = isinstance(value, str)
            if not good:
                raise DamagedUpdateError(f"the description of an anchor is malformed: {name} is {value!r:.80}")
        return AnchorInfo(**values)


class Anchor:
    """An anchor at hand; a context manager. Tensors are read one at a time, and only the rows and columns asked for."""

    def __init__(
        self,
        info: AnchorInfo,
        file: Any,
        cleanup: Callable[[], None] | None = None,
        bases: Mapping[str, int] | None = None,
    ) -> None:
        """file: what `safetensors.safe_open` gives, or a mapping of tensors. cleanup: called by `close`.
        bases: index of the first Update that used it, of each basis in the file. Raises `DamagedUpdateError`."""
        self.info = info
        self._file = file
        self._cleanup = cleanup
        self._bases = dict(bases or {})
        self._check_bases()

    @staticmethod
    def from_file(
        info: AnchorInfo, path: Path, *, verify: bool = True, cleanup: Callable[[], None] | None = None
    ) -> Anchor:
        """Open a file. verify: compare its size and sha256 first. Raises `DamagedUpdateError`."""
        if verify:
            with path.open("rb") as file:
                check_hash(info, *hash_file(file))
        try:
            file = safe_open(path, "pt")
            return Anchor(info, file, cleanup, _read_metadata(info, file.metadata()))
        except SafetensorError as error:
            raise _unreadable(info, error) from error

    @staticmethod
    def from_bytes(info: AnchorInfo, data: bytes) -> Anchor:
        check_hash(info, hashlib.sha256(data).hexdigest(), len(data))
        try:
            tensors = safetensors.torch.load(data)
        except SafetensorError as error:
            raise _unreadable(info, error) from error
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])  # `load` has checked it, and drops the metadata
        return Anchor(info, tensors, bases=_read_metadata(info, header.get("__metadata__")))

    @property
    def names(self) -> list[str]:
        """Everything that can move."""
        return sorted(set(self._file.keys()) - {BASIS + name for name in self._bases})

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._file
        return tuple(file[name].shape if isinstance(file, dict) else file.get_slice(name).get_shape())

    def tensor(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Float32 values (out, in), or some rows and columns of them."""
        row_slice = slice(None) if rows is None else slice(rows.start, rows.stop)
        column_slice = slice(None) if columns is None else slice(columns.start, columns.stop)
        if isinstance(self._file, dict):
            return self._file[name][row_slice, column_slice]
        return self._file.get_slice(name)[row_slice, column_slice]

    def basis(self, name: str, columns: range | None = None) -> tuple[Tensor | None, int | None]:
        """The aligned basis in force, int8 (rank, in) or some columns of it, and the index of the first Update that used it;
        (None, None) if there is none. Raises `DamagedUpdateError` for values beyond 127."""
        if name not in self._bases:
            return None, None
        basis = self.tensor(BASIS + name, None, columns).contiguous()
        if basis.numel() and int(basis.min()) < -LARGEST:
            raise DamagedUpdateError(f"anchor {self.info.version} has a basis of {name} beyond {LARGEST}")
        return basis, self._bases[name]

    def _check_bases(self) -> None:
        names = set(self._file.keys())
        for name, index in self._bases.items():
            where = f"anchor {self.info.version} is malformed: the basis of {name}"
            if name not in names or BASIS + name not in names:
                raise DamagedUpdateError(f"{where}, or what it belongs to, is not there")
            shape, dtype = self.shape(BASIS + name), self._dtype(BASIS + name)
            if len(shape) != 2 or shape[1:] != self.shape(name)[1:] or dtype not in ("I8", torch.int8):
                raise DamagedUpdateError(f"{where} is {dtype} {shape}, its matrix {self.shape(name)}")
            if not 0 <= index <= self.info.version:
                raise DamagedUpdateError(f"{where} is of update {index}, which is still to come")

    def _dtype(self, name: str) -> Any:
        return self._file[name].dtype if isinstance(self._file, dict) else self._file.get_slice(name).get_dtype()

    def close(self) -> None:
        self._file = {}
        if self._cleanup is not None:
            self._cleanup()
            self._cleanup = None

    def __enter__(self) -> Anchor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unreadable(info: AnchorInfo, error: SafetensorError) -> DamagedUpdateError:
    return DamagedUpdateError(f"anchor {info.version} is no safetensors file: {error}")


def check_hash(info: AnchorInfo, sha256: str, size: int) -> None:
    """Raise `DamagedUpdateError` unless a file's hash and size are those of the anchor."""
    if size != info.bytes:
        raise DamagedUpdateError(
            f"anchor {info.version} is cut short or too long: {size} bytes instead of {info.bytes}"
        )
    if sha256 != info.sha256:
        raise DamagedUpdateError(f"anchor {info.version} is damaged: its sha256 does not match")


def hash_file(file: BinaryIO) -> tuple[str, int]:
    """sha256 (hex) and size of the rest of a file."""
    start = file.tell()
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    return digest.hexdigest(), file.tell() - start


def encode_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor | Block], targets: Sequence[Sequence[Any]] | None = None
) -> tuple[str, int]:
    """Write a safetensors file; returns its sha256 (hex) and size in bytes.

    tensors: tensors, or whole blocks whose masters are made one at a time, and whose bases in force are kept. targets: the table
    [name, out, in] that they must cover, in float32; raises `WrongBaseError` if they do not.
    """
    if sys.byteorder != "little":
        raise UpdateError("safetensors files are little-endian: this machine is not supported")
    if targets is not None:
        _check_cover(tensors, targets)
    header: dict[str, Any] = {}
    bases = {name: item for name, item in tensors.items() if isinstance(item, Block) and item.basis is not None}
    if bases:
        header["__metadata__"] = {METADATA: json.dumps({name: block.basis_index for name, block in bases.items()})}
        tensors = _with_bases(tensors, bases)
    order = sorted(tensors, key=lambda name: (-_dtype(tensors[name]).itemsize, name))  # keeps every tensor aligned
    offset = 0
    for name in order:
        shape, dtype = _shape(tensors[name]), _dtype(tensors[name])
        if dtype not in _DTYPES:
            raise UpdateError(f"{name} is {dtype}: it cannot be stored")
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    writer = _Writer(file)
    writer.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        item = tensors[name]
        value = item.master() if isinstance(item, Block) else item.detach()
        writer.write(memoryview(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return writer.digest.hexdigest(), writer.size


def _with_bases(tensors: Mapping[str, Tensor | Block], bases: Mapping[str, Block]) -> dict[str, Tensor | Block]:
    taken = sorted(BASIS + name for name in bases if BASIS + name in tensors)
    if taken:
        raise UpdateError(f"the name {taken[0]} is needed for a basis: rename that parameter")
    return {**tensors, **{BASIS + name: block.basis for name, block in bases.items() if block.basis is not None}}


def _read_metadata(info: AnchorInfo, metadata: Mapping[str, str] | None) -> dict[str, int]:
    """Of each basis in the file, by the name of what it belongs to: the index of the first Update that used it."""
    try:
        bases = json.loads((metadata or {}).get(METADATA, "{}"))
        if not isinstance(bases, dict) or not all(type(index) is int for index in bases.values()):
            raise ValueError("it is no object of numbers")
    except (ValueError, RecursionError) as error:
        raise DamagedUpdateError(
            f"anchor {info.version} says in a malformed way which bases it holds: {error}"
        ) from error
    return bases


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)


def _check_cover(tensors: Mapping[str, Tensor | Block], targets: Sequence[Sequence[Any]]) -> None:
    table = {name: (rows, columns) for name, rows, columns in targets}
    odd = sorted(table.keys() ^ tensors.keys())
    if odd:
        raise WrongBaseError(
            f"an anchor holds what the target table names, no more and no less: {', '.join(odd[:3])} differ"
        )
    for name, item in tensors.items():
        whole = item.shape == _shape(item) if isinstance(item, Block) else True
        if not whole or _shape(item) != table[name] or _dtype(item) != torch.float32:
            raise WrongBaseError(f"an anchor needs the whole of {name} as {table[name]} in float32, not {_shape(item)}")


def _shape(item: Tensor | Block) -> tuple[int, ...]:
    return tuple(item.value.shape if isinstance(item, Block) else item.shape)


def _dtype(item: Tensor | Block) -> torch.dtype:
    return torch.float32 if isinstance(item, Block) else item.dtype
