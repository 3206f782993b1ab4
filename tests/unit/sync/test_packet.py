"""Packets: the envelope, its checks, and damage."""

import pytest
import torch

from logra.errors import DamagedUpdateError, UpdateError
from logra.sync import Packet
from sync_kit import RUN, TARGETS, base_digest, make_update

BASE = base_digest()


def make(index: int = 3, **changes) -> Packet:
    return Packet(
        **{"update": make_update(index), "run": RUN, "base": BASE, "step": 5, "digest": None, "parent": None} | changes
    )


def test_a_packet_comes_back_as_it_was():
    packet = make(digest="ab" * 16, parent="cd" * 16)
    back = Packet.from_bytes(packet.to_bytes())
    assert (back.run, back.base, back.step, back.digest, back.parent) == (RUN, BASE, 5, "ab" * 16, "cd" * 16)
    assert (back.index, back.version) == (3, 4)
    for name, factor in packet.update.factors.items():
        assert torch.equal(back.update.factors[name].q, factor.q)
    for name, value in packet.update.dense.items():
        assert torch.equal(back.update.dense[name], value)
    assert back.table() == TARGETS


def test_the_checksum_is_the_end_of_the_bytes_however_it_is_found():
    data = make().to_bytes()
    assert make().checksum == Packet.from_bytes(data).checksum == data[-16:].hex()
    assert make(step=6).checksum != make().checksum


def test_every_flipped_byte_and_every_cut_is_damage():
    data = make().to_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 0x40
        with pytest.raises(DamagedUpdateError):
            Packet.from_bytes(bytes(flipped))
    for length in range(0, len(data), 7):
        with pytest.raises(DamagedUpdateError):
            Packet.from_bytes(data[:length])
    with pytest.raises(DamagedUpdateError):
        Packet.from_bytes(data + b"\0")


@pytest.mark.parametrize(
    "envelope",
    [
        None,
        {},
        {"run": RUN, "base": BASE},
        {"run": RUN, "base": BASE, "step": 1, "more": 1},
        {"run": "RUN", "base": BASE, "step": 1},
        {"run": "../x", "base": BASE, "step": 1},
        {"run": RUN, "base": BASE, "step": -1},
        {"run": RUN, "base": BASE, "step": True},
        {"run": RUN, "base": BASE, "step": 1.5},
        {"run": RUN, "base": BASE, "step": 1, "digest": 7},
    ],
)
def test_a_wrong_envelope_is_damage(envelope):
    with pytest.raises(DamagedUpdateError, match="envelope"):
        Packet.from_bytes(make_update(0).to_bytes(envelope))


def test_making_a_packet_checks_its_envelope():
    with pytest.raises(UpdateError, match="hexadecimal"):
        make(run="my run")
    with pytest.raises(UpdateError, match="step"):
        make(step="1")
