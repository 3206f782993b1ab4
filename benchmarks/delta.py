"""Lossless deltas between two bf16 tensors: the strongest simple competitors of a low-rank Update, each with its decoder.

A tensor is its flat array of bf16 bit patterns (uint16). The receiver holds the old one; a message gives it the new one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

Bits = NDArray[np.uint16]


def to_bits(value: Tensor) -> Bits:
    """The bit patterns of a tensor rounded to bf16, flat."""
    return value.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)


def varints(values: NDArray[np.integer]) -> bytes:
    """LEB128 of non-negative integers: seven bits a byte, least first."""
    values = values.astype(np.int64)
    length = np.ones(len(values), np.int64)
    for limit in (7, 14, 21, 28):
        length += values >= (1 << limit)
    start = np.cumsum(length) - length
    out = np.zeros(int(length.sum()), np.uint8)
    for place in range(int(length.max(initial=0))):
        chosen = length > place
        more = (length[chosen] > place + 1).astype(np.int64) << 7
        out[start[chosen] + place] = ((values[chosen] >> (7 * place)) & 127) | more
    return out.tobytes()


def read_varints(data: bytes) -> NDArray[np.int64]:
    """The inverse of `varints`."""
    raw = np.frombuffer(data, np.uint8)
    if not len(raw):
        return np.zeros(0, np.int64)
    stop = np.flatnonzero(raw < 128) + 1
    start = np.concatenate([[0], stop[:-1]])
    place = np.arange(len(raw)) - np.repeat(start, stop - start)
    return np.add.reduceat((raw & 127).astype(np.int64) << (7 * place), start)


def ordered(bits: Bits) -> NDArray[np.int32]:
    """bf16 bit patterns as integers in the order of the numbers: neighbours differ by 1."""
    wide = bits.astype(np.int32)
    return np.where(wide < 0x8000, wide, 0x7FFF - wide)


def ulp_steps(old: Bits, new: Bits) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(places that changed, by how many bf16 values each moved)."""
    places = np.flatnonzero(old != new)
    return places, ordered(new[places]).astype(np.int64) - ordered(old[places])


def pack(data: bytes) -> bytes:
    """zstd, with the length before it."""
    return struct.pack("<I", len(data)) + pyarrow.Codec("zstd", compression_level=3).compress(data, asbytes=True)


def unpack(data: bytes) -> bytes:
    size = struct.unpack_from("<I", data)[0]
    return pyarrow.Codec("zstd").decompress(data[4:], decompressed_size=size, asbytes=True)


def _join(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _parts(data: bytes) -> list[bytes]:
    parts, position = [], 0
    while position < len(data):
        size = struct.unpack_from("<I", data, position)[0]
        parts.append(data[position + 4 : position + 4 + size])
        position += 4 + size
    return parts


def _gaps(places: NDArray[np.integer]) -> bytes:
    return varints(np.diff(places, prepend=-1) - 1)


def _places(gaps: bytes) -> NDArray[np.int64]:
    return np.cumsum(read_varints(gaps) + 1) - 1


def encode_gaps(old: Bits, new: Bits) -> bytes:
    """Index gaps as varints, and the new values."""
    places = np.flatnonzero(old != new)
    return _join(_gaps(places), new[places].tobytes())


def decode_gaps(old: Bits, data: bytes) -> Bits:
    gaps, values = _parts(data)
    new = old.copy()
    new[_places(gaps)] = np.frombuffer(values, np.uint16)
    return new


def encode_bitmap(old: Bits, new: Bits) -> bytes:
    """One bit an element, and the new values."""
    changed = old != new
    return _join(np.packbits(changed).tobytes(), new[changed].tobytes())


def decode_bitmap(old: Bits, data: bytes) -> Bits:
    bitmap, values = _parts(data)
    new = old.copy()
    new[np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(old)).astype(bool)] = np.frombuffer(values, np.uint16)
    return new


def encode_xor(old: Bits, new: Bits) -> bytes:
    """zstd of the xor, low and high bytes apart."""
    flipped = old ^ new
    return _join(pack((flipped & 255).astype(np.uint8).tobytes()), pack((flipped >> 8).astype(np.uint8).tobytes()))


def decode_xor(old: Bits, data: bytes) -> Bits:
    low, high = (np.frombuffer(unpack(part), np.uint8).astype(np.uint16) for part in _parts(data))
    return (old ^ (low | high << 8)).astype(np.uint16)


def encode_ulps(old: Bits, new: Bits) -> bytes:
    """zstd of the index gaps, and of how many bf16 values each element moved (mostly one, up or down)."""
    places, steps = ulp_steps(old, new)
    return _join(pack(_gaps(places)), pack(varints(np.where(steps < 0, -2 * steps - 1, 2 * steps))))


def decode_ulps(old: Bits, data: bytes) -> Bits:
    gaps, folded = (unpack(part) for part in _parts(data))
    zigzag = read_varints(folded)
    return _moved(old, _places(gaps), np.where(zigzag % 2, -(zigzag + 1) // 2, zigzag // 2))


def encode_rice(old: Bits, new: Bits) -> bytes:
    """Index gaps in the Golomb-Rice code that fits them best, a sign bit a change, and zstd of how far beyond one it went.

    Gaps of independent changes are geometric, for which this code is near the bound.
    """
    places, steps = ulp_steps(old, new)
    gaps = np.diff(places, prepend=-1) - 1
    likely = int(math.log2(1.0 + float(gaps.mean()))) if len(gaps) else 0
    shift = min(range(max(0, likely - 2), likely + 2), key=lambda k: len(gaps) * k + int((gaps >> k).sum()))
    unary = np.zeros(int((gaps >> shift).sum()) + len(gaps), bool)
    unary[np.cumsum((gaps >> shift) + 1) - 1] = True
    rest = (gaps[:, None] >> np.arange(shift)) & 1
    head = struct.pack("<IB", len(gaps), shift)
    return _join(head, _bits(unary), _bits(rest), _bits(steps < 0), pack(varints(np.abs(steps) - 1)))


def decode_rice(old: Bits, data: bytes) -> Bits:
    head, unary, rest, signs, beyond = _parts(data)
    count, shift = struct.unpack("<IB", head)
    high = np.diff(np.flatnonzero(_unpack_bits(unary))[:count], prepend=-1) - 1
    low = _unpack_bits(rest, count * shift).reshape(count, shift) << np.arange(shift)
    places = np.cumsum((high << shift) + low.sum(1) + 1) - 1
    steps = (read_varints(unpack(beyond)) + 1) * (1 - 2 * _unpack_bits(signs, count))
    return _moved(old, places, steps)


def _bits(values: NDArray[np.integer] | NDArray[np.bool_]) -> bytes:
    return np.packbits(values.astype(bool).reshape(-1)).tobytes()


def _unpack_bits(data: bytes, count: int | None = None) -> NDArray[np.int64]:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(np.int64)


def _moved(old: Bits, places: NDArray[np.int64], steps: NDArray[np.int64]) -> Bits:
    order = ordered(old[places]) + steps
    new = old.copy()
    new[places] = np.where(order >= 0, order, 0x7FFF - order).astype(np.uint16)
    return new


CODECS: dict[str, tuple[Callable[[Bits, Bits], bytes], Callable[[Bits, bytes], Bits]]] = {
    "gaps": (encode_gaps, decode_gaps),
    "bitmap": (encode_bitmap, decode_bitmap),
    "xor_zstd": (encode_xor, decode_xor),
    "ulps_zstd": (encode_ulps, decode_ulps),
    "rice": (encode_rice, decode_rice),
}


def entropy(counts: NDArray[np.integer]) -> float:
    """Shannon's, in bits a symbol."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def delta_bound(old: Bits, new: Bits) -> float:
    """Bytes that no code of independent elements beats: which ones changed, and by how many bf16 values."""
    places, steps = ulp_steps(old, new)
    count, changed = len(old), len(places)
    which = count * entropy(np.array([changed, count - changed]))
    return (which + changed * entropy(np.unique(steps, return_counts=True)[1])) / 8 if changed else 0.0
