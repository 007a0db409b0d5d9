"""What the log pipeline is tested with is what a network writes: one that runs in memory, on a clock that is moved on.

Two relays, three clients that are connected to both, and a relay of the messaging system, which Alice and Bob speak as
well, with the same keys and in the same logs. Alice sends Bob 5,000 bytes and has them echoed; she dials Carol, who does
not listen, and a key without a client; over the messaging relay she has 3,000 bytes echoed by Bob. Carol sends Bob 1,000
bytes; the relay they go through is drained; she sends 1,000 more, through the other one. The log of that relay ends
before the network does, as if it was killed.

``python tests/eventlog/test_network_log.py`` records it anew.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any, Final

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.protocols.wire import Echo
from twisted.python.failure import Failure

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.eventlog.log import Encoder, short_node
from dmsg.eventlog.schema import Event, TransportOpened
from dmsg.messaging.client.service import MessagingClient
from dmsg.mux.client.service import DmsgClient
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

#: Where it is recorded.
RECORDED: Final = Path(__file__).parents[2] / "spark" / "tests" / "vectors" / "network_log"
#: 2026-03-02 09:00 UTC, in Unix seconds.
START: Final = 1_772_442_000.0
DELAY_S: Final = 0.005
HOUR: Final = "date=2026-03-02/hour=09"
RELAYS, MESSAGING_RELAY, (ALICE, BOB, CAROL), ABSENT = (1, 2), 3, (11, 12, 13), 99


def key(number: int) -> SecretKey:
    """A key that is the same in every run."""
    return SecretKey(bytes(31) + bytes([number]))


class Log:
    """The lines of one node, until it is killed."""

    def __init__(self, clock: Clock, role: str, secret: SecretKey) -> None:
        node, boot = short_node(secret.public_key), bytes(secret.public_key)[-8:].hex()
        self.name = f"role={role}/{HOUR}/{node}-{boot}-000000"
        self.lines: list[bytes] = []
        self.events: list[Event] = []
        self.killed = False
        self._encoder = Encoder(role, node, boot)
        self._clock = clock

    def emit(self, event: Event) -> None:
        if not self.killed:
            self.events.append(event)
            self.lines.append(self._encoder.encode(event, self._clock.seconds()))


class Collector(Protocol):
    """Waits for the echo of what it sends, and for the end."""

    def __init__(self) -> None:
        self._wanted = 0
        self._waiting: Deferred[None] = Deferred()
        self._lost: Deferred[None] = Deferred()

    def send(self, data: bytes) -> Deferred[None]:
        self._wanted, self._waiting = self._wanted + len(data), Deferred()
        self.transport.write(data)  # type: ignore[union-attr]
        return self._waiting

    def close(self) -> Deferred[None]:
        self.transport.loseConnection()  # type: ignore[union-attr]
        return self._lost

    def dataReceived(self, data: bytes) -> None:
        self._wanted -= len(data)
        if self._wanted == 0:
            self._waiting.callback(None)

    def connectionLost(self, reason: Failure | None = None) -> None:
        self._lost.callback(None)


def play() -> dict[str, list[bytes]]:
    """The lines of every node, by the beginning of its file's name. The same in every run, but for the order of what
    happens at the same time."""
    played: Any = ensureDeferred(_play())
    result: dict[str, list[bytes]] = played.result
    if isinstance(result, Failure):
        result.raiseException()
    return result


async def _play() -> dict[str, list[bytes]]:
    clock = Clock()
    clock.rightNow = START
    logs: dict[int, Log] = {}

    def options(role: str, number: int) -> dict[str, Any]:
        logs[number] = Log(clock, role, key(number))
        return {"key": key(number), "events": logs[number]}

    memory = MemoryNetwork(clock, delay_s=DELAY_S, random=Random(1))
    async with LocalNetwork(memory, relays=0, random=Random(2).randbytes) as network:
        servers = {number: await network.add_relay(**options("server", number)) for number in RELAYS}
        clients = {
            number: await network.client(min_servers=2, **options("client", number)) for number in (ALICE, BOB, CAROL)
        }
        clients[BOB].listen(Factory.forProtocol(Echo))

        await network.add_messaging_relay(**options("server", MESSAGING_RELAY))
        speakers = {
            number: await network.messaging_client(
                key=key(number), events=logs[number], discovery=None, servers=network.messaging_pinned
            )
            for number in (ALICE, BOB)
        }
        speakers[BOB].listen(Factory.forProtocol(Echo))

        async def dial(client: DmsgClient | MessagingClient, target: int) -> Collector:
            factory: Any = Factory.forProtocol(Collector)
            protocol: Any = await network.wait(client.connect(factory, key(target).public_key))
            return protocol

        first = await dial(clients[ALICE], BOB)
        await network.wait(first.send(b"a" * 5_000))
        await network.wait(first.close())
        for target in (CAROL, ABSENT):
            try:
                await dial(clients[ALICE], target)
            except DialError:
                continue
            raise AssertionError("a dial without a listener succeeded")
        third = await dial(speakers[ALICE], BOB)
        await network.wait(third.send(b"m" * 3_000))
        await network.wait(third.close())
        second = await dial(clients[CAROL], BOB)
        await network.wait(second.send(b"c" * 1_000))
        opened = [each for each in logs[CAROL].events if isinstance(each, TransportOpened)]
        drained, other = sorted(RELAYS, key=lambda each: str(key(each).public_key) != opened[-1].server)
        await network.stop_relay(servers[drained])
        await network.wait(deferLater(clock, 0.1))  # until the transport goes on through the other relay
        clock.advance(4.9)
        await network.wait(second.send(b"c" * 1_000))
        await network.wait(second.close())
        logs[other].killed = True
    return {log.name: log.lines for log in logs.values()}


def write(directory: Path) -> None:
    """Write the files of a run."""
    for name, lines in play().items():
        path = directory / f"{name}-{len(lines)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))


def read(directory: Path) -> dict[str, list[bytes]]:
    """What :func:`write` wrote, as :func:`play` gives it."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for path in directory.rglob("*.jsonl"):
        found[str(path.relative_to(directory)).rpartition("-")[0]] += path.read_bytes().splitlines(keepends=True)
    return dict(found)


def unordered(log: dict[str, list[bytes]]) -> dict[str, list[dict[str, Any]]]:
    """The lines of every node without their number, which depends on the order of what happens at the same time."""
    found = {}
    for name, lines in log.items():
        events = [json.loads(line) for line in lines]
        assert [event.pop("seq") for event in events] == list(range(len(events)))
        found[name] = sorted(events, key=lambda event: json.dumps(event, sort_keys=True))
    return found


def test_it_is_what_a_network_writes_today() -> None:
    assert unordered(read(RECORDED)) == unordered(play())


if __name__ == "__main__":
    shutil.rmtree(RECORDED, ignore_errors=True)
    write(RECORDED)
