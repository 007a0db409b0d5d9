"""A relay as a service: what its event log says of connections and of its end, and which timers it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import TimeoutError
from twisted.internet.endpoints import TCP4ClientEndpoint

from dmsg.crypto.keys import SecretKey
from dmsg.eventlog import schema as ev
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, OK, REQUEST, CloseReason
from dmsg.mux.relay.limits import RelayLimits
from dmsg.serving import service
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.raw import RawConnection, connect_raw
from tests.memory_log import MemoryEventLog

#: Time on the way, in seconds.
DELAY_S = 0.05
ABSENT = SecretKey(bytes([9]) * 32).public_key


class Relay(LocalNetwork):
    """One relay in memory, its event log, and clients under the test's control from any address."""

    def __init__(self, **limits: Any) -> None:
        self.memory = MemoryNetwork(delay_s=DELAY_S, high_water_bytes=8_192)
        self.log = MemoryEventLog()
        super().__init__(
            self.memory,
            relays=1,
            discovery=None,
            limits=RelayLimits(**{"drain_timeout_s": 0.0} | limits),
            events=self.log,
        )

    @property
    def relay(self) -> Any:
        return self.relays[0]

    async def raw(self, source: str, **options: Any) -> RawConnection:
        """A client whose handshake has begun."""
        [pinned] = self.pinned
        endpoint = TCP4ClientEndpoint(self.memory, pinned.address.host, pinned.address.port, bindAddress=(source, 0))
        found: RawConnection = await self.wait(connect_raw(endpoint, pinned.public_key, **options))
        return found

    async def admitted(self, source: str) -> RawConnection:
        """A client that was admitted."""
        raw = await self.raw(source)
        await self.wait(raw.next_frame(OK))
        return raw

    async def transport(self, asking: RawConnection, asked: RawConnection, number: int = 2) -> int:
        """A transport between two clients, which has this id at the first; gives the id at the second."""
        asking.send_request(asked.key.public_key, number)
        request = await self.wait(asked.next_frame(REQUEST))
        asked.send_frame(ACCEPT, request.transport_id, request.payload)
        await self.wait(asking.next_frame(ACCEPT))
        return request.transport_id

    def member(self, raw: RawConnection) -> Any:
        return self.relay.switch.members[raw.key.public_key.raw]

    async def stop(self) -> None:
        for pipe in list(self.memory.pipes):
            if isinstance(pipe.a.protocol, RawConnection):
                pipe.a.abortConnection()
        await super().stop()


# --- what the log says -------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_the_log_says_who_came_and_what_its_connection_carried() -> None:
    async with Relay() as net:
        alice, bob = await net.admitted("10.0.0.1"), await net.admitted("10.0.1.1")
        opened = {event.remote: event for event in net.log.of(ev.ConnectionOpened)}
        one = opened[str(alice.key.public_key)]
        assert (one.address, one.extended, one.conn) == ("10.0.0.1", False, 1)
        assert one.handshake_ms == pytest.approx(3 * DELAY_S * 1000, abs=DELAY_S * 1000)
        assert net.relay.stats() == {"connections": 2, "transports": 0, "half_open": 0, "queued_bytes": 0}

        number = await net.transport(alice, bob)
        assert net.relay.stats()["transports"] == 1
        alice.send_frame(FWD, 2, b"\0\1" + bytes(1_000))
        await net.wait(bob.next_frame(FWD, number))
        before, read = net.member(bob), net.member(alice)
        assert (read.bytes_in > 1_000, before.bytes_out > 1_000) == (True, True)
        net.memory.advance(60.0)
        totals = (before.bytes_in, before.bytes_out, before.frames_in, before.frames_out)
        bob.close()
        net.memory.advance(1.0)
        [closed] = net.log.of(ev.ConnectionClosed)
        assert (closed.conn, closed.remote) == (2, str(bob.key.public_key))
        assert (closed.reason, closed.transports) == ("closed by peer", 1)
        assert closed.duration_s == pytest.approx(60, abs=1)
        assert (closed.bytes_in, closed.bytes_out, closed.frames_in, closed.frames_out) == totals
        assert (closed.frames_in, closed.frames_out) == (1, 3), "ACCEPT came; OK, REQUEST and FWD went"
        assert net.relay.stats()["connections"] == 1


@pytest_twisted.ensureDeferred
async def test_the_log_says_who_was_not_admitted_and_which_request_was_not_passed_on() -> None:
    async with Relay(connections=1, connections_per_address=1, request_burst=1, requests_per_s=0.001) as net:
        alice = await net.admitted("10.0.0.1")
        await net.transport(alice, alice)
        alice.send_request(ABSENT, 4)
        closed = await net.wait(alice.next_frame(CLOSE, 4))
        assert closed.payload == bytes([CloseReason.RATE_LIMITED])
        turned_away = await net.raw("10.0.1.1")
        await net.wait(turned_away.lost())
        net.memory.advance(1.1)
        refused = {
            (event.conn, event.remote, event.what, event.reason, event.count) for event in net.log.of(ev.Refused)
        }
        assert refused == {
            (1, str(alice.key.public_key), "request", "rate_limited", 1),
            (2, str(turned_away.key.public_key), "connection", "too many connections", 1),
        }
        [failed] = net.log.of(ev.HandshakeFailed)
        assert (failed.address, failed.stage, failed.reason) == ("10.0.1.1", "admission", "too many connections")
        assert net.relay.stats()["half_open"] == 0


@pytest.mark.parametrize("ends", [True, False])
@pytest_twisted.ensureDeferred
async def test_the_log_says_how_long_the_relay_drained_and_what_was_left(ends: bool) -> None:
    """It waits for transports that are open, no longer than it may, and no longer than there are any."""
    async with Relay(drain_timeout_s=20.0) as net:
        alice, bob = await net.admitted("10.0.0.1"), await net.admitted("10.0.1.1")
        stranger = await net.raw("10.0.2.1", shake=False)
        await net.transport(alice, bob)
        net.memory.advance(4.0)
        stopping = net.relay.stopService()
        assert not net.relay.ready and net.relay.available_connections == 0
        net.memory.advance(4.0)
        assert not stopping.called
        if ends:
            alice.send_frame(CLOSE, 2, b"\0")
            net.memory.advance(0.5)
        else:
            net.memory.advance(15.9)
            assert not stopping.called
            net.memory.advance(0.5)
            closed = await net.wait(alice.next_frame(CLOSE, 2))
            assert closed.payload == bytes([CloseReason.SERVER_DRAINING])
        net.memory.advance(0.5)
        assert stopping.called
        assert all(one.lost_reason is not None for one in (alice, bob, stranger))
        [drained], [stopped] = net.log.of(ev.Drained), net.log.of(ev.ServerStopped)
        assert drained.elapsed_ms == pytest.approx(4_050 if ends else 20_000, abs=300)
        assert drained.transports == (0 if ends else 1)
        assert stopped.reason == "stopped"
        assert stopped.duration_s == pytest.approx((8 if ends else 24) + 0.5, abs=1)
        assert {event.reason for event in net.log.of(ev.ConnectionClosed)} == {"server_draining"}
        [failed] = net.log.of(ev.HandshakeFailed)
        assert (failed.stage, failed.reason) == ("handshake", "silent")


@pytest_twisted.ensureDeferred
async def test_a_handshake_that_the_end_of_the_relay_cuts_short_is_no_fault_of_the_stranger() -> None:
    async with Relay() as net:
        stranger = await net.raw("10.0.2.1", shake=False)
        stranger.send_bytes(b"\0")
        net.memory.advance(0.2)
        stopping = net.relay.stopService()
        net.memory.advance(0.2)
        assert stopping.called and stranger.lost_reason is not None
        [failed] = net.log.of(ev.HandshakeFailed)
        assert (failed.address, failed.stage, failed.reason) == ("10.0.2.1", "handshake", "server_draining")


@pytest_twisted.ensureDeferred
async def test_a_relay_whose_end_is_not_waited_for_stops_nevertheless() -> None:
    async with Relay(drain_timeout_s=20.0) as net:
        alice, bob = await net.admitted("10.0.0.1"), await net.admitted("10.0.1.1")
        await net.transport(alice, bob)
        stopping = net.relay.stopService().addTimeout(5.0, net.memory)
        with pytest.raises(TimeoutError):
            await net.wait(stopping)
        again = net.relay.stopService()
        net.memory.advance(16.0)
        assert again.called and all(one.lost_reason is not None for one in (alice, bob))
        assert len(net.log.of(ev.ServerStopped)) == 1


@pytest_twisted.ensureDeferred
async def test_a_relay_that_stops_ends_its_transports_in_turns_and_tells_of_each() -> None:
    async with Relay() as net:
        clients = [await net.admitted(f"10.0.{at}.1") for at in range(4)]
        numbers = range(2, 102, 2)
        for at, asking in enumerate(clients):
            for number in numbers:  # each has 50 with itself, and 50 with the next
                await net.transport(asking, asking, number)
                await net.transport(asking, clients[(at + 1) % 4], number + 200)
        stopping = net.relay.stopService()
        assert 0 < net.relay.stats()["transports"] < 400, "others have their turn"
        net.memory.advance(1.0)
        assert stopping.called and net.relay.stats()["transports"] == 0
        ended = net.log.of(ev.TransportClosed)
        assert len(ended) == 400 and {event.reason for event in ended} == {"server_draining"}
        told = [net.wait(client.next_frame(CLOSE, number)) for client in clients for number in numbers]
        assert {(await one).payload for one in told} == {bytes([CloseReason.SERVER_DRAINING])}


# --- places ------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_one_newcomer_searches_some_clients_for_an_idle_one_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_PASSED_OVER", 2)
    async with Relay(connections=6) as net:
        clients = [await net.admitted(f"10.0.0.{at}") for at in range(1, 7)]
        for client in clients:
            await net.transport(client, client, 2)
            client.send_frame(CLOSE, 2, bytes([CloseReason.NORMAL]))
        net.memory.advance(1.0)
        for client in clients[:3]:
            await net.transport(client, client, 4)
        turned_away = await net.raw("10.0.1.1")
        await net.wait(turned_away.lost())
        await net.admitted("10.0.1.2")
        assert [client.lost_reason is not None for client in clients] == [False] * 3 + [True] + [False] * 2


# --- time --------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_a_later_request_that_is_due_earlier_ends_in_time() -> None:
    """The queue of a receiver that takes nothing is due after 30 seconds, an unanswered request after 10."""
    async with Relay() as net:
        alice, bob = await net.admitted("10.0.0.1"), await net.admitted("10.0.1.1")
        await net.transport(alice, bob)
        bob.pause()
        for _ in range(4):
            alice.send_frame(FWD, 2, bytes(8_000))
        net.memory.advance(1.0)
        assert net.relay.stats()["queued_bytes"] > 0
        alice.send_request(bob.key.public_key, 4)
        net.memory.advance(9.9)
        assert alice.take_frames() == []
        net.memory.advance(0.6)
        [closed] = alice.take_frames()
        assert (closed.kind, closed.transport_id) == (CLOSE, 4)
        assert closed.payload == bytes([CloseReason.HANDSHAKE_TIMEOUT])
        net.memory.advance(17.0)
        assert alice.take_frames() == []
        net.memory.advance(3.0)
        [closed] = alice.take_frames()
        assert (closed.transport_id, closed.payload) == (2, bytes([CloseReason.SLOW_CONSUMER]))
        assert net.relay.stats() == {"connections": 2, "transports": 0, "half_open": 0, "queued_bytes": 0}


@pytest_twisted.ensureDeferred
async def test_a_client_is_read_from_no_faster_than_its_rate_and_others_are_not_held_up() -> None:
    rate = 10_000
    async with Relay(bytes_per_s=float(rate)) as net:
        fast, other, reader = [await net.admitted(f"10.0.{number}.1") for number in range(3)]
        await net.transport(fast, reader)
        at_reader = await net.transport(other, reader, 4)
        net.memory.advance(10.0)
        start = net.member(fast).bytes_in
        for _ in range(20):
            fast.send_frame(FWD, 2, bytes(4_000))
        counts = []
        for _ in range(4):
            net.memory.advance(1.0)
            counts.append(net.member(fast).bytes_in - start)
        # One second's worth at once, then a second's worth each second, and at most one read more.
        for second, count in enumerate(counts, 1):
            assert 0.8 * rate * second <= count <= rate * (second + 1) + 8_192
        other.send_frame(FWD, 4, b"\0\1now")
        net.memory.advance(3 * DELAY_S)
        assert [frame.payload for frame in reader.take_frames() if frame.transport_id == at_reader] == [b"\0\1now"]
        net.memory.advance(10.0)
        assert net.member(fast).bytes_in - start > 80_000, "none of it is lost"
        fast.abort()  # while it is held up, or not: no timer is left
        net.memory.advance(1.0)
