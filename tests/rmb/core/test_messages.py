"""The JSON of local programs."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import EnvelopeExpired, InvalidMessage
from dmsg.rmb.core.limits import MAX_DESTINATIONS, MAX_ERROR_TEXT_BYTES, MAX_JSON_BYTES, READ_JSON_BYTES
from dmsg.rmb.core.messages import (
    ANSWER_TOO_LARGE,
    IncomingRequest,
    IncomingResponse,
    JsonError,
    OutgoingRequest,
    OutgoingResponse,
)
from dmsg.rmb.core.wire import Envelope, parse_envelope

from .conftest import DERIVED, LIVE

KINDS = (OutgoingRequest, IncomingRequest, OutgoingResponse, IncomingResponse)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
OPTIONAL = st.none() | TEXTS
NUMBERS = st.integers(0, 2**64 - 1)
TWINS = st.integers(1, 2**32 - 1)
PAYLOADS = st.binary(max_size=50)
ADDRESSES = st.builds(SessionAddress, TWINS, OPTIONAL)
ERRORS = st.none() | st.builds(JsonError, st.integers(0, 2**32 - 1), TEXTS)
COMMANDS = TEXTS.filter(bool)
MESSAGES = st.one_of(
    st.builds(
        OutgoingRequest,
        command=COMMANDS,
        destinations=st.lists(TWINS, min_size=1, max_size=5, unique=True).map(tuple),
        reply_to=COMMANDS,
        expiration=NUMBERS,
        timestamp=NUMBERS,
        payload=PAYLOADS,
        reference=OPTIONAL,
        tags=OPTIONAL,
        schema=OPTIONAL,
    ),
    st.builds(
        IncomingRequest,
        uid=TEXTS,
        source=ADDRESSES,
        command=TEXTS,
        expiration=NUMBERS,
        timestamp=NUMBERS,
        payload=PAYLOADS,
        tags=OPTIONAL,
        schema=OPTIONAL,
    ),
    st.builds(OutgoingResponse, uid=TEXTS, destination=ADDRESSES, timestamp=NUMBERS, payload=PAYLOADS, schema=OPTIONAL),
    st.builds(OutgoingResponse, uid=TEXTS, destination=ADDRESSES, timestamp=NUMBERS, error=ERRORS),
    st.builds(
        IncomingResponse,
        reference=OPTIONAL,
        source=TEXTS,
        timestamp=NUMBERS,
        payload=PAYLOADS,
        schema=OPTIONAL,
        error=ERRORS,
    ),
)
REQUEST = {"ver": 1, "cmd": "c", "exp": 60, "dat": "", "dst": [10], "ret": "list", "now": 5}
RESPONSE = {"ver": 1, "dat": "", "dst": "7", "now": 5}


def text_of(members, **changed):
    merged = {name: value for name, value in {**members, **changed}.items() if value is not ...}
    return json.dumps(merged).encode()


@given(MESSAGES)
def test_messages_are_read_as_they_were_written(message):
    assert type(message).from_json(message.to_json()) == message


@given(st.sampled_from(KINDS), st.binary(max_size=40) | st.from_regex(r"\{.{0,30}\}").map(str.encode))
def test_any_bytes_are_a_message_or_refused(kind, data):
    with pytest.raises(InvalidMessage):
        kind.from_json(data)


def test_a_service_can_read_every_request_that_a_twin_may_send():
    envelope = Envelope(uid="1", expiration=2**64 - 1, timestamp=7)
    envelope.source.twin = 2**32 - 1
    envelope.request.command = "c"
    request = IncomingRequest.of(envelope, b"")
    assert IncomingRequest.from_json(request.to_json()) == request


def test_a_derived_outgoing_request():
    one = DERIVED["peer/outgoing-request"]
    request = OutgoingRequest.from_json(json.dumps(one["json"]).encode())
    assert json.loads(request.to_json()) == one["json"]
    assert list(json.loads(request.to_json())) == ["ver", "ref", "cmd", "exp", "dat", "tag", "dst", "ret", "shm", "now"]
    now = one["json"]["now"]
    assert request.backlog(one["uid"], now).SerializeToString().hex() == one["backlog_pb_hex"]
    assert request.backlog(one["uid"], now).ttl == one["backlog_ttl"]
    envelopes = request.envelopes(one["uid"], now)
    assert [envelope.SerializeToString().hex() for envelope in envelopes] == one["envelopes_pb_hex"]


def test_a_derived_incoming_request():
    one = DERIVED["peer/incoming-request"]
    envelope = parse_envelope(bytes.fromhex(one["envelope_pb_hex"]))
    request = IncomingRequest.of(envelope, envelope.plain)
    assert request.to_json().decode() == one["json_text"]
    assert f"msgbus.{request.command}" == one["queue"]


def test_a_derived_error_of_a_service():
    one = DERIVED["peer/outgoing-error-response"]
    answer = OutgoingResponse.from_json(json.dumps(one["json"]).encode())
    assert answer.envelope() == parse_envelope(bytes.fromhex(one["envelope_built_pb_hex"]))
    assert json.loads(answer.to_json()) == {**one["json"], "dat": ""}
    assert OutgoingResponse.from_json(text_of(one["json"], dat="not base64")) == answer


@pytest.mark.parametrize("name", ["response", "relay-error"])
def test_derived_answers(name):
    one = DERIVED[f"peer/incoming-{name}"]
    envelope = parse_envelope(bytes.fromhex(one["envelope_pb_hex"]))
    assert IncomingResponse.of(envelope, envelope.plain, "my-ref").to_json().decode() == one["json_text"]


@pytest.mark.parametrize("one", [one for one in LIVE["envelopes"] if one.get("json_out")], ids=lambda one: one["name"])
def test_recorded_requests_for_services(one):
    expected = one["json_out"]
    envelope = Envelope(uid=expected["ref"], expiration=expected["exp"], timestamp=expected["now"])
    SessionAddress.parse(expected["src"]).write_to(envelope.source)
    envelope.request.command = expected["cmd"]
    text = IncomingRequest.of(envelope, base64.b64decode(expected["dat"])).to_json()
    assert text.decode() == json.dumps(expected, separators=(",", ":"))
    assert IncomingRequest.from_json(text).to_json() == text


@pytest.mark.parametrize("one", [one for one in LIVE["envelopes"] if one.get("json_in")], ids=lambda one: one["name"])
def test_recorded_requests_of_programs(one):
    request = OutgoingRequest.from_json(json.dumps(one["json_in"]).encode())
    recorded = parse_envelope(bytes.fromhex(one["hex"]))
    [envelope] = request.envelopes(recorded.uid, recorded.timestamp)
    assert envelope.plain.hex() == one["plain_hex"]
    assert envelope.timestamp == recorded.timestamp and envelope.expiration == recorded.expiration


def test_tags_and_schema_go_into_the_envelope():
    message = OutgoingRequest.from_json(text_of(REQUEST, tag="fail-fast", shm="text/plain"))
    [envelope] = message.envelopes("u", 5)
    assert (envelope.tags, envelope.schema) == ("fail-fast", "text/plain")


def test_padding_may_be_missing():
    for text in ("MSAyYg", "MSAyYg=="):
        assert OutgoingRequest.from_json(text_of(REQUEST, dat=text)).payload == b"1 2b"
    assert json.loads(OutgoingRequest.from_json(text_of(REQUEST, dat="MSAyYg")).to_json())["dat"] == "MSAyYg=="


@pytest.mark.parametrize("value", [{"dat": "YQ="}, {"dat": "Y"}, {"dat": "Y Q="}, {"dat": "é"}, {"dat": None}])
@pytest.mark.parametrize(("kind", "members"), [(OutgoingRequest, REQUEST), (OutgoingResponse, RESPONSE)])
def test_what_is_no_base64(kind, members, value):
    with pytest.raises(InvalidMessage, match="dat is"):
        kind.from_json(text_of(members, **value))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"ver": ...}, "ver is missing"),
        ({"ver": "1"}, "ver is not a number"),
        ({"cmd": ""}, "cmd is missing"),
        ({"cmd": 1}, "cmd is not a string"),
        ({"cmd": "c" * 256}, "cmd is longer than 255 bytes"),
        ({"cmd": "\ud800"}, "cmd is not Unicode"),
        ({"exp": -1}, "exp is not a number"),
        ({"exp": True}, "exp is not a number"),
        ({"exp": 2**64}, "exp is not a number"),
        ({"now": None}, "now is missing"),
        ({"tag": "t" * 1025}, "tag is longer"),
        ({"shm": 5}, "shm is not a string"),
        ({"dst": []}, "dst is not a list"),
        ({"dst": "10"}, "dst is not a list"),
        ({"dst": [0]}, "dst holds what is no twin"),
        ({"dst": [True]}, "dst holds what is no twin"),
        ({"dst": [2**32]}, "dst holds what is no twin"),
        ({"dst": list(range(1, MAX_DESTINATIONS + 2))}, "dst is not a list"),
    ],
)
def test_requests_that_are_refused_say_who_to_tell(changed, problem):
    with pytest.raises(InvalidMessage, match=problem) as caught:
        OutgoingRequest.from_json(text_of(REQUEST, ref="r", **changed))
    assert (caught.value.reply_to, caught.value.reference) == ("list", "r")


@pytest.mark.parametrize("changed", [{"ret": None}, {"ret": ""}, {"ret": 5}, {"ref": 5, "ret": "r" * 1025}])
def test_there_is_nobody_to_tell_without_a_list(changed):
    with pytest.raises(InvalidMessage) as caught:
        OutgoingRequest.from_json(text_of(REQUEST, **changed))
    assert caught.value.reply_to == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"dst": None},
        {"dst": "x"},
        {"err": 5},
        {"err": {"code": 1}},
        {"err": {"code": -1, "message": ""}},
        {"err": {"code": 2**32, "message": ""}},
        {"ref": "u" * 129},
        {"now": "5"},
    ],
)
def test_answers_of_services_that_are_refused(changed):
    with pytest.raises(InvalidMessage):
        OutgoingResponse.from_json(text_of(RESPONSE, **changed))


def test_a_list_is_no_message():
    with pytest.raises(InvalidMessage, match="not an object"):
        OutgoingResponse.from_json(b"[]")


def test_of_too_long_a_message_is_read_who_waits_for_the_answer():
    text = text_of(REQUEST, ref="r", dat="A" * MAX_JSON_BYTES)
    with pytest.raises(InvalidMessage, match=f"longer than {MAX_JSON_BYTES} bytes") as caught:
        OutgoingRequest.from_json(text)
    assert (caught.value.reply_to, caught.value.reference) == ("list", "r")
    answer = OutgoingResponse.from_json(text_of(RESPONSE, dat="A" * MAX_JSON_BYTES))
    assert answer.error == ANSWER_TOO_LARGE and not answer.payload
    for kind in (IncomingRequest, IncomingResponse):
        with pytest.raises(InvalidMessage, match="longer than"):
            kind.from_json(text)


def test_far_too_long_a_message_is_not_read():
    with pytest.raises(InvalidMessage, match=f"longer than {READ_JSON_BYTES}"):
        OutgoingRequest.from_json(bytes(READ_JSON_BYTES + 1))


def test_the_text_of_an_error_that_goes_to_a_program_is_bounded():
    envelope = Envelope()
    envelope.error.code, envelope.error.message = 5, "é" * 100_000
    assert IncomingResponse.of(envelope, b"", "r").error == JsonError(5, "é" * (MAX_ERROR_TEXT_BYTES // 2))


def test_each_destination_once():
    assert OutgoingRequest.from_json(text_of(REQUEST, dst=[10, 11, 10])).destinations == (10, 11)


@pytest.mark.parametrize(("exp", "now"), [(0, 5), (0, 0), (60, 1), (5, 56)])
def test_a_request_that_is_over_makes_no_envelope(exp, now):
    with pytest.raises(EnvelopeExpired):
        OutgoingRequest.from_json(text_of(REQUEST, exp=exp, now=now)).envelopes("u", 61)


def test_no_request_is_good_for_longer_than_half_an_hour():
    request = OutgoingRequest.from_json(text_of(REQUEST, exp=2**62, now=0))
    [envelope] = request.envelopes("u", 61)
    assert (envelope.timestamp, envelope.expiration) == (61, 1800) and request.backlog("u", 61).ttl == 1800
