"""The handshake of a link, both sides: Go's recordings, every check, and the boundary between JSON and frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import SIGNATURE_BYTES, SecretKey
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core.errors import LinkRefused
from dmsg.messaging.core.events import LinkDone, LinkRequested
from dmsg.messaging.core.limits import FIRST_FRAME_PAUSE_S, HANDSHAKE_OBJECT_LIMIT_BYTES, HANDSHAKE_TIMEOUT_S
from dmsg.messaging.core.link import LinkFrame, LinkInitiator, LinkResponder, ObjectReader
from dmsg.testing.strategies import BAD_POINTS, cuts, secret_key

CLIENT, RELAY, OTHER = (secret_key(number) for number in (11, 12, 13))
NONCE = bytes(range(16))
Members = dict[str, Any]


class Recorded(SecretKey):
    """A key that signs as it did when a session was recorded: Go's signatures are not repeatable."""

    __slots__ = ("signature",)

    def sign(self, message: bytes, entropy: bytes = b"") -> bytes:
        self.public_key.verify(self.signature, message)
        return self.signature


def recorded(secret: str, signature: str) -> Recorded:
    key = Recorded(bytes.fromhex(secret))
    key.signature = bytes.fromhex(signature)
    return key


def initiator(**options: Any) -> LinkInitiator:
    return LinkInitiator(CLIENT, RELAY.public_key, now=0.0, random=lambda size: NONCE, **options)


def responder() -> LinkResponder:
    return LinkResponder(RELAY, now=0.0, random=bytes)


def frames(client: LinkInitiator, relay: LinkResponder) -> list[bytes]:
    """The four objects of a handshake that succeeds."""
    said = [client.data_to_send()]
    assert relay.receive_data(said[-1], 0.0) == []
    said.append(relay.data_to_send())
    assert client.receive_data(said[-1], 0.0) == []
    said.append(client.data_to_send())
    assert relay.receive_data(said[-1], 0.0) == [LinkRequested(CLIENT.public_key)]
    assert relay.data_to_send() == b""
    relay.accept(0.0)
    said.append(relay.data_to_send())
    return said


def lines(members: Members, **changes: Any) -> bytes:
    """An object with members changed; ``...`` leaves one out."""
    changed = {name: value for name, value in (members | changes).items() if value is not ...}
    return json.dumps(changed).encode() + b"\n"


def wrong(core: LinkInitiator | LinkResponder, data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        core.receive_data(data, 0.0)
    assert caught.value.stage == "handshake"
    return caught.value.reason


# --- what Go has written -----------------------------------------------------------------------------------------------


def without_zeros(text: str) -> bytes:
    """An object of Go's as it is without the signatures that are not there: Go writes zeros, we leave them out."""
    zeros = "0" * 2 * SIGNATURE_BYTES
    return (text.replace(f',"sig1":"{zeros}"', "").replace(f',"sig2":"{zeros}"', "").rstrip("\n") + "\n").encode()


def replay(texts: list[str], client_secret: str, relay_secret: str) -> None:
    """Both roles against Go's recording of the other one."""
    theirs = [text.rstrip("\n").encode() + b"\n" for text in texts]
    ours = [without_zeros(text) for text in texts]
    last = json.loads(texts[3])
    client_key = recorded(client_secret, last["sig2"])
    relay_key = recorded(relay_secret, last["sig1"])

    client = LinkInitiator(client_key, relay_key.public_key, now=0.0, random=lambda size: bytes.fromhex(last["nonce"]))
    assert client.data_to_send() == ours[0]
    assert client.receive_data(theirs[1], 0.0) == []
    assert client.data_to_send() == ours[2]
    assert client.receive_data(theirs[3], 0.0) == [LinkDone(relay_key.public_key, b"")]

    relay = LinkResponder(relay_key, now=0.0)
    assert relay.receive_data(theirs[0], 0.0) == []
    assert relay.data_to_send() == ours[1]
    assert relay.receive_data(theirs[2], 0.0) == [LinkRequested(client_key.public_key)]
    relay.accept(0.0)
    assert relay.data_to_send() == ours[3]


def test_gos_handshake_in_both_roles(vectors: dict[str, Any]) -> None:
    made = vectors["link_handshake"]
    replay([frame["text"] for frame in made["frames"]], made["initiator_sk"], made["responder_sk"])


@pytest.mark.parametrize("link", ["A", "B"])
@pytest.mark.parametrize("variant", ["v0", "v2"])
def test_recorded_handshakes_in_both_roles(variant: str, link: str, vectors: dict[str, Any]) -> None:
    session = vectors["sessions"][variant]
    secrets = {pair["seed_utf8"]: pair["sk"] for pair in vectors["deterministic_keypairs"]}
    texts = [one["handshake"] for one in session["decoded"] if one["link"] == link and "handshake" in one]
    replay(texts, secrets[f"client {link}"], secrets["server seed"])


def test_the_payloads_that_are_signed(vectors: dict[str, Any]) -> None:
    for made in (vectors["link_handshake"], vectors["seed_example_handshake"]):
        text = made["frame4_json"] if "frame4_json" in made else made["frames"][3]["text"]
        last = LinkFrame.decode(text.encode())
        first = replace(last, sig1=b"", sig2=b"", accepted=None)
        assert first.payload().hex() == made["sig1_payload"]
        assert replace(first, sig1=last.sig1).payload().hex() == made["sig2_payload"]
        last.responder.verify(last.sig1, bytes.fromhex(made["sig1_payload"]))
        last.initiator.verify(last.sig2, bytes.fromhex(made["sig2_payload"]))


#: What Go's responder was given, and what ours answers: an answer, or the reason of the refusal.
FIRST_FRAMES = {
    "seed style: no sig fields": "",
    "no trailing newline": "",
    "sig1/sig2 zeros (Go style)": "",
    "empty sig1 string": "malformed sig1",
    "sig1 null": "",
    "other version": "unknown version",
    "version missing": "unknown version",
    "nonce empty": "malformed nonce",
    "nonce odd hex": "malformed nonce",
    "nonce 64 bytes": "malformed nonce",
    "nonce upper-case hex": "",
    "initiator zero key": "malformed initiator",
    "sig1 pre-filled with non-zero": "signed too early",
    "accepted true in frame 1": "",
    "not JSON": "not JSON",
    "JSON null": "not JSON",
    "JSON array": "not JSON",
}


def test_first_frames_that_gos_responder_was_given(vectors: dict[str, Any]) -> None:
    key = SecretKey(bytes.fromhex(vectors["link_handshake"]["responder_sk"]))
    found = {}
    for case in vectors["link_responder_frame1_cases"]:
        core = LinkResponder(key, now=0.0)
        try:
            assert core.receive_data(case["frame1"].encode(), 0.0) == []
            answer = LinkFrame.decode(core.data_to_send())
            key.public_key.verify(answer.sig1, replace(answer, sig1=b"").payload())
            assert not answer.sig2 and answer.accepted is None
            found[case["case"]] = ""
        except RemoteProtocolError as error:
            found[case["case"]] = error.reason
            assert core.data_to_send() == b""
    assert found == FIRST_FRAMES


# --- both sides of ours ------------------------------------------------------------------------------------------------


def test_both_sides_learn_each_other() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    assert client.receive_data(last, 0.0) == [LinkDone(RELAY.public_key, b"")]
    assert relay.handle_timeout(FIRST_FRAME_PAUSE_S) == [LinkDone(CLIENT.public_key, b"")]
    for core in (client, relay):
        assert core.next_timeout() is None and core.data_to_send() == b""


def test_objects_are_compact_and_end_with_one_line_feed() -> None:
    said = frames(initiator(), responder())
    for frame in said:
        assert frame.endswith(b"}\n") and frame.count(b"\n") == 1 and b" " not in frame
    assert "sig1" not in json.loads(said[0]) and "sig2" not in json.loads(said[1])
    assert all("accepted" not in json.loads(frame) for frame in said[:3]) and json.loads(said[3])["accepted"] is True


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_in_pieces_as_in_one(data: st.DataObject) -> None:
    client, relay = initiator(), responder()
    said = frames(client, relay)
    again = initiator(), responder()
    again[0].data_to_send()
    events: list[object] = []
    for number, frame in enumerate(said):
        core = again[(number + 1) % 2]
        for piece in data.draw(cuts(frame)):
            events += core.receive_data(piece, 0.0)
        if number == 2:
            again[1].accept(0.0)
    events += again[1].handle_timeout(1.0)
    assert events == [
        LinkRequested(CLIENT.public_key),
        LinkDone(RELAY.public_key, b""),
        LinkDone(CLIENT.public_key, b""),
    ]


def pretty(frame: bytes) -> bytes:
    """The same object with all that a reader of JSON has to take: white space, another order, members of others."""
    members = json.loads(frame)
    shuffled = {"x": {"deep": ['}\\"{', {}]}, **dict(reversed(members.items())), 'y"}': "\\"}
    return b" \r\n\t" + json.dumps(shuffled, indent=3).encode() + b"\n"


def test_objects_may_be_written_in_any_way() -> None:
    client, relay = initiator(), responder()
    assert relay.receive_data(pretty(client.data_to_send()), 0.0) == []
    client.receive_data(pretty(relay.data_to_send()), 0.0)
    third = pretty(client.data_to_send())
    events = [event for at in range(len(third)) for event in relay.receive_data(third[at : at + 1], 0.0)]
    assert events == [LinkRequested(CLIENT.public_key)]
    relay.accept(0.0)
    assert client.receive_data(pretty(relay.data_to_send()), 0.0) == [LinkDone(RELAY.public_key, b"")]


# --- the boundary between JSON and frames ------------------------------------------------------------------------------


def test_one_line_feed_is_waited_for_and_taken() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    assert client.receive_data(last[:-1], 0.0) == []
    assert client.receive_data(b"\n\n\x40", 0.0) == [LinkDone(RELAY.public_key, b"\n\x40")]


def test_a_relay_answers_frame_3_only_behind_its_line_feed() -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    client.receive_data(relay.data_to_send(), 0.0)
    third = client.data_to_send()
    assert relay.receive_data(third[:-1], 0.0) == []
    assert relay.receive_data(b"\n", 0.0) == [LinkRequested(CLIENT.public_key)]


def test_frames_behind_the_last_object_are_handed_over() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    assert client.receive_data(last + b"\0\x02\x03\x07", 0.0) == [LinkDone(RELAY.public_key, b"\0\x02\x03\x07")]


def test_anything_but_a_line_feed_behind_the_last_object_is_refused() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    assert wrong(client, last[:-1] + b"\r\n") == "no line feed"


def test_a_relay_holds_its_first_frame_back() -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 5.0)
    client.receive_data(relay.data_to_send(), 5.0)
    relay.receive_data(client.data_to_send(), 5.0)
    relay.accept(7.0)
    assert relay.next_timeout() == 7.0 + FIRST_FRAME_PAUSE_S == 7.05
    assert relay.handle_timeout(7.049) == []
    assert relay.handle_timeout(7.05) == [LinkDone(CLIENT.public_key, b"")]


def test_a_client_that_sends_has_read_the_last_object() -> None:
    client, relay = initiator(), responder()
    frames(client, relay)
    assert relay.receive_data(b"\0\x54\0", 0.001) == [LinkDone(CLIENT.public_key, b"\0\x54\0")]


def test_what_a_client_sends_too_early_is_kept_up_to_a_limit() -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    client.receive_data(relay.data_to_send(), 0.0)
    assert relay.receive_data(client.data_to_send() + b"\0\x54", 0.0) == [LinkRequested(CLIENT.public_key)]
    assert relay.receive_data(b"\0", 0.0) == []
    relay.accept(0.0)
    assert relay.handle_timeout(1.0) == [LinkDone(CLIENT.public_key, b"\0\x54\0")]


def test_a_flood_before_the_decision_ends_the_link() -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    client.receive_data(relay.data_to_send(), 0.0)
    relay.receive_data(client.data_to_send(), 0.0)
    assert wrong(relay, bytes(HANDSHAKE_OBJECT_LIMIT_BYTES + 1)) == "message over the limit"


# --- decisions and time ------------------------------------------------------------------------------------------------


def test_a_relay_may_refuse_before_it_signs() -> None:
    client = initiator()
    asked = json.loads(client.data_to_send())
    with pytest.raises(LinkRefused):
        client.receive_data(lines(asked, accepted=False), 0.0)
    assert not client.relay_proved


def test_frames_right_behind_the_handshake_may_be_many() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    more = bytes(2 * HANDSHAKE_OBJECT_LIMIT_BYTES)
    assert client.receive_data(last + more, 0.0) == [LinkDone(RELAY.public_key, more)]


def test_a_refused_client_is_told() -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    client.receive_data(relay.data_to_send(), 0.0)
    relay.receive_data(client.data_to_send(), 0.0)
    relay.refuse()
    last = relay.data_to_send()
    assert json.loads(last)["accepted"] is False and relay.next_timeout() is None
    with pytest.raises(LinkRefused):
        client.receive_data(last, 0.0)


@pytest.mark.parametrize("accepted", [False, None, ...])
def test_accepted_that_is_not_true_is_a_refusal(accepted: object) -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    with pytest.raises(LinkRefused):
        client.receive_data(lines(json.loads(last), accepted=accepted), 0.0)


def test_a_decision_is_taken_once_and_in_time() -> None:
    client, relay = initiator(), responder()
    with pytest.raises(LocalProtocolError):
        relay.accept(0.0)
    frames(client, relay)
    for decide in (lambda: relay.accept(0.0), relay.refuse):
        with pytest.raises(LocalProtocolError):
            decide()


@pytest.mark.parametrize("make", [initiator, responder])
def test_a_handshake_takes_three_seconds_at_most(make: Callable[[], LinkInitiator | LinkResponder]) -> None:
    core = make()
    assert core.next_timeout() == HANDSHAKE_TIMEOUT_S == 3.0
    assert core.handle_timeout(2.9) == []
    with pytest.raises(RemoteProtocolError) as caught:
        core.handle_timeout(3.0)
    assert caught.value.reason == "timeout"
    assert core.next_timeout() is None and core.handle_timeout(9.0) == []


def test_a_handshake_that_stops_before_the_last_line_feed_runs_out_of_time() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    client.receive_data(last[:-1], 2.0)
    with pytest.raises(RemoteProtocolError):
        client.handle_timeout(3.0)


# --- every check -------------------------------------------------------------------------------------------------------

EVIL_NONCE = "ff" * 16


def high_s(signature: bytes) -> str:
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    s = order - int.from_bytes(signature[32:64], "big")
    return (signature[:32] + s.to_bytes(32, "big") + bytes((signature[64] ^ 1,))).hex()


@pytest.mark.parametrize("name", BAD_POINTS)
@pytest.mark.parametrize("member", ["initiator", "responder"])
def test_keys_that_are_no_points_are_refused(member: str, name: str) -> None:
    """``x >= p`` ends Go's process."""
    first = json.loads(initiator().data_to_send())
    assert wrong(responder(), lines(first, **{member: BAD_POINTS[name].hex()})) == f"malformed {member}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.2"}, "unknown version"),
        ({"version": 0.1}, "unknown version"),
        ({"responder": str(OTHER.public_key)}, "not our key"),
        ({"responder": ...}, "malformed responder"),
        ({"initiator": 7}, "malformed initiator"),
        ({"initiator": str(CLIENT.public_key) + "00"}, "malformed initiator"),
        ({"nonce": "00" * 15}, "malformed nonce"),
        ({"nonce": "00" * 17}, "malformed nonce"),
        ({"nonce": " " * 32}, "malformed nonce"),
        ({"nonce": "é" * 32}, "malformed nonce"),
        ({"nonce": None}, "malformed nonce"),
        ({"sig1": "11" * 65}, "signed too early"),
        ({"sig2": "11" * 65}, "signed too early"),
        ({"sig2": "11" * 64}, "malformed sig2"),
        ({"accepted": "true"}, "malformed accepted"),
        ({"accepted": 1}, "malformed accepted"),
    ],
    ids=str,
)
def test_what_a_relay_does_not_take_as_the_first_frame(changes: Members, reason: str) -> None:
    assert wrong(responder(), lines(json.loads(initiator().data_to_send()), **changes)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": EVIL_NONCE}, "not an echo"),
        ({"initiator": str(OTHER.public_key)}, "not an echo"),
        ({"responder": str(OTHER.public_key)}, "not an echo"),
        ({"sig2": "11" * 65}, "not an echo"),
        ({"version": "0.2"}, "unknown version"),
        ({"sig1": ...}, "sig1 does not verify"),
        ({"sig1": "00" * 65}, "sig1 does not verify"),
        ({"sig1": OTHER.sign(b"other").hex()}, "sig1 does not verify"),
    ],
    ids=str,
)
def test_what_a_client_does_not_take_as_the_second_frame(changes: Members, reason: str) -> None:
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    assert wrong(client, lines(json.loads(relay.data_to_send()), **changes)) == reason
    assert client.data_to_send() == b""


def test_a_client_signs_nothing_but_its_own_words() -> None:
    """Go signs whatever frame 2 says: here a relay that signs another nonce gets no signature."""
    client = initiator()
    evil = replace(LinkFrame.decode(client.data_to_send()), nonce=bytes.fromhex(EVIL_NONCE))
    assert wrong(client, replace(evil, sig1=RELAY.sign(evil.payload())).encode()) == "not an echo"


def test_a_relay_cannot_be_made_to_sign_as_a_client() -> None:
    """With ``sig1`` filled in, Go's relay signs what a third party takes for its ``sig2``."""
    as_client = LinkFrame(OTHER.public_key, RELAY.public_key, NONCE)
    evil = replace(as_client, sig1=OTHER.sign(as_client.payload()))
    core = responder()
    assert wrong(core, evil.encode()) == "signed too early"
    assert core.data_to_send() == b""


def test_what_a_client_has_said_once_makes_no_second_link() -> None:
    """Who has read a link need only wait: the nonce is the client's, and nothing else in its objects is the relay's."""
    said = frames(initiator(), LinkResponder(RELAY, now=0.0))
    again = LinkResponder(RELAY, now=60.0)
    assert again.receive_data(said[0], 60.0) == []
    assert LinkFrame.decode(again.data_to_send()).sig1 != LinkFrame.decode(said[1]).sig1
    assert wrong(again, said[2]) == "not an echo"


@pytest.mark.parametrize("frame", [3, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": EVIL_NONCE},
        {"initiator": str(OTHER.public_key)},
        {"responder": str(OTHER.public_key)},
        {"sig1": ...},
        {"sig1": "22" * 65},
    ],
    ids=str,
)
def test_frames_3_and_4_have_to_be_echoes(changes: Members, frame: int) -> None:
    said = frames(initiator(), responder())
    client, relay = initiator(), responder()
    relay.receive_data(client.data_to_send(), 0.0)
    client.receive_data(said[1], 0.0)
    core = relay if frame == 3 else client
    assert wrong(core, lines(json.loads(said[frame - 1]), **changes)) == "not an echo"


def test_frame_4_without_the_clients_signature_is_no_echo() -> None:
    client, relay = initiator(), responder()
    last = frames(client, relay)[-1]
    assert wrong(client, lines(json.loads(last), sig2=...)) == "not an echo"


@pytest.mark.parametrize("only", ['{"accepted":true}\n', "{}\n"])
def test_a_frame_4_that_says_nothing_else_is_refused(only: str) -> None:
    client, relay = initiator(), responder()
    frames(client, relay)
    assert wrong(client, only.encode()) == "unknown version"


@pytest.mark.parametrize("sig2", [..., "00" * 65, OTHER.sign(b"other").hex()], ids=str)
def test_a_relay_takes_no_signature_but_the_clients(sig2: object) -> None:
    client, relay = initiator(), responder()
    third = frames(client, relay)[2]
    core = responder()
    core.receive_data(initiator().data_to_send(), 0.0)
    assert wrong(core, lines(json.loads(third), sig2=sig2)) == "sig2 does not verify"


@pytest.mark.parametrize("bad", ["high s", "recovery id + 2", "recovery id + 4"])
@pytest.mark.parametrize("number", [1, 2])
def test_signatures_that_end_gos_process_are_refused(number: int, bad: str) -> None:
    said = frames(initiator(), responder())
    members = json.loads(said[number])
    good = bytes.fromhex(members[f"sig{number}"])
    more = {"high s": 0, "recovery id + 2": 2, "recovery id + 4": 4}[bad]
    evil = (good[:64] + bytes((good[64] + more,))).hex() if more else high_s(good)
    core: LinkInitiator | LinkResponder
    if number == 1:
        core = initiator()
        core.data_to_send()
    else:
        core = responder()
        core.receive_data(said[0], 0.0)
    assert wrong(core, lines(members, **{f"sig{number}": evil})) == f"sig{number} does not verify"


@pytest.mark.parametrize("text", [b"[]", b'"0.1"', b"{", b"\xff", b'{"version":"0.1"} x'])
def test_a_frame_is_one_object(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        LinkFrame.decode(text)
    assert caught.value.reason == "not JSON"


def test_a_member_given_twice_is_refused() -> None:
    first = initiator().data_to_send()
    assert wrong(responder(), first.replace(b"}", b',"version":"0.1"}')) == "not JSON"


# --- size ------------------------------------------------------------------------------------------------------------


def test_an_object_is_bounded_while_it_arrives() -> None:
    start = b'{"x":"'
    core = responder()
    assert core.receive_data(start + b"a" * (HANDSHAKE_OBJECT_LIMIT_BYTES - len(start)), 0.0) == []
    assert wrong(core, b"a") == "message over the limit"


@pytest.mark.parametrize("filler", [b" ", b"{", b'{"', b'{"\\', b'{"a":['])
def test_no_filler_is_kept_without_end(filler: bytes) -> None:
    data = filler + filler[-1:] * HANDSHAKE_OBJECT_LIMIT_BYTES
    assert wrong(responder(), data) == "message over the limit"
    core = responder()
    with pytest.raises(RemoteProtocolError):
        for at in range(len(data)):
            core.receive_data(data[at : at + 1], 0.0)


@pytest.mark.parametrize("text", [b"hello\n", b"null\n", b"[]\n", b'"x"\n', b"7\n", b"\xff", b"\0\x54\0", b"}\n"])
def test_what_is_no_object_is_refused_at_its_first_byte(text: bytes) -> None:
    assert wrong(responder(), text[:1]) == "not JSON"


texts = st.text('ab{}\\"é\n', max_size=4)
objects = st.dictionaries(texts, texts | st.dictionaries(texts, texts, max_size=2), max_size=3)


@given(st.lists(st.tuples(objects, st.sampled_from([b"", b"\n", b" \t\r\n"])), max_size=4), st.data())
def test_objects_are_cut_where_they_end(written: list[tuple[Members, bytes]], data: st.DataObject) -> None:
    stream = b"".join(space + json.dumps(one, ensure_ascii=False).encode() for one, space in written)
    reader = ObjectReader()
    found = []
    for piece in data.draw(cuts(stream)):
        reader.buffer += piece
        while (text := reader.take_object()) is not None:
            found.append(json.loads(text))
    assert found == [one for one, _ in written] and not reader.buffer


# --- any bytes, any order ------------------------------------------------------------------------------------------------


def feed(core: LinkInitiator | LinkResponder, pieces: Iterable[bytes]) -> tuple[list[object], str]:
    events: list[object] = []
    try:
        for piece in pieces:
            events += core.receive_data(piece, 0.0)
    except RemoteProtocolError as error:
        return events, error.reason
    return events, ""


@settings(deadline=None)
@given(st.booleans(), st.data())
def test_any_bytes_are_a_handshake_or_a_remote_error(relay: bool, data: st.DataObject) -> None:
    said = frames(initiator(), responder())
    stream = bytearray(said[0] + said[2] if relay else said[1] + said[3])
    for _ in range(data.draw(st.integers(0, 3))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    stream += data.draw(st.binary(max_size=20))
    cores = [responder() if relay else initiator() for _ in range(2)]
    events, reason = feed(cores[0], [bytes(stream)])
    pieces = data.draw(cuts(bytes(stream)))
    in_pieces, also = feed(cores[1], pieces)
    assert reason == also
    if relay:
        assert events == in_pieces
    elif events:  # what follows the handshake is not the link's
        assert in_pieces and isinstance(events[0], LinkDone) and isinstance(in_pieces[0], LinkDone)
        assert events[0].remote == in_pieces[0].remote == RELAY.public_key
