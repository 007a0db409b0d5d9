"""Programs of twins: clients of the message bus, and raw sessions with bare envelopes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.glue.websocket import WebSocketUrl, connect_websocket
from dmsg.rmb.client.errors import CallError, Refusal
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.signing import sign_envelope
from dmsg.rmb.core.token import make_token
from dmsg.rmb.core.wire import Envelope
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.sansio.websocket_frames import Closed

from .network import Process
from .relays import Registry, Relay

if TYPE_CHECKING:
    from .world import World


def key_of(twin: int) -> TwinKey:
    return TwinKey(hashlib.sha256(b"twin %d" % twin).digest(), KeyType.ED25519)


@dataclass
class Call:
    """A call, and its record."""

    number: int
    caller: Client
    incarnation: int
    target: SessionAddress
    size: int
    timeout_s: float
    once: bool
    fail_fast: bool
    began_at: float
    how: str
    cancelled: bool = False
    was_killed: bool = False
    ended_at: float | None = None
    outcome: Any = None
    work: Any = None
    #: Handlers that got it: time, client and its incarnation.
    handled: list[tuple[float, Any, int]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"call {self.number} of {self.caller} to {self.target}: {self.how}, {self.size} bytes, began {self.began_at:.3f},"
            f" {self.timeout_s:.3f} s, once={self.once}, fail_fast={self.fail_fast}; ended {self.ended_at},"
            f" {self.outcome!r}; handled {[(round(at, 3), str(who), which) for at, who, which in self.handled]}"
        )


class Client:
    """A program with an :class:`RmbClient`, which serves one command and calls those of others."""

    def __init__(self, world: World, twin: int, session: str | None, host: str, relays: list[Relay]) -> None:
        self.world = world
        self.address = SessionAddress(twin, session)
        self.host = host
        self.relays = relays
        self.random = Random(world.random.random())
        self.incarnation = 0
        self.running = False
        self.ahead_s = 0.0

    def __str__(self) -> str:
        return f"client {self.address}"

    def start(self) -> None:
        self.incarnation += 1
        incarnation = self.incarnation
        self.process = process = Process(self.world.network, self.host, Random(self.random.random()))
        process.ahead_s = self.ahead_s
        self.registry = Registry(self.world.twins, process)
        self.client = client = RmbClient(
            process,
            key_of(self.address.twin),
            self.registry,
            [relay.url for relay in self.relays],
            session=self.address.connection,
            publish=False,
            random=process.random.randbytes,
            now_s=process.now_s,
            config=self.world.client_config,
        )

        @client.service("do")
        async def do(request: Request) -> bytes:
            return await self._handle(request, incarnation, process)

        client.startService()
        self.running = True

    async def _handle(self, request: Request, incarnation: int, process: Process) -> bytes:
        call = self.world.of(request.data)
        self.world.handled(call, self, incarnation, request.source)
        how = call.how
        if how == "slow":
            await deferLater(process, 0.5 + 5 * self.random.random())  # type: ignore[arg-type]
        elif how == "never":
            await Deferred()
        elif how == "refuse":
            raise Refusal(77, "no")
        elif how == "large":
            return request.data.partition(b"|")[0] + b"|" + bytes(100_000)
        return request.data.partition(b"|")[0] + b"|"

    def call(self, target: SessionAddress, **options: Any) -> Call:
        world = self.world
        call = Call(len(world.calls), self, self.incarnation, target, began_at=world.network.seconds(), **options)
        world.calls.append(call)
        data = b"%d|" % call.number + bytes(max(0, call.size - 8))
        call.work = work = ensureDeferred(
            self.client.call(
                target.twin,
                "do",
                data,
                timeout=call.timeout_s,
                session=target.connection,
                once=call.once,
                tags="fail-fast" if call.fail_fast else None,
            )
        )

        def over(outcome: Any) -> None:
            call.ended_at = world.network.seconds()
            if isinstance(outcome, Failure):
                if not outcome.check(CallError) and not (call.cancelled and outcome.check(CancelledError)):
                    world.fail(f"{call} failed with {outcome.getTraceback()}")
                outcome = outcome.value
            call.outcome = outcome

        work.addBoth(over)
        return call

    def kill(self, *, silently: bool = False) -> None:
        self.running = False
        for call in self.world.calls:
            if call.caller is self and call.ended_at is None:
                call.was_killed = True
        self.world.graves.append((self.process, self.client))
        self.process.kill(silently=silently)

    def stop(self) -> Deferred[None]:
        self.running = False
        process, name = self.process, f"{self} {self.incarnation}"

        def ended(outcome: Any) -> None:
            self.world.ended.append((process, name))
            if isinstance(outcome, Failure):
                self.world.fail(f"{name} could not stop: {outcome.getTraceback()}")

        return self.client.stopService().addBoth(ended)

    def levels(self) -> dict[str, float]:
        """Levels that must be 0 when nothing is in progress."""
        exchange, handlers = self.client.exchange, self.client._handlers
        return {
            "calls": len(exchange._calls._calls) + exchange._calls._bytes,
            "parcels": len(exchange.relays._waiting),
            "intake": len(exchange._intake._under_way)
            + sum(exchange._intake._counts.values())
            + sum(exchange._intake._bytes.values()),
            "answers": len(exchange._answers) + exchange._answers.held_bytes,
            "carried": sum(map(len, exchange.relays._carried.values())),
            "handlers": len(handlers._working) + len(handlers._working_for) + len(handlers._waiting),
        }


@dataclass
class Sent:
    """A bare envelope that was handed to a relay."""

    uid: str
    sender: Raw
    connection: int
    relay: str
    to: SessionAddress
    size: int
    sent_at: float
    ends_at: float
    is_request: bool
    fail_fast: bool
    #: Arrival times with the receiver's connections, and errors that the sender was told.
    arrived: list[tuple[float, int]] = field(default_factory=list)
    errors: list[tuple[float, int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"envelope {self.uid} of {self.sender} ({self.connection}) at {self.relay} to {self.to}: {self.size} bytes,"
            f" sent {self.sent_at:.3f}, ends {self.ends_at:.3f}, request={self.is_request}, fail_fast={self.fail_fast};"
            f" arrived {self.arrived}, errors {self.errors}"
        )


class Raw:
    """A session whose envelopes are all recorded. It connects once when told to, and reads when it likes."""

    def __init__(self, world: World, twin: int, session: str | None, host: str, relay: Relay) -> None:
        self.world = world
        self.address = SessionAddress(twin, session)
        self.host = host
        self.relay = relay
        self.random = Random(world.random.random())
        self.ahead_s = 0.0
        self.process = Process(world.network, host, self.random)
        self.shell: Any = None
        self.connecting: Any = None
        self.connection = 0
        #: Start time of each connection.
        self.connections: dict[int, float] = {}
        self.holding = False
        #: Periods in which it was connected and reading.
        self.periods: list[tuple[float, float]] = []
        self._reads_since: float | None = None

    def __str__(self) -> str:
        return f"raw {self.address}"

    @property
    def running(self) -> bool:
        return self.shell is not None

    def start(self) -> None:
        if self.shell is not None or self.connecting is not None:
            return
        self.connection += 1
        owner = _RawOwner(self, self.connection)
        token = make_token(key_of(self.address.twin), *self.address, int(self.process.now_s()))
        url = WebSocketUrl.parse(f"ws://{self.relay.name}/?{token}")
        connecting = self.connecting = connect_websocket(
            self.process,
            url,
            owner,
            WebSocketConfig(),
            random=self.random.randbytes,  # type: ignore[arg-type]
        )

        def over(outcome: Any) -> None:
            self.connecting = None
            if not isinstance(outcome, Failure):
                self.shell = outcome
                self.connections[self.connection] = self.world.network.seconds()
                self.world.note(f"{self} is connected to {self.relay.name} ({self.connection})")
                self.hold(self.holding)
                self.note_period()

        connecting.addBoth(over)

    def hold(self, holding: bool) -> None:
        self.holding = holding
        if self.shell is not None:
            self.shell.hold("simulation", holding)
        self.note_period()

    def note_period(self) -> None:
        """Note that it may have begun or stopped reading."""
        now = self.world.network.seconds()
        reads = self.shell is not None and not self.holding
        if self._reads_since is not None:
            self.periods.append((self._reads_since, now))
        self._reads_since = now if reads else None

    def longest_s(self, begin: float, end: float) -> float:
        """The longest time it has read without a break between ``begin`` and ``end``."""
        self.note_period()
        return max((min(end, to) - max(begin, since) for since, to in self.periods), default=0.0)

    def leave(self) -> None:
        """Close, like a program that ends cleanly."""
        if self.shell is not None:
            self.shell.close()

    def send(
        self, to: SessionAddress, size: int, life_s: int, *, request: bool = True, fail_fast: bool = False
    ) -> Sent:
        world = self.world
        now = self.process.now_s()
        sent = Sent(
            f"e{len(world.sent)}",
            self,
            self.connection,
            self.relay.name,
            to,
            size,
            world.network.seconds(),
            world.network.seconds() + life_s,
            request,
            fail_fast,
        )
        world.sent[sent.uid] = sent
        envelope = Envelope(uid=sent.uid, timestamp=int(now), expiration=life_s, plain=bytes(size))
        self.address.write_to(envelope.source)
        to.write_to(envelope.destination)
        if request:
            envelope.request.command = "x"
        else:
            envelope.response.SetInParent()
        if fail_fast:
            envelope.tags = "fail-fast"
        if world.open:
            sign_envelope(envelope, key_of(self.address.twin))
        self.shell.send(envelope.SerializeToString())
        self.shell.flush_soon()
        return sent

    def received(self, data: bytes, connection: int) -> None:
        envelope = Envelope.FromString(data)
        now = self.world.network.seconds()
        sent = self.world.sent.get(envelope.uid)
        if sent is None:
            self.world.fail(f"{self} got an envelope that was not sent: {envelope}")
        elif envelope.HasField("error") and not envelope.source.twin:
            if sent.sender.address != self.address:
                self.world.fail(f"{self} got an error for another's {sent}")
            sent.errors.append((now, envelope.error.code, envelope.error.message))
        elif sent.to != self.address:
            self.world.fail(f"{self} got {sent}")
        else:
            sent.arrived.append((now, connection))


class _RawOwner:
    """Owns the WebSocket of one connection of a raw session."""

    def __init__(self, raw: Raw, connection: int) -> None:
        self._raw = raw
        self._connection = connection

    def handle_events(self, shell: Any, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, bytes):
                self._raw.received(event, self._connection)
            elif isinstance(event, Closed):
                self._raw.world.note(f"{self._raw} is told {event.code} {event.reason}")

    def after_read(self, shell: Any) -> None:
        shell.flush()

    def flushed(self, shell: Any) -> None:
        """Nothing waits for that."""

    def connection_lost(self, shell: Any, error: object, reason: Failure) -> None:
        raw = self._raw
        if raw.shell is shell:
            raw.shell = None
            raw.note_period()
            raw.world.lossy(raw.address)
            raw.world.note(f"{raw} has lost {raw.relay.name} ({self._connection}): {error} {reason.value!r}")
