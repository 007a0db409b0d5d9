"""What a receiver takes."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.acceptance import Receiver, SeenMessages
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import (
    BadSignature,
    E2eError,
    EnvelopeExpired,
    EnvelopeRefused,
    NoKeyHere,
    NoMessage,
    NoSenderKey,
    OverlongText,
    PlainRefused,
    Replayed,
    UnknownSource,
    UnsignedSource,
    WrongDestination,
)
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret
from dmsg.rmb.core.sender import Sender
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, parse_envelope

from .conftest import LIVE

NOW = 1_000_000
OURS = SessionAddress(7, "here")
KEY = TwinKey(b"\x01" * 32, KeyType.ED25519)
THEIR_SECRET = EncryptionKey(b"\x01" * 32)
OUR_SECRET = EncryptionKey(b"\x02" * 32)
SENDER = Twin(10, KEY.account, (), THEIR_SECRET.public_key)
WITHOUT_PK = Twin(10, KEY.account)
TWINS = {
    one["id"]: Twin(one["id"], bytes.fromhex(one["account"]), (), bytes.fromhex(one["pk"] or "") or None)
    for one in LIVE["twins"]
}
AWAITED = {"awaited"}


def receiver(encryption=OUR_SECRET, **options):
    return Receiver(OURS, encryption, AWAITED.__contains__, **options)


def request(uid="u", payload=b"x", **fields):
    envelope = Envelope(uid=uid, plain=payload, **fields)
    OURS.write_to(envelope.destination)
    envelope.request.command = "c"
    return envelope


def sealed(envelope, pk=OUR_SECRET.public_key, now=NOW):
    sender = Sender(SessionAddress(10), KEY, THEIR_SECRET, bytes, allow_plain=True)
    return parse_envelope(sender.seal(envelope, pk, now))


def taken(envelope, by=None, sender=SENDER, now=NOW):
    by = by or receiver()
    assert by.admit(envelope, now) == 10
    return by.open(envelope, sender, now)


def test_an_encrypted_request_is_taken_once():
    by = receiver()
    assert taken(sealed(request()), by) == b"x"
    with pytest.raises(Replayed) as caught:
        taken(sealed(request(payload=b"y")), by)
    assert caught.value.code is None
    assert taken(sealed(request("v")), by) == b"x"


def test_a_copy_is_refused_before_the_registry_is_asked_and_after():
    by, envelope = receiver(), sealed(request())
    assert by.admit(envelope, NOW) == by.admit(envelope, NOW) == 10
    by.open(envelope, SENDER, NOW)
    with pytest.raises(Replayed):
        by.open(envelope, SENDER, NOW)
    with pytest.raises(Replayed):
        by.admit(envelope, NOW)


def test_a_response_is_another_message_than_its_request():
    by = receiver()
    assert taken(sealed(request()), by) == b"x"
    answer = request()
    answer.response.SetInParent()
    assert taken(sealed(answer), by) == b"x"
    with pytest.raises(Replayed):
        taken(sealed(answer), by)


@pytest.mark.parametrize("address", [SessionAddress(7), SessionAddress(7, ""), SessionAddress(8, "here")])
def test_a_message_for_another_session_is_refused(address):
    envelope = request()
    address.write_to(envelope.destination)
    with pytest.raises(WrongDestination) as caught:
        receiver().admit(sealed(envelope), NOW)
    assert caught.value.code is None


def test_time_runs_out_at_last():
    envelope = sealed(request(expiration=60))
    assert taken(envelope, now=NOW + 69) == b"x"
    with pytest.raises(EnvelopeExpired) as caught:
        receiver().admit(envelope, NOW + 70)
    assert (caught.value.code, caught.value.text) == (102, "envelope validation error: message has expired")
    with pytest.raises(EnvelopeExpired):  # it ran out while the registry was asked
        receiver().open(envelope, SENDER, NOW + 70)
    with pytest.raises(EnvelopeExpired):
        receiver().admit(envelope, NOW - 301)


@pytest.mark.parametrize("kind", ["request", "response", "error"])
@pytest.mark.parametrize("uid", ["awaited", "other"])
def test_without_a_source_only_awaited_errors_are_taken(kind, uid):
    envelope = request(uid, timestamp=NOW, expiration=60)
    getattr(envelope, kind).SetInParent()
    if (kind, uid) == ("error", "awaited"):
        assert receiver().admit(envelope, NOW) is None
    else:
        with pytest.raises(UnsignedSource) as caught:
            receiver().admit(envelope, NOW)
        assert caught.value.code is None


def test_an_error_of_a_relay_may_lack_its_destination():
    envelope = Envelope(uid="awaited", timestamp=NOW, expiration=60)
    envelope.error.message = "message has expired"
    assert receiver().admit(envelope, NOW) is None
    envelope.destination.twin = 8
    with pytest.raises(WrongDestination):
        receiver().admit(envelope, NOW)


def test_an_unknown_source():
    for sender in (None, TWINS[1]):
        with pytest.raises(UnknownSource) as caught:
            taken(sealed(request()), sender=sender)
        assert (caught.value.code, caught.value.text) == (103, "unknown twin id '10'")


@pytest.mark.parametrize("problem", ["message is not signed", "ed25519 signature verification failed"])
def test_what_is_not_signed_by_its_source(problem):
    envelope = sealed(request())
    if "not" in problem:
        envelope.ClearField("signature")
    else:
        sign_envelope(envelope, TwinKey(b"\x03" * 32, KeyType.ED25519))
    by = receiver()
    with pytest.raises(BadSignature) as caught:
        taken(envelope, by)
    assert (caught.value.code, caught.value.text) == (104, f"invalid envelope signature: {problem}")
    assert len(by.seen) == 0
    assert taken(sealed(request()), by) == b"x"


def test_what_cannot_be_decrypted():
    with pytest.raises(NoSenderKey) as caught:
        taken(sealed(request()), sender=WITHOUT_PK)
    assert caught.value.code == 105
    with pytest.raises(NoKeyHere) as caught:
        taken(sealed(request()), receiver(None))
    assert (caught.value.code, caught.value.text) == (106, "e2e error: receiver twin has no public key")
    with pytest.raises(E2eError) as caught:
        taken(sealed(request(), THEIR_SECRET.public_key))
    assert (caught.value.code, caught.value.text) == (106, "e2e error: invalid cipher data")


@pytest.mark.parametrize("payload", [b"x", b""])
def test_a_plain_request_of_a_twin_with_a_key(payload):
    envelope = sealed(request(payload=payload), None)
    with pytest.raises(PlainRefused) as caught:
        taken(envelope)
    assert caught.value.code == 107
    assert taken(envelope, receiver(allow_plain=True)) == payload
    assert taken(envelope, receiver(None)) == payload
    assert taken(envelope, sender=WITHOUT_PK) == payload


@pytest.mark.parametrize("kind", ["response", "error"])
def test_an_answer_may_be_empty_but_not_plain(kind):
    for payload in (b"", b"x"):
        envelope = request(payload=payload)
        getattr(envelope, kind).SetInParent()
        envelope = sealed(envelope, None)
        if payload:
            with pytest.raises(PlainRefused):
                taken(envelope)
        else:
            assert taken(envelope) == b""


@pytest.mark.parametrize("kind", ["ping", "pong", None])
def test_other_kinds_are_refused(kind):
    envelope = request()
    envelope.ClearField("request")
    if kind:
        getattr(envelope, kind).SetInParent()
    with pytest.raises(NoMessage):
        receiver().admit(envelope, NOW)


@pytest.mark.parametrize("name", ["uid", "tags", "schema", "connection", "command", "federation"])
def test_texts_longer_than_any_use(name):
    envelope = request()
    place = {"connection": envelope.source, "command": envelope.request}.get(name, envelope)
    limit = {"uid": 128, "connection": 128, "tags": 1024, "federation": 1024}.get(name, 255)
    for text in ("é" * (limit // 2 + 1), "x" * (limit + 1)):
        setattr(place, name, text)
        with pytest.raises(OverlongText) as caught:
            receiver().admit(envelope, NOW)
        assert caught.value.field == name
    setattr(place, name, "x" * limit)
    receiver().admit(sealed(envelope), NOW)


def test_relays_that_nobody_reads_are_few():
    envelope = request(relays=["r"] * 16)
    assert taken(sealed(envelope)) == b"x"
    envelope.relays.append("")
    with pytest.raises(OverlongText):
        receiver().admit(sealed(envelope), NOW)


@pytest.mark.parametrize("one", [one for one in LIVE["envelopes"] if one.get("hex")], ids=lambda one: one["name"])
def test_recorded_envelopes(one):
    envelope = parse_envelope(bytes.fromhex(one["hex"]))
    destination = SessionAddress.of(envelope.destination)
    secrets = {twin["id"]: read_secret(twin["seed"]) for twin in LIVE["twins"]}
    by = Receiver(destination, EncryptionKey(secrets[destination.twin]), lambda uid: True, allow_plain=True)
    if one["name"] == "relay: pong":
        with pytest.raises(NoMessage):
            by.admit(envelope, envelope.timestamp)
        return
    source = by.admit(envelope, envelope.timestamp)
    assert source == (envelope.source.twin or None)
    if source:
        payload = by.open(envelope, TWINS[source], envelope.timestamp)
        assert payload.hex() == one.get("plain_hex", payload.hex())


@given(
    st.builds(
        Envelope,
        uid=st.text(st.characters(codec="utf-8"), max_size=5),
        timestamp=st.integers(0, 2**64 - 1),
        expiration=st.integers(0, 2**64 - 1),
        signature=st.binary(max_size=66),
        cipher=st.binary(max_size=40),
    ),
    st.sampled_from(["request", "response", "error", "ping"]),
)
def test_what_strangers_write_is_refused(envelope, kind):
    getattr(envelope, kind).SetInParent()
    OURS.write_to(envelope.destination)
    envelope.source.twin = 10
    with pytest.raises(EnvelopeRefused):
        taken(envelope)


class TestSeenMessages:
    def test_what_is_over_is_forgotten(self):
        seen = SeenMessages()
        assert seen.is_new(1, "u", "request", 0, 10)
        assert not seen.is_new(1, "u", "request", 9.9, 10)
        assert seen.is_new(2, "v", "request", 5, 30)
        assert seen.is_new(1, "u", "request", 10, 20)
        for number in range(3):
            assert seen.is_new(3, str(number), "request", 40, 50)
        assert len(seen) == 3

    def test_one_twin_does_not_make_anothers_messages_new(self):
        seen = SeenMessages(100)
        assert seen.is_new(1, "u", "request", 0, 1000)
        for number in range(1000):
            assert seen.is_new(2, str(number), "request", 0, 1000)
        assert len(seen) == 100
        assert not seen.is_new(1, "u", "request", 0, 1000)
        assert not seen.is_new(2, "999", "request", 0, 1000)
        assert seen.is_new(2, "0", "request", 0, 1000)

    def test_the_message_of_another_twin_is_remembered_though_one_has_taken_all_the_room(self):
        seen = SeenMessages(100)
        for number in range(100):
            assert seen.is_new(2, str(number), "request", 0, 1000)
        assert seen.is_new(1, "u", "request", 0, 1000)
        assert not seen.is_new(1, "u", "request", 0, 1000)
        assert len(seen) == 100 and not seen.has(2, "0", "request", 0)

    def test_a_message_that_comes_again_after_its_end_is_remembered_to_its_new_end(self):
        """Ends are kept in whole seconds, so the first message is still there, and must not take the second with it."""
        seen = SeenMessages()
        assert seen.is_new(1, "u", "request", 0, 9.2)
        assert seen.is_new(1, "u", "request", 9.5, 20)
        assert len(seen) == 1
        assert seen.is_new(2, "v", "request", 10.5, 20)
        assert not seen.is_new(1, "u", "request", 10.5, 20)
        assert len(seen) == 2

    def test_what_has_expired_makes_room_first(self):
        seen = SeenMessages(3)
        assert seen.is_new(1, "long", "request", 0, 1000)
        assert seen.is_new(1, "short", "request", 0, 10)
        assert seen.is_new(2, "u", "request", 0, 1000)
        assert seen.is_new(2, "v", "request", 20, 1000)
        assert not seen.is_new(1, "long", "request", 20, 1000)
        assert not seen.is_new(2, "u", "request", 20, 1000)
        assert len(seen) == 3

    def test_of_many_that_expire_together_a_few_are_forgotten_for_each_new_one(self):
        seen = SeenMessages(1000)
        for number in range(1000):
            assert seen.is_new(1, str(number), "request", 0, 10)
        assert seen.is_new(2, "u", "request", 10, 1000)
        assert len(seen) > 900
        for number in range(1000):
            assert seen.is_new(1, f"later {number}", "request", 11, 1000)
            assert len(seen) <= max(number + 2, 1000 - number)
        assert len(seen) == 1000
        assert not seen.is_new(2, "u", "request", 11, 1000)

    def test_a_flood_that_ends_at_many_times_takes_no_more_memory_than_a_full_one(self):
        def held_bytes(ends):
            tracemalloc.start()
            try:
                seen = SeenMessages(1000)
                for end in range(ends):
                    for number in range(1000):
                        assert seen.is_new(1, f"{end}/{number}", "request", 0, 1000 + end)
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

        assert held_bytes(60) < 1.5 * held_bytes(2)

    @given(
        st.integers(1, 10),
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 3), st.integers(1, 9)), max_size=60),
    )
    def test_nothing_remembered_passes_again_and_no_more_than_the_bound_is_kept(self, capacity, messages):
        seen = SeenMessages(capacity)
        now = 0
        until: dict[tuple[int, str], int] = {}
        for twin, uid, step, life in messages:
            now += step
            fresh = until.get((twin, str(uid)), 0) <= now
            assert seen.is_new(twin, str(uid), "request", now, now + life) is fresh
            if fresh:
                until[twin, str(uid)] = now + life
            valid = [one for one, end in until.items() if end > now]
            for one in valid:
                if not seen.has(*one, "request", now):
                    assert len(valid) == capacity + 1
                    del until[one]
            assert min(len(valid), capacity) <= len(seen) <= capacity
