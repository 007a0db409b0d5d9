"""Any schedule of sessions that come, go, stall and replace each other: no envelope comes twice, and none is lost but those
that were in the network when a connection was cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred

from dmsg.rmb.core.address import SessionAddress

from .conftest import Client, World

RECEIVERS = (2, 3)
_SEND = st.tuples(st.just("send"), st.sampled_from(RECEIVERS), st.integers(1, 12), st.sampled_from([10, 5_000, 60_000]))
_STEPS = st.one_of(
    _SEND,
    _SEND,
    *(
        st.tuples(st.just(name), st.sampled_from(RECEIVERS))
        for name in ("connect", "leave", "stall", "stall", "resume", "vanish")
    ),
    st.tuples(st.just("turn"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 61.0])),
)


class Schedule:
    """Sends from twin 1 to the receivers, and counts."""

    def __init__(self) -> None:
        self.world = World(queue_bytes=200_000, queued_total_bytes=300_000, page_envelopes=3, page_bytes=100_000)
        for name in ("push", "read", "delete"):
            setattr(self.world.store, name, self.later(getattr(self.world.store, name)))
        self.sender = self.world.connect(1, host="203.0.113.1")
        self.sent: dict[int, list[str]] = {twin: [] for twin in RECEIVERS}
        self.clients: dict[int, list[tuple[Client, Any]]] = {twin: [] for twin in RECEIVERS}
        for twin in RECEIVERS:
            self.connect(twin)

    def later(self, operation: Any) -> Any:
        """As ``operation``, but its outcome is known 10 ms later."""

        def run(*arguments: Any) -> Deferred[Any]:
            outcome: Deferred[Any] = Deferred()
            done = operation(*arguments)
            done.addBoth(lambda found: self.world.network.callLater(0.01, outcome.callback, found))
            return outcome

        return run

    def newest(self, twin: int) -> Client | None:
        clients = self.clients[twin]
        return clients[-1][0] if clients and not clients[-1][0].lost else None

    def send(self, twin: int, count: int, size: int) -> None:
        for _ in range(count):
            uid = f"{twin}.{len(self.sent[twin])}"
            self.sent[twin].append(uid)
            # Each lives as long as this test: time may pass, but not that much.
            envelope = self.sender.envelope(twin, uid=uid, plain=bytes(size), expiration=1_800)
            self.sender.shell.send(envelope.SerializeToString())
        self.sender.shell.flush()
        self.world.turn()

    def connect(self, twin: int) -> None:
        self.world.network.advance(1)  # another token each time
        client = self.world.connect(twin)
        session = self.world.relay.switch.sessions[SessionAddress(twin)]
        self.clients[twin].append((client, session))

    def leave(self, twin: int) -> None:
        client = self.newest(twin)
        if client is not None:
            client.leave()

    def stall(self, twin: int) -> None:
        client = self.newest(twin)
        if client is not None:
            client.shell.hold("test", True)

    def resume(self, twin: int) -> None:
        client = self.newest(twin)
        if client is not None:
            client.shell.hold("test", False)

    def vanish(self, twin: int) -> None:
        """The session ends with a queue, and more is sent while that is on its way to the store."""
        self.stall(twin)
        self.send(twin, 4, 60_000)
        self.leave(twin)
        self.send(twin, 4, 10)

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.world.network.advance(0)

    def wait(self, time_s: float) -> None:
        self.world.network.advance(time_s)

    def settle(self) -> None:
        for _ in range(250):
            self.world.turn()
            self.world.network.advance(0.01)

    def check(self) -> None:
        for twin in RECEIVERS:
            self.resume(twin)
            self.settle()
            if self.newest(twin) is None:
                self.connect(twin)
                self.settle()
            received = [envelope.uid for client, _ in self.clients[twin] for envelope in client.envelopes]
            written = sum(session.envelopes_out for _, session in self.clients[twin])
            assert max(Counter(received).values(), default=0) <= 1
            assert written == len(self.sent[twin])
            assert set(received) <= set(self.sent[twin])
        switch, delivery = self.world.relay.switch, self.world.relay.delivery
        assert switch.waiting_bytes == 0 == switch.returning.used and not switch.stalled
        assert delivery.pending.used == 0 == delivery.waiting.used and not delivery.background.tasks
        assert all(session.pending == 0 == session.pending_bytes for session in switch.sessions.values())
        assert not self.sender.received
        self.world.stop()
        assert not self.world.network.getDelayedCalls()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_STEPS, min_size=8, max_size=40))
def test_each_envelope_is_written_once_whatever_sessions_do(steps: list[tuple[Any, ...]]) -> None:
    schedule = Schedule()
    for name, *arguments in steps:
        getattr(schedule, name)(*arguments)
    schedule.check()
