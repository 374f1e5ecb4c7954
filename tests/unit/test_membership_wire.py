"""Messages: what is one, and what is not."""

from dataclasses import asdict

import pytest

from farandole.membership import wire
from farandole.plan.quorum import Member

MEMBER = Member(3, "host", 42, "/tmp/socket", {"threads": 1})


def test_a_message_is_framed_by_its_length():
    data = wire.encode({"op": "set", "key": "größe"})
    assert int.from_bytes(data[:4]) == len(data) - 4
    assert wire.decode(data[4:]) == {"op": "set", "key": "größe"}


def test_bytes_travel_as_text():
    data = bytes(range(256))
    assert wire.text_to_bytes(wire.bytes_to_text(data)) == data


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"\xff\xfe", b"{", b"[" * 100_000])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(wire.ProtocolError, match="not "):
        wire.decode(body)


def test_a_message_has_a_largest_size():
    largest = wire.MAX_MESSAGE_BYTES - len('{"v":""}')
    assert len(wire.encode({"v": "x" * largest})) == wire.MAX_MESSAGE_BYTES + 4
    with pytest.raises(wire.ProtocolError, match="more than 1048576"):
        wire.encode({"v": "x" * (largest + 1)})


def test_a_member_survives_its_message():
    assert wire.member_from_dict(wire.decode(wire.encode(asdict(MEMBER))[4:])) == MEMBER


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {**asdict(MEMBER), "more": 1},
        {**asdict(MEMBER), "worker_id": "3"},
        {**asdict(MEMBER), "fingerprint": None},
    ],
)
def test_what_is_no_member_is_refused(data):
    with pytest.raises(wire.ProtocolError, match="member"):
        wire.member_from_dict(data)
