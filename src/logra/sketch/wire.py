"""The Update's wire form: bytes only, no pickle, everything checked before anything is used.

    magic "LGRU" | format version u16 | header length u32 | header (JSON) | payload | blake2b-128 of all before

All integers are little-endian. The payload holds for each factor, in the header's order: row exponents (d int8),
q (d x r, int8 or int16), and the basis (r x k int8) where the header says it is explicit.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from logra.errors import UpdateError
from logra.sketch.quantize import BITS

if TYPE_CHECKING:
    from logra.sketch.update import Factor, Update

MAGIC, VERSION = b"LGRU", 1
_HEAD = struct.Struct("<4sHI")
_CHECKSUM = 16
_FIELDS = {
    "index": int,
    "basis": str,
    "basis_index": int,
    "seed": int,
    "rank": int,
    "bits": int,
    "decay": float,
}
_LIMIT = 1 << 31  # a dimension above this is damage, not a model


def encode(update: Update) -> bytes:
    """Serialise; raises `UpdateError` for a basis that other holders could not reproduce."""
    if update.basis == "gaussian":
        raise UpdateError("a gaussian basis is not bit-portable and cannot be sent: use basis='random'")
    factors = [
        {"name": f.name, "out": f.out_features, "in": f.in_features, "explicit": f.basis is not None}
        for f in update.factors.values()
    ]
    header = {field: getattr(update, field) for field in _FIELDS} | {"factors": factors}
    text = json.dumps(header, separators=(",", ":")).encode()
    parts = [_HEAD.pack(MAGIC, VERSION, len(text)), text]
    for factor in update.factors.values():
        parts += [_to_bytes(factor.exponent), _to_bytes(factor.q)]
        if factor.basis is not None:
            parts.append(_to_bytes(factor.basis))
    body = b"".join(parts)
    return body + _checksum(body)


def decode(data: bytes, update_type: type[Update], factor_type: type[Factor]) -> Update:
    """Parse and verify; the checksum is tested first, so that damage is always reported as damage."""
    data = bytes(data)
    if len(data) < _HEAD.size + _CHECKSUM or data[:4] != MAGIC:
        raise UpdateError(f"not a logra Update: {len(data)} bytes that do not begin with {MAGIC!r}")
    if _checksum(data[:-_CHECKSUM]) != data[-_CHECKSUM:]:
        raise UpdateError(
            "the Update is damaged or cut short: its checksum does not match; ask the sender for it again"
        )
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise UpdateError(f"the Update has format version {version}, this logra reads {VERSION}: use the same release")
    try:
        header = json.loads(data[_HEAD.size : _HEAD.size + length])
        fields = {name: _field(header, name, kind) for name, kind in _FIELDS.items()}
        reader = _Reader(data, _HEAD.size + length, len(data) - _CHECKSUM)
        factors = {}
        for entry in header["factors"]:
            factor = _read_factor(reader, entry, fields["rank"], fields["bits"], factor_type)
            factors[factor.name] = factor
        reader.finish()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UpdateError(f"the Update's header is malformed: {error}") from error
    return update_type(factors=factors, **fields)


def _field(header: dict[str, Any], name: str, kind: type) -> Any:
    value = header[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}")
    return value


def _read_factor(reader: _Reader, entry: Any, rank: int, bits: int, factor_type: type[Factor]) -> Factor:
    name, rows, columns = entry["name"], entry["out"], entry["in"]
    if bits not in BITS or not isinstance(name, str):
        raise ValueError(f"{bits} bits, name {name!r}")
    for size in (rows, columns, rank):
        if not isinstance(size, int) or not 0 < size < _LIMIT:
            raise ValueError(f"{name} has a dimension {size!r}")
    exponent = reader.take((rows,), torch.int8)
    q = reader.take((rows, rank), BITS[bits])
    basis = reader.take((rank, columns), torch.int8) if entry["explicit"] is True else None
    return factor_type(name, rows, columns, q, exponent, basis)


class _Reader:
    """Takes tensors off the payload; the sizes are checked before any memory is asked for."""

    def __init__(self, data: bytes, start: int, stop: int):
        self.data, self.position, self.stop = data, start, stop

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape, dtype=object))
        size = count * dtype.itemsize
        if self.position + size > self.stop:
            raise ValueError("the payload is shorter than the header says")
        kind = {torch.int8: "<i1", torch.int16: "<i2"}[dtype]
        array = np.frombuffer(self.data, kind, count, self.position).astype(kind.replace("<", "="), copy=True)
        self.position += size
        return torch.from_numpy(array).reshape(shape)

    def finish(self) -> None:
        if self.position != self.stop:
            raise ValueError(f"{self.stop - self.position} bytes are left over")


def _to_bytes(tensor: Tensor) -> bytes:
    array = tensor.detach().cpu().contiguous().numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM).digest()
