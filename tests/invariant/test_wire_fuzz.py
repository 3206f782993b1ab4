"""Whatever bytes arrive, the decoder refuses them with `UpdateError` or gives an Update that means what they say.

More than 100,000 mutated messages from seeded generators; most carry a checksum made anew, since those get past the first
check. What decodes is encoded again and applied to a model: fully, or not at all. A failure prints the message in hex.
"""

import copy
import hashlib
import json
import math
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from logra import digest
from logra.errors import DamagedUpdateError, UpdateError
from logra.sketch import wire
from logra.sketch.block import apply_blocks, blocks_of
from logra.sketch.quantize import BITS, largest
from logra.sketch.update import Factor, Update

HEAD = struct.Struct("<4sHIQ")
FIELDS = ("index", "basis", "basis_index", "seed", "rank", "bits", "decay")
COUNTS = {"raw": 10_000, "sealed": 35_000, "payload": 8_000, "head": 5_000, "text": 25_000, "fields": 20_000}


class TinyModel(nn.Module):
    """Three matrices and a vector: enough to apply most of the base messages to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(4, 3, bias=False)


def a_factor(generator, name, out, width, rank, bits, explicit=False):
    top = largest(bits)
    q = torch.randint(-top, top + 1, (out, rank), generator=generator).to(BITS[bits])
    exponent = torch.randint(-126, 30, (out,), generator=generator, dtype=torch.int8)
    basis = torch.randint(-127, 128, (rank, width), generator=generator).to(torch.int8) if explicit else None
    return Factor(name, out, width, q, exponent, basis)


def an_update(seed, *, rank=3, bits=8, explicit=False, dense=True, targets=True, **fields):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 7), "b.weight": (3, 4)} if targets else {}
    factors = {n: a_factor(generator, n, *shape, rank, bits, explicit) for n, shape in shapes.items()}
    values = {"a.bias": torch.randn(5, 1, generator=generator)} if dense else {}
    options = {"index": 3, "basis": "random", "basis_index": 3, "seed": 42, "decay": 0.25} | fields
    return Update(rank=rank, bits=bits, factors=factors, dense=values, **options)


def aligned_update(seed, changed, *, index=3, first=1, **options):
    """Incremental, with the bases of the targets in `changed`; the others go on with what HELD has."""
    update = an_update(seed, explicit=True, rank=2, index=index, basis="aligned", basis_index=index, **options)
    for name, factor in update.factors.items():
        basis, origin = (factor.basis, index) if name in changed else (None, first)
        update.factors[name] = replace(factor, basis=basis, basis_index=origin)
    return update


# what the model's blocks have kept: of update 1
HELD = {n: (f.basis, 1) for n, f in an_update(9, explicit=True, rank=2).factors.items()}
ENVELOPE = {"run": "0f" * 16, "base": "a1" * 16, "step": 4, "digest": None}
BASES = [
    an_update(0).to_bytes(ENVELOPE),
    an_update(1, bits=15, dense=False).to_bytes(),
    an_update(2, explicit=True, rank=2, decay=0.0).to_bytes({}),
    an_update(3, targets=False).to_bytes(ENVELOPE | {"digest": "c3" * 16}),
    an_update(4, targets=False, dense=False).to_bytes(),
    an_update(5, rank=1, bits=15, explicit=True, dense=False, decay=1e-3).to_bytes(ENVELOPE),
    aligned_update(6, ["a.weight", "b.weight"]).to_bytes(ENVELOPE),
    aligned_update(7, ["b.weight"], dense=False).to_bytes(),
    aligned_update(8, [], bits=15, index=2).to_bytes(ENVELOPE),
]


def parts(message):
    """(header text, payload) of a whole message."""
    length = HEAD.unpack_from(message)[2]
    return message[HEAD.size : HEAD.size + length], message[HEAD.size + length : -16]


def seal(body):
    return body + hashlib.blake2b(body, digest_size=16).digest()


def build(text, payload, version=wire.VERSION):
    whole = HEAD.size + len(text) + len(payload) + 16
    return seal(HEAD.pack(b"LGRU", version, len(text), whole) + text + payload)


# -- mutations ------------------------------------------------------------------------------------------------------------


def mutate(rng, data, other):
    """Flip bits, overwrite, cut, extend, delete, repeat or splice: one to three times."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        kind, at = rng.integers(8), int(rng.integers(len(data) + 1))
        size = int(rng.integers(1, 9))
        noise = rng.bytes(size)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.integers(8)
        elif kind == 1:
            data[at : at + size] = noise
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data += noise
        elif kind == 4:
            del data[at : at + size]
        elif kind == 5:
            data[at:at] = noise
        elif kind == 6:
            data[at:at] = data[at : at + size]
        else:
            data[at:] = other[int(rng.integers(len(other) + 1)) :]
    return bytes(data)


def raw(rng, base, other):
    """Damage on the way: the checksum is not mended."""
    return mutate(rng, base, other)


def sealed(rng, base, other):
    """Anything anywhere, with a right checksum."""
    return seal(mutate(rng, base[:-16], other[:-16]))


def payload(rng, base, other):
    """Other integers and values, sometimes of another length."""
    text, content = parts(base)
    if rng.integers(2):
        content = bytearray(content)
        for _ in range(min(4, len(content))):
            content[int(rng.integers(len(content)))] = int(
                rng.choice([0, 1, 127, 128, 129, 130, 255, rng.integers(256)])
            )
        return build(text, bytes(content))
    return build(text, mutate(rng, content, parts(other)[1]))


def head(rng, base, other):
    """Magic, version, header length and whole length."""
    body = bytearray(base[:-16])
    length = HEAD.unpack_from(body)[2]
    kind = rng.integers(5)
    if kind == 0:
        body[:4] = rng.bytes(4)
    elif kind == 4:
        struct.pack_into("<Q", body, 10, [0, len(base) - 1, len(base) + 1, 2**63, 2**64 - 1][rng.integers(5)])
    elif kind == 1:
        struct.pack_into("<H", body, 4, int(rng.choice([0, 1, 3, 255, 65535, rng.integers(65536)])))
    else:
        values = [
            0,
            1,
            length - 1,
            length + 1,
            len(body),
            len(base),
            2**31,
            2**32 - 1,
            int(rng.integers(2 * len(base))),
        ]
        struct.pack_into("<I", body, 6, values[rng.integers(len(values))])
    return seal(bytes(body)) if rng.integers(8) else bytes(body) + base[-16:]


def text(rng, base, other):
    """The bytes of the JSON text, its length mended: invalid UTF-8, broken and odd JSON, doubled keys."""
    header, content = parts(base)
    kind = rng.integers(8)
    if kind == 0:
        header = header.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-16-be"]))
    elif kind == 1:
        for old in (b"0", b"3", b"5", b"42", b"false", b"0.25", b'"a.weight"'):
            if old in header and rng.integers(3) == 0:
                header = header.replace(old, ODD_TEXTS[rng.integers(len(ODD_TEXTS))], 1)
    elif kind == 2:
        at = header.find(b",") + 1
        header = (
            header[:at]
            + b'"%s":%s,' % (rng.choice(FIELDS).encode(), ODD_TEXTS[rng.integers(len(ODD_TEXTS))])
            + header[at:]
        )
    else:
        header = mutate(rng, header, parts(other)[0])
    return build(header, content)


ODD_TEXTS = [
    b"NaN", b"-Infinity", b"1e999", b"-0", b"-0.0", b"1e-320", b"0.5", b"null", b"true", b'""', b"[]", b"{}", b"9" * 5000,
    b"2147483647", b"2147483648", b"9223372036854775807", b"9223372036854775808", b"-1", b"00", b"1.0", b'"\\ud800"',
    b'"\\u0000"', b'"\xff\xfe"', b"[" * 2000 + b"]" * 2000, b"[" * 60000, b'{"a":' * 30000,
]  # fmt: skip
ODD_VALUES = [
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 5e-324, 1e308, -3.5, 1.0,
    0, 1, 2, 3, 5, 7, 8, 15, 16, -1, 127, 128, 1024, 132105, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**63), -(2**63) - 1, 10**4000, True, False, None, "", "random", "gaussian", "aligned", "a.weight", "b.weight",
    "a.bias", "\ud800", "\x00", "x" * 1025, [], {}, [[]], {"a": {}},
]  # fmt: skip


def fields(rng, base, other):
    """Well-formed JSON with other content: each edit alone or with one or two more."""
    header_text, content = parts(base)
    header = json.loads(header_text)
    for _ in range(rng.integers(1, 4)):
        edit_header(rng, header, json.loads(parts(other)[0]))
    if rng.integers(8) == 0:
        header = [header, [header], None, 7, "x", header.get("factors")][rng.integers(6)]
    return build(json.dumps(header).encode(), content if rng.integers(4) else mutate(rng, content, parts(other)[1]))


def edit_header(rng, header, other):
    value = copy.deepcopy(ODD_VALUES[rng.integers(len(ODD_VALUES))])
    table = header.get(rng.choice(["factors", "dense"]))
    entry = table[rng.integers(len(table))] if isinstance(table, list) and table else None
    kind = rng.integers(8)
    if kind == 0:
        header[rng.choice([*FIELDS, "factors", "dense", "envelope", "extra"])] = value
    elif kind == 1:
        header.pop(rng.choice([*FIELDS, "factors", "dense", "envelope"]), None)
    elif kind == 2:
        name = rng.choice([*FIELDS, "factors", "dense"])
        header[name] = other.get(name)
    elif entry is not None and isinstance(entry, dict):
        if kind == 3:
            entry[rng.choice(["name", "out", "in", "explicit", "basis_index", "extra"])] = value
        elif kind == 4:
            table.append(copy.deepcopy(entry))
        elif kind == 5:
            table.remove(entry)
        elif kind == 6:
            table[rng.integers(len(table))] = value
        else:
            rng.shuffle(table)


# -- what must hold -------------------------------------------------------------------------------------------------------


def tensors_of(update):
    for factor in update.factors.values():
        yield from (t for t in (factor.exponent, factor.q, factor.basis) if t is not None)
    yield from update.dense.values()


def raw_bytes(tensor):
    return tensor.detach().contiguous().numpy().tobytes()


def meaning(update, envelope):
    """Everything an Update says, NaN included, in a form that can be compared."""
    factors = [
        (
            n,
            f.name,
            f.out_features,
            f.in_features,
            f.basis is not None,
            f.basis_index,
            f.q.dtype,
            tuple(f.q.shape),
            tuple(f.exponent.shape),
        )
        for n, f in update.factors.items()
    ]
    dense = [(n, v.dtype, tuple(v.shape)) for n, v in update.dense.items()]
    plain = [getattr(update, name) for name in FIELDS]
    return repr((plain, factors, dense, envelope)), b"".join(raw_bytes(t) for t in tensors_of(update))


def check_says_what_the_bytes_say(message, update, envelope):
    """Against the header and payload as read here, and the promises of an Update's fields."""
    header_text, content = parts(message)
    header = json.loads(header_text)
    assert repr([getattr(update, n) for n in FIELDS]) == repr([header[n] for n in FIELDS])
    assert repr(envelope) == repr(header.get("envelope")) and (envelope is None or isinstance(envelope, dict))
    named = [(n, f.name, f.out_features, f.in_features, f.basis is not None) for n, f in update.factors.items()]
    assert named == [(e["name"], e["name"], e["out"], e["in"], e["explicit"]) for e in header["factors"]]
    assert [(n, *v.shape) for n, v in update.dense.items()] == [(e["name"], e["out"], e["in"]) for e in header["dense"]]
    assert len(set(update.names)) == len(update.names)
    assert b"".join(raw_bytes(t) for t in tensors_of(update)) == content
    assert math.isfinite(update.decay) and update.index >= 0 and update.basis_index >= 0
    if update.basis == "aligned":
        check_bases(update, header)
    else:
        assert update.basis == "random" and all(f.basis_index is None for f in update.factors.values())
    for factor in update.factors.values():
        assert factor.q.dtype == BITS[update.bits] and int(factor.q.to(torch.int32).abs().max()) <= largest(update.bits)
        assert int(factor.exponent.min()) >= -126 and factor.q.shape == (factor.out_features, update.rank)


def check_bases(update, header):
    """What an aligned Update promises: nobody who has all before it can lack a basis, and the product is exact."""
    assert update.basis_index == update.index and 127 * largest(update.bits) * update.rank < 2**24
    for entry, factor in zip(header["factors"], update.factors.values(), strict=True):
        assert type(factor.basis_index) is int and factor.basis_index == entry["basis_index"]
        assert 0 <= factor.basis_index <= update.index and (
            factor.basis is not None or factor.basis_index < update.index
        )
        assert factor.basis is None or int(factor.basis.to(torch.int32).abs().max()) <= 127


def state_bytes(model):
    return {name: raw_bytes(value) for name, value in model.state_dict().items()}


def reference(before, update):
    """The weights after `update`, in float64 with one rounding where float32 has one; None beyond float32's range."""
    after = {name: value.clone() for name, value in before.items()}
    for name, factor in update.factors.items():
        if int(factor.exponent.max()) > 90:
            return None
        is_kept = update.basis == "aligned" and factor.basis is None
        basis = (HELD[name][0] if is_kept else update.basis_block(name, range(factor.in_features))).double()
        delta = (factor.q.double() @ basis) * 2.0 ** factor.exponent.double()[:, None]
        kept = before[name] * torch.tensor(1.0 - update.decay, dtype=torch.float32) if update.decay else before[name]
        after[name] = (kept.double() + delta).float()
    for name, value in update.dense.items():
        after[name] = value.reshape(before[name].shape)
    return after


MODEL = TinyModel()
ORIGIN = {name: value.clone() for name, value in MODEL.state_dict().items()}
ORIGIN_BYTES = state_bytes(MODEL)


def check_applies_fully_or_not_at_all(update):
    """True if it was applied. The model is put back."""
    try:
        blocks = blocks_of(MODEL, update.names)
        for name, (basis, index) in HELD.items():
            if name in blocks:
                blocks[name].hold(basis, index)
        apply_blocks(blocks, update)
    except UpdateError:
        assert state_bytes(MODEL) == ORIGIN_BYTES, "refused, and yet something moved"
        return False
    for name, factor in update.factors.items() if update.basis == "aligned" else ():
        assert blocks[name].basis_index == factor.basis_index
        assert torch.equal(blocks[name].basis, HELD[name][0] if factor.basis is None else factor.basis)
    after = reference(ORIGIN, update)
    if after is not None:
        for name, value in MODEL.state_dict().items():
            assert torch.equal(value.nan_to_num(7.0), after[name].nan_to_num(7.0)), (
                f"{name} is not what the Update says"
            )
    MODEL.load_state_dict(ORIGIN)
    return True


def check(message, expect_damage=False):
    """One input; "refused", "foreign" (decodes, fits another model) or "applied"."""
    try:
        update, envelope = wire.decode_with_envelope(message)
    except UpdateError as error:
        assert type(error) is DamagedUpdateError and len(str(error)) < 2000
        return "refused"
    assert not expect_damage, "a message with a wrong checksum was accepted"
    check_says_what_the_bytes_say(message, update, envelope)
    again = update.to_bytes(envelope)
    assert meaning(*wire.decode_with_envelope(again)) == meaning(update, envelope)
    return "applied" if check_applies_fully_or_not_at_all(update) else "foreign"


MUTATIONS = {"raw": raw, "sealed": sealed, "payload": payload, "head": head, "text": text, "fields": fields}
SEEDS = {name: seed for seed, name in enumerate(MUTATIONS)}


def run(name, count):
    """Feed `count` mutated messages; how each ended."""
    rng = np.random.default_rng([2026, SEEDS[name]])
    ends = dict.fromkeys(("refused", "foreign", "applied"), 0)
    for index in range(count):
        base, other = BASES[rng.integers(len(BASES))], BASES[rng.integers(len(BASES))]
        message = MUTATIONS[name](rng, base, other)
        try:
            ends[check(message, expect_damage=name == "raw" and message not in BASES)] += 1
        except Exception as error:
            error.add_note(
                f"{name} input {index}: {message.hex() if len(message) < 4000 else message[:2000].hex() + '...'}"
            )
            raise
    return ends


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MUTATIONS)
def test_no_bytes_crash_the_decoder_or_half_apply(name):
    ends = run(name, COUNTS[name])
    assert sum(ends.values()) == COUNTS[name] and ends["refused"] > COUNTS[name] / 10
    if name not in ("raw", "head"):  # the mutations that are not refused get all the way to the weights
        assert ends["applied"] > COUNTS[name] / 200


def test_there_are_enough_inputs():
    assert sum(COUNTS.values()) >= 100_000 and COUNTS.keys() == MUTATIONS.keys()


# -- chosen inputs --------------------------------------------------------------------------------------------------------


def with_header(base, change):
    """`base` with its header edited in place by `change`, sealed anew."""
    header_text, content = parts(base)
    header = json.loads(header_text)
    change(header)
    return build(json.dumps(header).encode(), content)


def test_the_base_messages_are_applied():
    """The mutations start from messages that are whole: otherwise nothing here would be tested."""
    assert [check(base) for base in BASES] == ["applied"] * len(BASES)
    assert len({digest(MODEL)}) == 1 and state_bytes(MODEL) == ORIGIN_BYTES


@pytest.mark.parametrize("base", range(len(BASES)))
def test_every_flipped_bit_and_every_cut_is_noticed(base):
    message = BASES[base]
    for at in range(len(message)):
        for bit in range(8):
            damaged = bytearray(message)
            damaged[at] ^= 1 << bit
            assert check(bytes(damaged), expect_damage=True) == "refused"
        assert check(message[:at], expect_damage=True) == "refused"


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["factors"][0].update({"out": 2**31 - 1}),
        lambda h: h["factors"][0].update({"in": 2**31 - 1, "explicit": True}),
        lambda h: h.update(rank=100_000),
        lambda h: h["dense"][0].update({"out": 2**31 - 1, "in": 2**31 - 1}),
        lambda h: [e.update({"out": 2**31 - 1, "in": 2**31 - 1}) for e in h["factors"] + h["dense"]],
    ],
    ids=["rows", "columns", "rank", "dense", "all"],
)
def test_claimed_sizes_allocate_nothing(change):
    big = a_factor(torch.Generator().manual_seed(0), "c.weight", 4000, 9, 32, 8)
    update = an_update(0, rank=32)
    message = Update(**{**vars(update), "factors": {**update.factors, "c.weight": big}}).to_bytes()
    assert len(message) > 100_000
    assert peak_of(message)[0] < 2 * len(message) + 50_000  # whole: the copy of the payload, and the header
    for forged in (with_header(message, change), with_header(message, lambda h: (h["factors"].reverse(), change(h)))):
        peak, error = peak_of(forged)
        assert isinstance(error, DamagedUpdateError) and peak < 2 * len(forged) + 50_000


def peak_of(message):
    """(peak of what Python and numpy allocated while decoding, the error or None)."""
    tracemalloc.start()
    try:
        wire.decode_with_envelope(message)
        return tracemalloc.get_traced_memory()[1], None
    except UpdateError as error:
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":[' + b"{}," * 100_000 + b"{}]}",
        b"[" * 300_000,
        b'{"a":' * 60_000,
        b"9" * 300_000,
        b'"' + b"\\u0041" * 50_000 + b'"',
    ],
    ids=["objects", "lists", "nesting", "digits", "escapes"],
)
def test_hostile_json_is_refused_in_bounded_memory(text):
    message = build(text, b"")
    peak, error = peak_of(message)
    assert isinstance(error, DamagedUpdateError) and peak < 32 * len(message)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        (lambda h: h["factors"][1].update(name="c.weight"), False),
        (lambda h: h["factors"][1].update({"in": 5}), False),
        (lambda h: h["dense"][0].update(name="a.other"), False),
        (lambda h: h["dense"][0].update({"out": 1, "in": 5}), False),
        (lambda h: h.update(index=7, seed=-1, basis_index=0, decay=0.5), True),
    ],
)
def test_what_does_not_fit_moves_nothing(change, fits):
    """The first matrix fits in every case: it must not move before the misfit is found."""
    update = Update.from_bytes(with_header(BASES[0], change))
    before = digest(MODEL)
    assert check_applies_fully_or_not_at_all(update) == fits and digest(MODEL) == before


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_basis_that_is_not_held_moves_nothing(index):
    """The first matrix brings its own: it must not move before the second is found to go on with what nobody has."""
    message = aligned_update(7, ["a.weight"]).to_bytes()
    forged = with_header(message, lambda h: h["factors"][1].update(basis_index=index))
    assert check(forged) == ("applied" if index == 1 else "foreign")


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["factors"][0].update(basis_index=3),
        lambda h: h["factors"][0].update(basis_index=4),
        lambda h: h["factors"][0].update(basis_index=-1),
        lambda h: h["factors"][0].update(basis_index=1.0),
        lambda h: h["factors"][0].update(basis_index=True),
        lambda h: h["factors"][0].pop("basis_index"),
        lambda h: h["factors"][1].update(basis_index=None),
        lambda h: h.update(basis_index=2),
        lambda h: h.update(basis="random"),
        lambda h: h.update(index=0, basis_index=0),
    ],
    ids=["new", "later", "negative", "float", "true", "absent", "null", "key", "random", "first"],
)
def test_aligned_headers_that_no_sender_writes_are_refused(change):
    message = aligned_update(7, ["b.weight"]).to_bytes()
    assert check(message) == "applied"
    with pytest.raises(DamagedUpdateError):
        wire.decode(with_header(message, change))


@pytest.mark.parametrize("twin", [{"out": 5, "in": 7, "explicit": False}, {"out": 1, "in": 1, "explicit": True}])
def test_doubled_names_are_refused(twin):
    def double(header):
        header["factors"].append(header["factors"][0] | twin)

    with pytest.raises(DamagedUpdateError):
        wire.decode(with_header(BASES[0], double))
    with pytest.raises(DamagedUpdateError):
        wire.decode(with_header(BASES[0], lambda h: h["dense"][0].update(name="a.weight")))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(decay=5.0),
        lambda h: h.update(decay=-1e308),
        lambda h: h.update(envelope={"x": float("nan")}),
        lambda h: h["factors"][0].update(name="\ud800"),
        lambda h: h["factors"][0].update(name="\x1b[2J"),
        lambda h: h.update(envelope=[]),
    ],
    ids=["decay_above_1", "negative_decay", "nan_in_envelope", "surrogate", "control", "envelope"],
)
def test_what_no_sender_writes_is_refused(change):
    with pytest.raises(DamagedUpdateError):
        wire.decode(with_header(BASES[0], change))


@pytest.mark.parametrize("kind", ["exponent", "dense"])
def test_payloads_that_put_nan_into_weights_are_refused(kind):
    """By the receiver, and before that by the sender."""
    update = an_update(0)
    if kind == "dense":
        update.dense["a.bias"][2] = float("nan")
    else:
        update.factors["a.weight"].exponent.fill_(127)
        update.factors["a.weight"].q.fill_(127)
    message = build(parts(BASES[0])[0], b"".join(raw_bytes(t) for t in tensors_of(update)))
    with pytest.raises(DamagedUpdateError):
        wire.decode(message)
    with pytest.raises(UpdateError):
        update.to_bytes()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_header_has_one_spelling(encoding):
    text, content = parts(BASES[0])
    assert check(build(text, content)) == "applied"
    with pytest.raises(DamagedUpdateError):
        wire.decode(build(text.decode().encode(encoding), content))
    with pytest.raises(DamagedUpdateError, match="twice"):
        wire.decode(build(b'{"rank":3,' + text[1:], content))


@pytest.mark.parametrize("data", ["text", None, 7, [1, 2], memoryview(BASES[0])[::2]])
def test_what_is_no_bytes_is_refused(data):
    with pytest.raises(DamagedUpdateError):
        wire.decode(data)


@pytest.mark.parametrize("name", ["index", "basis_index", "seed", "rank", "bits"])
def test_refusals_are_short(name):
    with pytest.raises(DamagedUpdateError) as caught:
        wire.decode(with_header(BASES[0], lambda h: h.update({name: 10**4000})))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "fields", [{"decay": 0}, {"seed": 2**63}, {"index": -1}, {"rank": 4}, {"bits": 15}, {"basis": "other"}]
)
def test_what_is_encoded_can_be_decoded_or_is_refused_at_once(fields):
    update = Update(**{**vars(an_update(0)), **fields})
    try:
        message = update.to_bytes()
    except UpdateError:
        return
    assert meaning(wire.decode(message), None)[1] == meaning(update, None)[1]


@pytest.mark.parametrize("kind", ["nan_decay", "nan_envelope", "vector", "empty"])
def test_what_cannot_be_sent_is_an_update_error(kind):
    fields = {
        "nan_decay": {"decay": float("nan")},
        "vector": {"dense": {"x": torch.ones(3)}},
        "empty": {"dense": {"x": torch.ones(0, 1)}},
    }.get(kind, {})
    with pytest.raises(UpdateError):
        Update(**{**vars(an_update(0)), **fields}).to_bytes({"x": float("nan")} if kind == "nan_envelope" else None)


# -- whatever is encoded comes back -----------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def updates(draw):
    bits, names = draw(st.sampled_from(sorted(BITS))), draw(st.lists(NAMES, unique=True, max_size=5))
    rank = draw(st.integers(1, 9 if bits == 8 else 7))
    generator, size = torch.Generator().manual_seed(draw(st.integers(0, 2**32))), st.integers(1, 6)
    cut = draw(st.integers(0, len(names)))
    index, basis = draw(st.integers(0, 2**63 - 1)), draw(st.sampled_from(["random", "aligned"]))
    factors = {}
    for name in names[:cut]:
        factor = a_factor(generator, name, draw(size), draw(size), rank, bits, draw(st.booleans()) or index == 0)
        if basis == "aligned":
            first = draw(st.integers(0, index if factor.basis is not None else index - 1))
            factor = replace(factor, basis_index=first)
        elif index == 0 and draw(st.booleans()):
            factor = replace(factor, basis=None)
        factors[name] = factor
    dense = {
        n: torch.randn(draw(size), draw(size), generator=generator) * 10.0 ** draw(st.integers(-44, 37))
        for n in names[cut:]
    }
    return Update(
        index=index,
        basis=basis,
        basis_index=index if basis == "aligned" else draw(st.integers(0, 2**63 - 1)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        rank=rank,
        bits=bits,
        factors=factors,
        decay=draw(st.floats(0.0, 1.0)),
        dense=dense,
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(updates(), st.none() | st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_decode_undoes_encode(update, envelope):
    message = update.to_bytes(envelope)
    back, unpacked = wire.decode_with_envelope(message)
    assert meaning(back, unpacked) == meaning(update, envelope)
    assert back.to_bytes(unpacked) == message
    assert Update.from_bytes(bytearray(message)).names == update.names
    check_says_what_the_bytes_say(message, back, unpacked)


def test_views_do_not_change_the_message():
    """Transposed and strided tensors are sent as what they mean."""
    for update in (an_update(0), aligned_update(0, ["a.weight"])):
        strided = {
            n: replace(
                f,
                q=f.q.t().contiguous().t(),
                exponent=torch.stack([f.exponent, f.exponent], 1)[:, 1],
                basis=None if f.basis is None else f.basis.t().contiguous().t(),
            )
            for n, f in update.factors.items()
        }
        assert Update(**{**vars(update), "factors": strided}).to_bytes() == update.to_bytes()
