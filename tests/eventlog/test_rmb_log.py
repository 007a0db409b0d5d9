"""What the log pipeline is tested with of the Reliable Message Bus is what its programs write: a relay and two twins in memory.

Alice (twin 1) calls Bob (twin 2) three times, and once a command he does not serve; she calls Carol (3), who is offline, and
a twin that there is not (4). She calls Dora (5), whose relay is another one: it takes the first request, which she never
answers, and does not answer the second. Then a second program of Bob's takes his session, and Alice sends more than the
20 messages a minute that she may. The log of the relay ends before the network does, as if it was killed.

``python tests/eventlog/test_rmb_log.py`` records it anew.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from twisted.internet.defer import Deferred, ensureDeferred, fail, succeed
from twisted.internet.task import Clock

from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.limit import LimitedEventLog
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import Event, ServerStarted
from dmsg.rmb.client.errors import CallError
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.limiter import Limit
from dmsg.rmb.core.ranker import Ranker
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.relay.api import make_site
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.federation import Federation
from dmsg.rmb.relay.service import RmbRelay
from dmsg.rmb.relay.stores.open import open_queues
from dmsg.testing.memory import MemoryNetwork

#: Where it is recorded.
RECORDED: Final = Path(__file__).parents[2] / "spark" / "tests" / "vectors" / "rmb_log"
#: 2026-03-02 09:00 UTC, in Unix seconds.
START: Final = 1_772_442_000.0
HOUR: Final = "date=2026-03-02/hour=09"
HOST, OTHER_HOST = "r1.example", "r2.example"
ALICE, BOB, CAROL, ABSENT, DORA = range(1, 6)
LIMIT: Final = Limit(20, 1_000_000)


def key_of(twin: int) -> TwinKey:
    return TwinKey(hashlib.sha256(b"twin %d" % twin).digest(), KeyType.ED25519)


class Registry:
    """The twins but the absent one; only Dora's relay is another."""

    def __init__(self) -> None:
        self.twins = {
            twin: Twin(
                twin,
                key_of(twin).account,
                (OTHER_HOST if twin == DORA else HOST,),
                EncryptionKey(key_of(twin).secret).public_key,
            )
            for twin in (ALICE, BOB, CAROL, DORA)
        }

    async def get(self, twin: int) -> Twin | None:
        return self.twins.get(twin)

    async def find(self, account: bytes) -> int | None:
        return next((number for number, twin in self.twins.items() if twin.account == account), None)

    async def update(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        """All is as it should be."""

    async def close(self) -> None:
        """Nothing is open."""


class OtherRelay:
    """Takes one post, and answers no other."""

    def __init__(self) -> None:
        self._taken = False

    def knows(self, relay: str) -> bool:
        return False

    def post(self, relay: str, envelopes: Sequence[bytes], connected_only: bool) -> Deferred[list[int]]:
        if self._taken:
            return fail(NotPosted(Reason.TIMEOUT))
        self._taken = True
        return succeed([202] * len(envelopes))


class Log:
    """The lines of one program, until it is killed."""

    def __init__(self, clock: Clock, role: str, node: str) -> None:
        self.name = f"role={role}/{HOUR}/{node}-{hashlib.sha256(node.encode()).hexdigest()[:16]}-000000"
        self.lines: list[bytes] = []
        self.killed = False
        self._encoder = Encoder(role, node, self.name[-23:-7])
        self._clock = clock

    def emit(self, event: Event) -> None:
        if not self.killed:
            self.lines.append(self._encoder.encode(event, self._clock.seconds()))


class Play:
    """The network, and what there is in it."""

    def __init__(self) -> None:
        clock = Clock()
        clock.rightNow = START
        self.network = network = MemoryNetwork(clock, delay_s=0.005, random=Random(1), hosts={HOST: "192.0.2.1"})
        self.registry = Registry()
        self.logs = {name: Log(clock, role, name) for name, role in ((HOST, "server"), ("alice", "client"))}
        self.logs |= {name: Log(clock, "client", name) for name in ("bob", "bob-again")}
        self.store = open_queues("memory:", network)
        self.events = LimitedEventLog(self.logs[HOST], network)
        self.relay = RmbRelay(
            network,
            self.registry,  # type: ignore[arg-type]
            self.store,
            domains=frozenset({HOST}),
            limit=LIMIT,
            events=self.events,
            unix_time=network.seconds,
        )
        self.federation = self.relay.delivery.federation = Federation(
            OtherRelay(),
            self.registry,
            Ranker(Random(2)),
            network,
            Random(3),
            unix_time=network.seconds,
            domains=[HOST],
            failed=self.relay.delivery.answer,
            emit=self.events.emit,
        )
        self.port = network.listenTCP(80, make_site(self.relay, network, {}))
        self.events.emit(ServerStarted("", "tcp:80", "0", "rmb"))
        self.relay.startService()

    def client(self, name: str, twin: int) -> RmbClient:
        client = RmbClient(
            self.network,
            key_of(twin),
            self.registry,  # type: ignore[arg-type]
            [f"ws://{HOST}"],
            publish=False,
            events=self.logs[name],
            random=Random(name).randbytes,
            now_s=self.network.seconds,
        )

        @client.service("echo")
        async def echo(request: Any) -> bytes:
            return bytes(request.data)

        client.startService()
        self.network.advance(1)
        return client

    def result(self, deferred: Any, within_s: float) -> Any:
        found: list[Any] = []
        deferred.addBoth(found.append)
        self.network.advance(within_s)
        [result] = found
        return result

    def call(self, client: RmbClient, twin: int, command: str = "echo", timeout: float = 5.0, tags: str = "") -> None:
        """Make a call and let it end, well or not."""

        async def one() -> None:
            with suppress(CallError):
                await client.call(twin, command, b"hello", timeout=timeout, tags=tags or None)

        assert self.result(ensureDeferred(one()), timeout + 1) is None

    def run(self) -> dict[str, list[bytes]]:
        alice, bob = self.client("alice", ALICE), self.client("bob", BOB)
        for _ in range(3):
            self.call(alice, BOB)
        self.call(alice, BOB, "no-such")
        self.call(alice, CAROL, tags="fail-fast")
        self.call(alice, ABSENT)
        self.call(alice, DORA)
        self.call(alice, DORA)
        self.network.advance(60)  # the limit's minute is over, and what waits for federation
        again = self.client("bob-again", BOB)
        calls = [ensureDeferred(alice.call(BOB, "echo", b"hello", timeout=5)) for _ in range(LIMIT.count + 5)]
        for call in calls:
            call.addErrback(lambda failure: failure.trap(CallError))
        self.network.advance(15)
        self.events.tell()
        self.logs[HOST].killed = True
        for each in (alice, bob, again):
            self.result(each.stopService(), 10)
        self.result(ensureDeferred(self.federation.stop(1)), 10)
        self.result(self.relay.stopService(), 100)
        self.port.stopListening()
        self.result(ensureDeferred(self.store.close()), 1)
        self.events.tell()
        return {log.name: log.lines for log in self.logs.values()}


def write(directory: Path) -> None:
    """Write the files of a run."""
    for name, lines in Play().run().items():
        path = directory / f"{name}-{len(lines)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))


def test_it_is_what_the_programs_write_today() -> None:
    recorded = {
        str(path.relative_to(RECORDED)).rpartition("-")[0]: path.read_bytes().splitlines(keepends=True)
        for path in RECORDED.rglob("*.jsonl")
    }
    assert recorded == Play().run()


if __name__ == "__main__":
    shutil.rmtree(RECORDED, ignore_errors=True)
    write(RECORDED)
