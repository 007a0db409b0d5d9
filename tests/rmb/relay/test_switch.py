"""Where envelopes go: the switch by itself, without a network."""

from __future__ import annotations

import time

import pytest

from dmsg.errors import RemoteProtocolError
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import MalformedEnvelope, RelayProblem
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.session import Session
from dmsg.rmb.relay.switch import Switch
from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.serving.admission import Origin
from tests.rmb.core.conftest import DERIVED, LIVE

NOW = 1_700_000_000
_numbers = iter(range(1_000_000))


def join(switch: Switch, twin: int, connection: str | None = None, *, caught_up: bool = True) -> Session:
    session = Session(
        switch,
        SessionAddress(twin, connection),
        WebSocketConfig(),
        origin=Origin.of("192.0.2.1"),
        number=next(_numbers),
        now=0.0,
    )
    switch.join(session)
    if caught_up:
        session.caught_up()
    return session


def written(session: Session) -> list[bytes]:
    """The messages in what ``session`` writes now."""
    client = WebSocket(Role.CLIENT, WebSocketConfig(max_message_bytes=1 << 26), now=0.0, random=bytes)
    messages = []
    while data := session.data_to_send():
        messages += client.receive_data(data, 0.0)
    return messages


def request(source: SessionAddress, to: SessionAddress | None, uid: str = "u", **fields: object) -> bytes:
    envelope = Envelope(uid=uid, timestamp=NOW, expiration=60)
    envelope.request.command = "c"
    source.write_to(envelope.source)
    if to is not None:
        to.write_to(envelope.destination)
    envelope.MergeFrom(Envelope(**fields))
    return envelope.SerializeToString()


def error_of(session: Session) -> tuple[str, int, str]:
    [data] = written(session)
    envelope = Envelope.FromString(data)
    assert envelope.WhichOneof("message") == "error" and not envelope.HasField("source") and not envelope.signature
    return envelope.uid, envelope.error.code, envelope.error.message


def test_recorded_envelopes_of_the_public_programs_pass_byte_for_byte() -> None:
    recorded = [bytes.fromhex(one["hex"]) for one in LIVE["envelopes"] if "hex" in one]
    passed = 0
    for data in recorded:
        try:
            envelope = Envelope.FromString(data)
        except Exception:
            continue
        if not (envelope.source.twin and envelope.destination.twin):
            continue
        switch = Switch()
        sender = join(switch, *SessionAddress.of(envelope.source))
        receiver = join(switch, *SessionAddress.of(envelope.destination))
        assert switch.route(sender, [data], 1.0, envelope.timestamp) == []
        assert written(receiver) == [data]
        passed += 1
    assert passed >= 10


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("relay: unknown twin", RelayProblem.UNKNOWN_TWIN),
        ("relay: no destination", RelayProblem.NO_DESTINATION),
        ("relay: offline, fail-fast", RelayProblem.OFFLINE),
    ],
)
def test_errors_are_those_recorded_from_the_public_relay_but_for_the_code(name: str, problem: RelayProblem) -> None:
    [recorded] = [one for one in LIVE["envelopes"] if one["name"] == name]
    asked, answered = Envelope.FromString(bytes.fromhex(recorded["request_hex"])), bytes.fromhex(recorded["hex"])
    switch = Switch()
    session = join(switch, asked.source.twin)
    switch.refuse(asked, problem, session, Envelope.FromString(answered).timestamp)
    [ours] = written(session)
    envelope = Envelope.FromString(ours)
    assert envelope.error.code == problem.code
    envelope.error.ClearField("code")
    assert envelope == Envelope.FromString(answered)


@pytest.mark.parametrize(
    ("ping", "pong"),
    [
        next((one["request_hex"], one["hex"]) for one in LIVE["envelopes"] if one["name"] == "relay: pong"),
        (DERIVED["relay/ping-pong"]["ping_pb_hex"], DERIVED["relay/ping-pong"]["pong_pb_hex"]),
    ],
    ids=["recorded", "derived"],
)
def test_a_ping_is_answered_as_by_the_public_relay_and_never_meets_the_store(ping: str, pong: str) -> None:
    switch = Switch()
    data = bytes.fromhex(ping)
    session = join(switch, *SessionAddress.of(Envelope.FromString(data).source), caught_up=False)
    assert switch.route(session, [data], 1.0, NOW) == []
    [answer] = written(session)
    assert Envelope.FromString(answer) == Envelope.FromString(bytes.fromhex(pong))
    assert switch.counts.stored == 0 and not session.behind


def test_the_payload_of_a_ping_that_is_encrypted_is_replaced() -> None:
    switch = Switch()
    session = join(switch, 7)
    ping = Envelope(uid="p", cipher=b"secret")
    ping.source.twin = 7
    ping.ping.SetInParent()
    switch.route(session, [ping.SerializeToString()], 1.0, NOW)
    [answer] = written(session)
    assert Envelope.FromString(answer).plain == b"hello world" and not Envelope.FromString(answer).cipher


@pytest.mark.parametrize(
    "claimed",
    [SessionAddress(8), SessionAddress(7, ""), SessionAddress(7), SessionAddress(7, "other"), SessionAddress(0)],
)
def test_an_envelope_of_another_source_goes_nowhere(claimed: SessionAddress) -> None:
    switch = Switch()
    session, target = join(switch, 7, "mine"), join(switch, 9)
    assert switch.route(session, [request(claimed, SessionAddress(9))], 1.0, NOW) == []
    assert error_of(session) == ("u", 121, "message wrong source")
    assert written(target) == []


def test_absent_and_empty_names_are_two_sessions() -> None:
    switch = Switch()
    sender, absent, empty = join(switch, 1), join(switch, 7), join(switch, 7, "")
    one, two = request(sender.address, SessionAddress(7)), request(sender.address, SessionAddress(7, ""))
    switch.route(sender, [one, two], 1.0, NOW)
    assert written(absent) == [one] and written(empty) == [two]


def test_an_envelope_whose_time_is_over_goes_nowhere() -> None:
    switch = Switch()
    sender, target = join(switch, 1), join(switch, 7)
    data = request(sender.address, target.address)
    switch.route(sender, [data], 1.0, NOW + 59)
    assert written(target) == [data]
    switch.route(sender, [data], 2.0, NOW + 60)
    assert written(target) == [] and error_of(sender) == ("u", 126, "message has expired")
    assert switch.counts.expired == 1


@pytest.mark.parametrize(("late_s", "expiration"), [(1_801, 1_000_000), (-301, 60)])
def test_no_envelope_is_good_for_longer_than_any_nor_from_the_future(late_s: int, expiration: int) -> None:
    switch = Switch()
    sender, target = join(switch, 1), join(switch, 2)
    data = request(sender.address, target.address, timestamp=NOW - late_s, expiration=expiration)
    assert switch.route(sender, [data], 1.0, NOW) == []
    assert written(target) == [] and error_of(sender) == ("u", 126, "message has expired")


def test_a_name_that_no_session_can_have_is_no_destination() -> None:
    switch = Switch()
    sender = join(switch, 1)
    assert switch.route(sender, [request(sender.address, SessionAddress(7, "x" * 129))], 1.0, NOW) == []
    assert error_of(sender)[1] == 122
    assert len(switch.route(sender, [request(sender.address, SessionAddress(7, "x" * 128))], 1.0, NOW)) == 1


def test_expiry_does_not_overflow() -> None:
    switch = Switch()
    sender, target = join(switch, 1), join(switch, 7)
    data = request(sender.address, target.address, timestamp=2**64 - 1, expiration=2**64 - 1)
    switch.route(sender, [data], 1.0, NOW)
    assert written(target) == [] and error_of(sender)[1] == 126


def test_of_what_is_no_request_the_sender_hears_nothing() -> None:
    switch = Switch()
    sender = join(switch, 1)
    envelope = Envelope(uid="u", timestamp=NOW, expiration=60)
    sender.address.write_to(envelope.source)
    envelope.response.SetInParent()
    switch.route(sender, [envelope.SerializeToString()], 1.0, NOW)
    assert written(sender) == [] and switch.problems == [(1, RelayProblem.NO_DESTINATION)]


def test_each_problem_has_a_code_of_its_own() -> None:
    codes = [problem.code for problem in RelayProblem]
    assert len(set(codes)) == len(codes) and 0 not in codes


def test_what_is_malformed_ends_the_session_and_what_came_before_is_routed() -> None:
    switch = Switch()
    sender, target = join(switch, 1), join(switch, 7)
    good, elsewhere = request(sender.address, target.address), request(sender.address, SessionAddress(9))
    with pytest.raises(MalformedEnvelope) as caught:
        switch.route(sender, [good, elsewhere, b"\xff" * 8, good], 1.0, NOW)
    assert [parcel.data for parcel in caught.value.events] == [elsewhere]  # type: ignore[attr-defined]
    assert written(target) == [good]


@pytest.mark.parametrize("data", [b"\x0a\x02\xff\xfe", b"\x2a\x04\x12\x02\xc3\x28", b"\x0a", b"\x80" * 20])
def test_texts_that_are_not_utf_8_and_cut_envelopes_are_malformed(data: bytes) -> None:
    switch = Switch()
    with pytest.raises(MalformedEnvelope):
        switch.route(join(switch, 1), [data], 1.0, NOW)


def test_one_read_for_one_session_is_one_write() -> None:
    switch = Switch()
    sender, target = join(switch, 1), join(switch, 7)
    written(target)
    switch.dirty.clear()
    switch.route(sender, [request(sender.address, target.address, str(at)) for at in range(200)], 1.0, NOW)
    assert switch.dirty == [target]
    assert target.data_to_send() and target.data_to_send() == b""


def test_the_limit_of_a_twin_holds_for_all_its_sessions_and_outlives_them() -> None:
    switch = Switch(limit=Limit(3, 10_000))
    one, two, other = join(switch, 1), join(switch, 1, "two"), join(switch, 2)
    target = join(switch, 7)

    def sends(session: Session, at: float = NOW) -> bool:
        switch.route(session, [request(session.address, target.address, timestamp=int(at))], 1.0, at)
        answers = written(session)
        assert not answers or Envelope.FromString(answers[0]).error.code == 120
        return not answers

    assert [sends(one), sends(two), sends(one), sends(two), sends(one)] == [True, True, True, False, False]
    assert sends(other)
    switch.leave(one)
    switch.leave(two)
    assert not sends(join(switch, 1))
    assert sends(two, NOW + 60)


def test_many_twins_do_not_wash_out_the_count_of_one_that_is_connected() -> None:
    switch = Switch(RelayLimits(limited_twins=4), limit=Limit(1, 10_000))
    one, target = join(switch, 1), join(switch, 7)
    switch.route(one, [request(one.address, target.address)], 1.0, NOW)
    for twin in range(100, 120):
        switch.leave(join(switch, twin))
    switch.route(one, [request(one.address, target.address)], 1.0, NOW)
    assert [Envelope.FromString(data).error.code for data in written(one)] == [120]


def test_a_login_costs_no_more_where_many_twins_with_a_limit_are_connected() -> None:
    switch = Switch(RelayLimits(limited_twins=20_000), limit=Limit(1, 10_000))
    for twin in range(1, 20_001):
        join(switch, twin)
    cpu = time.process_time()
    for twin in range(30_000, 30_500):
        switch.leave(join(switch, twin))
    assert time.process_time() - cpu < 0.15
    assert len(switch.sessions) == 20_000


def test_leaving_removes_only_oneself() -> None:
    switch = Switch()
    older = join(switch, 7)
    newer = Session(switch, older.address, WebSocketConfig(), origin=older.origin, number=99, now=0.0)
    assert switch.join(newer) is older
    assert not switch.leave(older) and switch.sessions[older.address] is newer
    assert switch.leave(newer) and not switch.sessions


def test_a_queue_that_is_full_gives_parcels() -> None:
    switch = Switch(RelayLimits(queue_bytes=1_000))
    sender, target = join(switch, 1), join(switch, 7)
    data = request(sender.address, target.address, plain=bytes(600))
    assert [parcel.data for parcel in switch.route(sender, [data, data], 1.0, NOW)] == [data]
    assert switch.waiting_bytes == target.waiting_bytes == len(data)
    assert written(target) == [data] and switch.waiting_bytes == target.waiting_bytes == 0


@pytest.mark.parametrize(
    "padding", [b"\x8a\x01\x00" * 10_000, b"\x3a\x00\x62\x00" * 10_000, b"\xa2\x06\x90\x4e" + bytes(10_000)]
)
def test_an_envelope_that_waits_keeps_nothing_of_what_is_not_needed_but_its_bytes(padding: bytes) -> None:
    """Empty relays, messages of which the last one counts, and fields that are not known take up to 38 bytes each."""
    switch = Switch()
    sender = join(switch, 1)
    data = padding + request(sender.address, SessionAddress(7), "long", tags="a")
    [parcel] = switch.route(sender, [data], 1.0, NOW)
    assert parcel.data == data and parcel.envelope.ByteSize() < 100
    assert (parcel.envelope.uid, parcel.envelope.tags, parcel.envelope.source) == ("long", "a", sender.source)
    assert parcel.envelope.HasField("request")


@pytest.mark.parametrize("pinged", [False, True])
def test_what_was_not_written_goes_to_the_store_and_counts_until_then(pinged: bool) -> None:
    switch = Switch()
    session = join(switch, 1)
    client = WebSocket(Role.CLIENT, WebSocketConfig(), now=0.0, random=bytes)
    envelopes = [b"a" * 1_000, b"b" * 1_048_576, b"c" * 1_000]
    for one in envelopes:
        assert session.put(one)
    if pinged:
        client.ping(b"there?")
        session.receive_data(client.data_to_send(), 0.0)
    got = client.receive_data(session.data_to_send(), 0.0)
    session.pause()
    unwritten = [] if pinged else envelopes[:1]
    assert got == unwritten
    assert session.waiting_bytes == sum(map(len, envelopes)) - sum(map(len, unwritten)) <= switch.waiting_bytes
    assert session.take_unwritten() == envelopes[len(unwritten) :]
    session.resume()
    assert switch.waiting_bytes == 0


@pytest.mark.parametrize(("size", "given_up_at"), [(1_000, 60), (1_000_000, 160)])
def test_a_session_whose_network_is_slow_has_the_time_of_a_slow_message_for_a_long_envelope(
    size: int, given_up_at: int
) -> None:
    switch = Switch()
    session = join(switch, 1)
    assert session.put(bytes(size))
    session.data_to_send()
    session.pause()
    session.progressed(given_up_at - 2.0)  # it is not silent
    session.handle_timeout(given_up_at - 1)
    with pytest.raises(RemoteProtocolError) as caught:
        session.handle_timeout(given_up_at + 20)
    assert caught.value.reason == "slow_consumer"
