"""Relays and twins that do not do what they should: nothing is taken that is not proved, and nothing is done twice."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred

from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import CallRefused, CallTimeout
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import PeerCode
from dmsg.rmb.core.limits import MAX_AHEAD_S
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.wire import Envelope

from .conftest import EPOCH_S, FakeRelay, key_of

CALLER, SERVICE, STRANGER = 1, 2, 3
Forge = Callable[..., bytes]


class Scene:
    """A relay, a client that serves ``echo``, a caller, and a twin that is not one of ours."""

    def __init__(self, world: Any, **options: Any) -> None:
        self.world = world
        self.relay: FakeRelay = world.relay()
        world.registry.add(STRANGER)
        self.service = world.client(SERVICE, self.relay, **options)
        self.handled: list[bytes] = []

        @self.service.service("echo")
        async def echo(request: Request) -> bytes:
            self.handled.append(request.data)
            return request.data

        self.caller = world.client(CALLER, self.relay)

    def call(self, data: bytes = b"x", timeout: float = 5) -> Any:
        return ensureDeferred(self.caller.call(SERVICE, "echo", data, timeout=timeout))

    def inject(self, message: bytes, to: int = SERVICE) -> list[Envelope]:
        """Have the relay deliver ``message``; gives what comes back."""
        before = len(self.relay.seen)
        self.relay.deliver(message, SessionAddress(to))
        self.world.settle()
        return self.relay.seen[before:]

    def codes(self, message: bytes) -> list[int]:
        """The codes of the errors with which the service answers ``message``."""
        return [one.error.code for one in self.inject(message)]


@pytest.fixture
def scene(world: Any) -> Scene:
    return Scene(world)


def sealed(source: int, data: bytes = b"x") -> bytes:
    """``data`` encrypted by a twin for the service."""
    theirs = EncryptionKey(key_of(SERVICE).secret).public_key
    return EncryptionKey(key_of(source).secret).encrypt(theirs, data, bytes(12))


def padding(size: int) -> bytes:
    """Fields that no program knows, which no signature covers."""
    return (b"\xa2\x06\x64" + bytes(100)) * (size // 103)


# --- a hostile relay -----------------------------------------------------------------------------------------------------


def test_a_relay_that_repeats_everything_causes_nothing_twice(scene: Scene) -> None:
    scene.relay.mangle = lambda message, envelope: [message] * 3
    calls = [scene.call(b"%d" % one) for one in range(50)]
    scene.world.settle()
    assert [call.result.data for call in calls] == [b"%d" % one for one in range(50)]
    assert sorted(scene.handled) == sorted(b"%d" % one for one in range(50))


def test_a_relay_that_reorders_changes_no_answer(scene: Scene) -> None:
    kept: list[bytes] = []

    def shuffle(message: bytes, envelope: Envelope) -> list[bytes]:
        kept.append(message)
        if len(kept) < 20:
            return []
        held, kept[:] = list(kept), []
        Random(7).shuffle(held)
        return held

    scene.relay.mangle = shuffle
    calls = [scene.call(b"%d" % one) for one in range(20)]
    scene.world.settle()
    assert [call.result.data for call in calls] == [b"%d" % one for one in range(20)]


@pytest.mark.parametrize("kind", ["request", "response"])
def test_a_relay_that_alters_any_part_of_an_envelope_is_found_out(scene: Scene, kind: str) -> None:
    changes: list[Callable[[Envelope], object]] = [
        lambda one: setattr(one, "uid", one.uid[:-1] + "~"),
        lambda one: setattr(one, "timestamp", one.timestamp + 1),
        lambda one: setattr(one, "expiration", one.expiration + 100),
        lambda one: setattr(one, "schema", "text/html"),
        lambda one: setattr(one, "tags", "fail-fast"),
        lambda one: setattr(one, "cipher", one.cipher[:-1] + bytes([one.cipher[-1] ^ 1])),
        lambda one: setattr(one, "plain", b"x"),
        lambda one: setattr(one.source, "twin", STRANGER),
        lambda one: one.ClearField("signature"),
        lambda one: setattr(one, "signature", one.signature[:-1] + bytes([one.signature[-1] ^ 1])),
        lambda one: setattr(one, "signature", b"s" + one.signature[1:]),
    ]
    for change in changes:

        def alter(message: bytes, envelope: Envelope, change: Any = change) -> list[bytes]:
            if envelope.HasField(kind):  # type: ignore[arg-type]
                change(envelope)
            return [envelope.SerializeToString()]

        scene.relay.mangle = alter
        call = scene.call(timeout=2)
        scene.world.settle(3)
        with pytest.raises((CallTimeout, CallRefused)):
            scene.world.result(call)
    assert len(scene.handled) == (0 if kind == "request" else len(changes))


def test_a_timeout_tells_of_answers_that_were_not_accepted(scene: Scene) -> None:
    def alter(message: bytes, envelope: Envelope) -> list[bytes]:
        if envelope.HasField("response"):
            envelope.schema = "text/html"
        return [envelope.SerializeToString()]

    scene.relay.mangle = alter
    with pytest.raises(CallTimeout, match="bad signature") as late:
        scene.world.result(scene.call(timeout=2), 3)
    assert late.value.refused == ("bad signature",)


def test_a_call_survives_forged_answers_that_come_before_the_true_one(scene: Scene, forge: Forge) -> None:
    def precede(message: bytes, envelope: Envelope) -> list[bytes]:
        if not envelope.HasField("response"):
            return [message]
        caller = SessionAddress(CALLER)
        kinds = ("response", "error", "pong", "ping", "request")
        forged = [
            forge(source, caller, uid=envelope.uid, kind=kind, plain=b"bad", signer=signer)
            for kind in kinds
            for source in (SERVICE, STRANGER, CALLER, 77)
            for signer in (None, STRANGER)
        ]
        unsigned = [forge(0, caller, uid=envelope.uid, kind=kind, plain=b"bad") for kind in kinds if kind != "error"]
        return [*forged, *unsigned, b"", b"\xff", bytes(1000), message]

    scene.relay.mangle = precede
    assert scene.world.result(scene.call(b"true")).data == b"true"


def test_an_unsigned_error_for_a_call_of_which_the_relay_knows_nothing_changes_nothing(scene: Scene) -> None:
    scene.relay.mangle = lambda message, envelope: []
    call = scene.call()
    scene.world.settle()
    scene.relay.tell(SessionAddress(CALLER), "another", "destination offline")
    scene.world.settle()
    assert not call.called
    with pytest.raises(CallTimeout):
        scene.world.result(call, 5)


def test_an_answer_comes_too_late_or_twice_and_is_dropped(scene: Scene) -> None:
    late: list[bytes] = []

    def hold(message: bytes, envelope: Envelope) -> list[bytes]:
        if envelope.HasField("response"):
            late.append(message)
            return []
        return [message]

    scene.relay.mangle = hold
    call = scene.call(timeout=2)
    with pytest.raises(CallTimeout):
        scene.world.result(call, 3)
    assert scene.inject(late[0], CALLER) == []
    assert scene.inject(late[0], CALLER) == []


def test_a_message_that_is_no_envelope_does_not_end_the_connection(scene: Scene) -> None:
    for junk in (b"", b"\x00", b"\xff" * 100, b"\x0a\x02\xff\xfe"):
        assert scene.inject(junk) == []
    assert scene.world.result(scene.call()).data == b"x"
    assert len(scene.relay.tokens) == 2


# --- a hostile peer ------------------------------------------------------------------------------------------------------


def test_an_unsigned_request_of_twin_0_is_not_served(scene: Scene, forge: Forge) -> None:
    assert scene.codes(forge(0, SessionAddress(SERVICE), plain=b"boo")) == []
    assert scene.handled == []


def test_a_request_with_the_signature_of_another_twin_is_refused(scene: Scene, forge: Forge) -> None:
    message = forge(CALLER, SessionAddress(SERVICE), cipher=sealed(CALLER), plain=None, signer=STRANGER)
    assert scene.codes(message) == [PeerCode.BAD_SIGNATURE]
    assert scene.handled == []


def test_a_request_of_an_unknown_twin_is_refused(scene: Scene, forge: Forge) -> None:
    assert scene.codes(forge(77, SessionAddress(SERVICE), signer=77)) == [PeerCode.UNKNOWN_TWIN]


def test_a_request_for_another_session_is_dropped(scene: Scene, forge: Forge) -> None:
    for other in (SessionAddress(STRANGER), SessionAddress(SERVICE, ""), SessionAddress(SERVICE, "a")):
        assert scene.codes(forge(STRANGER, other, cipher=sealed(STRANGER), plain=None, signer=STRANGER)) == []
    assert scene.handled == []


def test_a_request_that_is_over_or_from_the_future_is_refused(scene: Scene, forge: Forge) -> None:
    for stamp, lifetime in ((EPOCH_S - 100, 60), (EPOCH_S + MAX_AHEAD_S + 100, 60), (0, 0), (2**64 - 1, 2**64 - 1)):
        message = forge(
            STRANGER,
            SessionAddress(SERVICE),
            cipher=sealed(STRANGER),
            plain=None,
            signer=STRANGER,
            timestamp=stamp,
            expiration=lifetime,
        )
        assert scene.codes(message) == [PeerCode.INVALID]
    assert scene.handled == []


def test_plain_text_of_a_twin_with_a_key_is_refused(scene: Scene, forge: Forge) -> None:
    message = forge(STRANGER, SessionAddress(SERVICE), plain=b"boo", signer=STRANGER)
    assert scene.codes(message) == [PeerCode.PLAIN_REFUSED]
    assert scene.handled == []


def test_plain_text_is_taken_if_that_is_allowed(world: Any, forge: Forge) -> None:
    scene = Scene(world, allow_plain=True)
    [answer] = scene.inject(forge(STRANGER, SessionAddress(SERVICE), plain=b"boo", signer=STRANGER))
    assert answer.HasField("response")
    assert scene.handled == [b"boo"]


def test_a_cipher_for_someone_else_is_refused(scene: Scene, forge: Forge) -> None:
    other = EncryptionKey(key_of(STRANGER).secret).encrypt(
        EncryptionKey(key_of(CALLER).secret).public_key, b"x", bytes(12)
    )
    message = forge(STRANGER, SessionAddress(SERVICE), cipher=other, plain=None, signer=STRANGER)
    assert scene.codes(message) == [PeerCode.ENCRYPTION]


def test_an_answer_of_another_twin_does_not_answer_a_call(scene: Scene) -> None:
    """The stranger knows the uid, signs with its own key, encrypts for the caller."""
    caller_pk = EncryptionKey(key_of(CALLER).secret).public_key

    def answer_first(message: bytes, envelope: Envelope) -> list[bytes]:
        if not envelope.HasField("response"):
            return [message]
        own = Envelope(uid=envelope.uid, timestamp=envelope.timestamp, expiration=60)
        SessionAddress(STRANGER).write_to(own.source)
        SessionAddress(CALLER).write_to(own.destination)
        own.response.SetInParent()
        own.cipher = EncryptionKey(key_of(STRANGER).secret).encrypt(caller_pk, b"wrong", bytes(12))
        sign_envelope(own, key_of(STRANGER))
        return [own.SerializeToString(), message]

    scene.relay.mangle = answer_first
    assert scene.world.result(scene.call(b"right")).data == b"right"


def test_a_request_that_comes_again_is_answered_with_the_same_bytes_a_few_times_at_most(scene: Scene) -> None:
    captured: list[bytes] = []

    def capture(message: bytes, envelope: Envelope) -> list[bytes]:
        captured.append(message)
        return [message]

    scene.relay.mangle = capture
    scene.world.result(scene.call())
    request, answer = captured
    for _ in range(20):
        scene.relay.deliver(request, SessionAddress(SERVICE))
        scene.world.settle(0.1)
    assert captured[2:] == [answer] * 4
    assert scene.handled == [b"x"]


def test_a_forged_request_with_a_known_uid_does_not_change_the_answer_kept_for_it(scene: Scene, forge: Forge) -> None:
    scene.world.result(scene.call())
    request = scene.relay.seen[0]
    forged = forge(CALLER, SessionAddress(SERVICE), uid=request.uid, signer=STRANGER)
    assert [scene.inject(forged) for _ in range(10)] == [[]] * 10
    [again] = scene.inject(request.SerializeToString())
    assert again.HasField("response")


def test_errors_to_requests_that_are_refused_are_limited(scene: Scene, forge: Forge) -> None:
    before = len(scene.relay.seen)
    for number in range(1000):
        scene.relay.deliver(forge(77, SessionAddress(SERVICE), uid=str(number)), SessionAddress(SERVICE))
    scene.world.network.advance(0.1)
    assert len(scene.relay.seen) - before <= 250


def test_a_registry_that_hangs_does_not_let_a_stranger_fill_the_memory(world: Any, forge: Forge) -> None:
    scene = Scene(world, config=RmbConfig(lookups=10))
    world.registry.silent = True
    asked = len(world.registry.asked)
    for number in range(100):
        scene.relay.deliver(
            forge(STRANGER, SessionAddress(SERVICE), uid=str(number), signer=STRANGER) + bytes(0),
            SessionAddress(SERVICE),
        )
        world.network.advance(0.05)
    assert len(world.registry.asked) - asked <= 12
    scene.relay.drop_connections()
    world.settle(3)
    for number in range(100, 200):
        message = forge(STRANGER, SessionAddress(SERVICE), uid=str(number), signer=STRANGER)
        scene.relay.deliver(message, SessionAddress(SERVICE))
        world.network.advance(0.05)
    assert len(world.registry.asked) - asked <= 24


def test_long_messages_whose_sender_is_looked_up_are_bounded_in_bytes(world: Any, forge: Forge) -> None:
    scene = Scene(world, config=RmbConfig(lookups_bytes=100_000))
    world.registry.silent = True
    asked = len(world.registry.asked)
    for number in range(100):
        message = forge(STRANGER, SessionAddress(SERVICE), uid=str(number), signer=STRANGER) + padding(20_000)
        scene.relay.deliver(message, SessionAddress(SERVICE))
        world.network.advance(0.05)
    assert 5 <= len(world.registry.asked) - asked <= 8
    world.registry.release()
    world.settle(3)
    assert len(world.registry.asked) - asked == 100


def test_a_request_that_waits_keeps_nothing_that_its_sender_did_not_sign(scene: Scene, forge: Forge) -> None:
    requests: list[Any] = []
    scene.service.request_received = requests.append  # type: ignore[method-assign]
    cipher = sealed(STRANGER)
    message = forge(STRANGER, SessionAddress(SERVICE), uid="a", cipher=cipher, signer=STRANGER)
    scene.relay.deliver(message + padding(20_000), SessionAddress(SERVICE))
    scene.world.settle()
    [request] = requests
    assert request.envelope.uid == "a" and request.sealed and request.envelope.ByteSize() < 200


def test_a_twin_that_asks_without_end_does_not_keep_another_waiting(world: Any) -> None:
    relay = world.relay()
    service = world.client(SERVICE, relay, config=RmbConfig(handlers=4, waiting_requests=20))
    gates: list[Deferred[bytes]] = []

    @service.service("work")
    async def work(request: Request) -> bytes:
        if request.source.twin == CALLER:
            return b"quick"
        gate: Deferred[bytes] = Deferred()
        gates.append(gate)
        return await gate

    greedy, modest = world.client(STRANGER, relay), world.client(CALLER, relay)
    flood = [ensureDeferred(greedy.call(SERVICE, "work", timeout=60)) for _ in range(100)]
    world.settle()
    assert len(gates) == 2
    assert world.result(modest.call(SERVICE, "work", timeout=5)).data == b"quick"
    refused = [call for call in flood if call.called]
    assert len(refused) == 100 - 2 - 20
    for call in refused:
        with pytest.raises(CallRefused) as busy:
            world.result(call)
        assert busy.value.code == PeerCode.BUSY
    while gates:
        gates.pop(0).callback(b"slow")
        world.settle(0.1)
    assert [world.result(call).data for call in flood if call not in refused] == [b"slow"] * 22


def test_a_handler_is_cancelled_when_its_request_expires(scene: Scene) -> None:
    cancelled: list[float] = []

    @scene.service.service("sleep")
    async def sleep(request: Request) -> bytes:
        try:
            await Deferred()
        finally:
            cancelled.append(scene.world.now_s())
        return b""

    began = scene.world.now_s()
    call = ensureDeferred(scene.caller.call(SERVICE, "sleep", timeout=5))
    with pytest.raises(CallTimeout):
        scene.world.result(call, 7)
    assert len(cancelled) == 1
    assert 5 <= cancelled[0] - began <= 6.1
