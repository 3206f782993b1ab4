"""The Update's wire form: bytes only, no pickle, everything checked before anything is used.

    magic "LGRU" | format version u16 | header length u32 | whole length u64 | header (JSON) | payload | blake2b-128 of all before

All integers are little-endian. The header holds the Update's fields, an optional envelope (run, base, step: what
`logra.sync.Packet` adds) and the target table. The payload holds for each factor, in the header's order: row exponents
(d int8), q (d x r, int8 or int16), and the basis (r x k int8) where the header says it is explicit; then the float32 values
of each dense parameter. A factor of an aligned Update says which Update was the first to use its basis ("basis_index"), and
has it explicit at least there.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logra.errors import DamagedUpdateError, UpdateError
from logra.sketch import quantize
from logra.sketch.aligned import LARGEST
from logra.sketch.basis import KINDS
from logra.sketch.quantize import BITS, MAX_EXPONENT, MIN_EXPONENT, check_exact
from logra.sketch.update import Factor, Update

MAGIC, VERSION = b"LGRU", 2
_HEAD = struct.Struct("<4sHIQ")
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
_WHOLE = 1 << 63
_MAX_NAME = 1024
_MAX_HEADER = 1 << 26  # bytes; the table of a thousand targets takes a tenth of a MB
_TYPES = {torch.int8: "<i1", torch.int16: "<i2", torch.float32: "<f4"}


def encode(update: Update, envelope: Mapping[str, Any] | None = None) -> bytes:
    """Serialise; raises `UpdateError` for what `decode` would refuse, such as a basis that is not bit-portable.

    envelope: a JSON object for the header.
    """
    if update.basis == "gaussian":
        raise UpdateError("a gaussian basis is not bit-portable and cannot be sent: use basis='random'")
    try:
        fields = {name: _plain(getattr(update, name), kind) for name, kind in _FIELDS.items()}
        _check_fields(fields)
        for name, factor in update.factors.items():
            _check_factor(name, factor, fields)
        for name, value in update.dense.items():
            _check_dense(name, value)
        if update.factors.keys() & update.dense.keys():
            raise ValueError("a name is both a target and dense")
        text = _header(fields, update, envelope)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UpdateError(f"update {update.index!r:.40} cannot be sent: {error}") from error
    payload: list[memoryview] = []
    for factor in update.factors.values():
        payload += [_to_bytes(factor.exponent), _to_bytes(factor.q)]
        if factor.basis is not None:
            payload.append(_to_bytes(factor.basis))
    payload += [_to_bytes(value.to(torch.float32)) for value in update.dense.values()]
    whole = _HEAD.size + len(text) + sum(map(len, payload)) + _CHECKSUM
    parts = [_HEAD.pack(MAGIC, VERSION, len(text), whole), text, *payload]
    checksum = hashlib.blake2b(digest_size=_CHECKSUM)
    for part in parts:
        checksum.update(part)
    return b"".join([*parts, checksum.digest()])


def _header(fields: dict[str, Any], update: Update, envelope: Mapping[str, Any] | None) -> bytes:
    factors: list[dict[str, Any]] = [
        {"name": f.name, "out": f.out_features, "in": f.in_features, "explicit": f.basis is not None}
        for f in update.factors.values()
    ]
    if update.basis == "aligned":
        for entry, factor in zip(factors, update.factors.values(), strict=True):
            entry["basis_index"] = factor.basis_index
    dense = [{"name": name, "out": value.shape[0], "in": value.shape[1]} for name, value in update.dense.items()]
    header = fields | {"factors": factors, "dense": dense}
    if envelope is not None:
        header["envelope"] = dict(envelope)
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > _MAX_HEADER:
        raise ValueError(f"its header has {len(text)} bytes")
    return text


def decode(data: bytes) -> Update:
    """Parse and verify; the checksum is tested first, so that damage is always reported as damage."""
    return decode_with_envelope(data)[0]


def decode_with_envelope(data: bytes) -> tuple[Update, dict[str, Any] | None]:
    """The Update and the envelope it came in, if any. Raises `DamagedUpdateError`; nothing is half-read."""
    header, reader = _open(data)
    try:
        fields = {name: _field(header, name, kind) for name, kind in _FIELDS.items()}
        _check_fields(fields)
        factors: dict[str, Factor] = {}
        for entry in _list(header, "factors"):
            factor = _read_factor(reader, entry, fields)
            _add(factors, factor.name, factor)
        dense: dict[str, Tensor] = {}
        for entry in _list(header, "dense"):
            name, rows, columns = _table_entry(entry)
            value = reader.take((rows, columns), torch.float32)
            _check_dense(name, value)
            _add(dense, name, value)
        reader.finish()
        envelope = header.get("envelope")
        if factors.keys() & dense.keys() or not (envelope is None or isinstance(envelope, dict)):
            raise ValueError("a name is both a target and dense, or the envelope is no object")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DamagedUpdateError(f"the Update's header is malformed: {error}") from error
    return Update(factors=factors, dense=dense, **fields), envelope


def _open(data: bytes) -> tuple[dict[str, Any], _Reader]:
    """Check magic, checksum and format; the header and a reader of the payload."""
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise DamagedUpdateError(f"not a logra Update: {type(data).__name__} instead of bytes") from error
    if len(view) < _HEAD.size + _CHECKSUM or view[:4] != MAGIC:
        raise DamagedUpdateError(f"not a logra Update: {len(view)} bytes that do not begin with {MAGIC!r}")
    _, version, length, whole = _HEAD.unpack_from(view)
    if hashlib.blake2b(view[:-_CHECKSUM], digest_size=_CHECKSUM).digest() != view[-_CHECKSUM:]:
        raise DamagedUpdateError(f"the Update is {_what_happened(len(view), whole)}; ask the sender for it again")
    if version != VERSION:
        raise DamagedUpdateError(
            f"the Update has format version {version}, this logra reads {VERSION}: use the same release on both sides"
        )
    stop = len(view) - _CHECKSUM
    try:
        if _HEAD.size + length > stop or length > _MAX_HEADER or whole != len(view):
            raise ValueError(f"it claims {length} bytes of {whole}, the message has {len(view)}")
        text = bytes(view[_HEAD.size : _HEAD.size + length]).decode("utf-8")
        header = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise DamagedUpdateError(f"the Update's header is malformed: {error}") from error
    return header, _Reader(view, _HEAD.size + length, stop)


def _what_happened(found: int, whole: int) -> str:
    """Cut short, too long or corrupted, by the length that the message claims."""
    if found < whole:
        return f"cut short: {found} of {whole} bytes arrived"
    if found > whole:
        return f"too long: {found - whole} bytes follow its end"
    return "corrupted: its checksum does not match"


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _plain(value: Any, kind: type) -> Any:
    """A field as JSON has it: an exact int, float or str."""
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ValueError(f"a field is {value!r:.40}, not {kind.__name__}")
    return kind(value)


def _field(header: dict[str, Any], name: str, kind: type) -> Any:
    value = header[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _check_fields(fields: dict[str, Any]) -> None:
    """Raise ValueError for values that no sender writes; `UpdateError` for factors beyond the limit of exactness."""
    for name in ("index", "basis_index"):
        if not 0 <= fields[name] < _WHOLE:
            raise ValueError(f"{name} is {fields[name]!r:.40}")
    if not -_WHOLE <= fields["seed"] < _WHOLE or not 0 < fields["rank"] < _LIMIT or fields["bits"] not in BITS:
        numbers = ", ".join(f"{fields[name]!r:.40}" for name in ("seed", "rank", "bits"))
        raise ValueError(f"seed, rank or bits is out of range: {numbers}")
    if fields["basis"] not in KINDS or fields["basis"] == "gaussian":
        raise ValueError(f"the basis {fields['basis']!r:.40} is not known: use the same release on both sides")
    if not 0.0 <= fields["decay"] <= 1.0:
        raise ValueError(f"decay is {fields['decay']}, not between 0 and 1")
    is_aligned = fields["basis"] == "aligned"
    if is_aligned and fields["basis_index"] != fields["index"]:
        raise ValueError(f"basis_index is {fields['basis_index']}: an aligned Update has its own index there")
    check_exact(fields["bits"], LARGEST if is_aligned else 1, fields["rank"])


def _check_factor(key: str, factor: Factor, fields: Mapping[str, Any]) -> None:
    """Names, shapes, dtypes and ranges of one factor; ValueError says what is wrong. fields: of its Update, checked."""
    rank, bits = fields["rank"], fields["bits"]
    name, rows, columns = _table_entry({"name": factor.name, "out": factor.out_features, "in": factor.in_features})
    if key != name or factor.q.dtype != BITS[bits] or factor.exponent.dtype != torch.int8:
        raise ValueError(f"{name} is filed under {key!r:.40}, or has factors of another type than {bits} bits need")
    if tuple(factor.q.shape) != (rows, rank) or tuple(factor.exponent.shape) != (rows,):
        raise ValueError(f"{name} has factors of shape {tuple(factor.q.shape)}, not {(rows, rank)}")
    if max(int(factor.q.max()), -int(factor.q.min())) > quantize.largest(bits):
        raise ValueError(f"{name} has factors beyond {bits} bits")
    if int(factor.exponent.min()) < MIN_EXPONENT or int(factor.exponent.max()) > MAX_EXPONENT:
        raise ValueError(f"{name} has an exponent beyond {MIN_EXPONENT} to {MAX_EXPONENT}")
    if factor.basis is not None:
        if tuple(factor.basis.shape) != (rank, columns) or factor.basis.dtype != torch.int8:
            raise ValueError(f"{name} has a basis of another shape or type than int8 {(rank, columns)}")
        if fields["basis"] != "aligned":
            check_exact(bits, 128, rank)
    _check_basis_index(factor, fields)


def _check_basis_index(factor: Factor, fields: Mapping[str, Any]) -> None:
    """Only aligned factors have one, of this Update or an earlier one; a basis that is new here must be here."""
    name, basis_index = factor.name, factor.basis_index
    if fields["basis"] != "aligned":
        if basis_index is not None:
            raise ValueError(f"{name} has a basis_index, and the basis is {fields['basis']}")
        return
    if not isinstance(basis_index, int) or isinstance(basis_index, bool) or not 0 <= basis_index <= fields["index"]:
        raise ValueError(f"{name} has basis_index {basis_index!r:.40}, not a number up to {fields['index']}")
    if factor.basis is None and basis_index == fields["index"]:
        raise ValueError(f"{name} lacks its basis, which no earlier Update has used")
    if factor.basis is not None and int(factor.basis.min()) < -LARGEST:
        raise ValueError(f"{name} has a basis beyond {LARGEST}")


def _check_dense(name: str, value: Tensor) -> None:
    if value.ndim != 2:
        raise ValueError(f"{name} has {value.ndim} dimensions: dense values are (out, in), vectors (n, 1)")
    _table_entry({"name": name, "out": value.shape[0], "in": value.shape[1]})
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds NaN or infinite values")


def _list(header: dict[str, Any], name: str) -> list[Any]:
    value = header[name]
    if not isinstance(value, list):
        raise ValueError(f"{name} is no list")
    return value


def _add(table: dict[str, Any], name: str, value: Any) -> None:
    if name in table:
        raise ValueError(f"{name} comes twice")
    table[name] = value


def _table_entry(entry: Any) -> tuple[str, int, int]:
    if not isinstance(entry, dict):
        raise ValueError("an entry of the target table is no object")
    name, rows, columns = entry["name"], entry["out"], entry["in"]
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise ValueError(f"a name is {name!r:.40}")
    for size in (rows, columns):
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < _LIMIT:
            raise ValueError(f"{name} has a dimension {size!r:.40}")
    return name, rows, columns


def _read_factor(reader: _Reader, entry: Any, fields: Mapping[str, Any]) -> Factor:
    name, rows, columns = _table_entry(entry)
    rank, bits = fields["rank"], fields["bits"]
    exponent = reader.take((rows,), torch.int8)
    q = reader.take((rows, rank), BITS[bits])
    explicit = entry["explicit"]
    if not isinstance(explicit, bool):
        raise ValueError(f"{name} has explicit={explicit!r:.40}")
    basis = reader.take((rank, columns), torch.int8) if explicit else None
    factor = Factor(name, rows, columns, q, exponent, basis, entry.get("basis_index"))
    _check_factor(name, factor, fields)
    return factor


class _Reader:
    """Takes tensors off the payload; the sizes are checked before any memory is asked for."""

    def __init__(self, data: memoryview, start: int, stop: int):
        self.data, self.position, self.stop = data, start, stop

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self.position + size > self.stop:
            raise ValueError("the payload is shorter than the header says")
        kind = _TYPES[dtype]
        array = np.frombuffer(self.data, kind, count, self.position).astype(kind.replace("<", "="), copy=True)
        self.position += size
        return torch.from_numpy(array).reshape(shape)

    def finish(self) -> None:
        if self.position != self.stop:
            raise ValueError(f"{self.stop - self.position} bytes are left over")


def _to_bytes(tensor: Tensor) -> memoryview:
    array = tensor.detach().cpu().contiguous().numpy()
    return memoryview(array.astype(array.dtype.newbyteorder("<"), copy=False)).cast("B")
