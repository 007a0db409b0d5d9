"""A program of one twin, for system tests: serves ``echo``, and calls that of others when it is told to.

On its standard input it is told ``call COUNT TIMEOUT TWIN …`` and ``served``; it prints a line of JSON for each. After ``hold``
it calls half and waits for ``go``. The command line is ``KEY REGISTRY CONCURRENCY RELAY …``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from twisted.internet import reactor as untyped_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.stdio import StandardIO
from twisted.logger import globalLogBeginner, textFileLogObserver
from twisted.protocols.basic import LineReceiver

from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.errors import CallError
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.key_file import read_twin_key
from dmsg.rmb.twins.table import SqliteRegistry

reactor: Any = untyped_reactor


class Program(LineReceiver):
    """What is told and said."""

    delimiter = b"\n"

    def __init__(self, key_file: str, registry: str, concurrency: str, *relays: str) -> None:
        self.concurrency = int(concurrency)
        self.client = RmbClient(reactor, read_twin_key(key_file), SqliteRegistry(registry, reactor), relays)
        self.served: Counter[bytes] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.late = 0
        self.number = 0
        #: What calls wait for in the middle, if they have been told to.
        self.held: Waiters[None] | None = None
        self.client.service("echo")(self.echo)

    async def echo(self, request: Request) -> bytes:
        self.served[request.data] += 1
        return request.data

    async def run(self) -> None:
        self.client.startService()
        await self.client.when_ready()
        print("ready", self.client.twin, flush=True)

    def lineReceived(self, line: bytes) -> None:
        command, *words = line.decode().split()
        if command == "call":
            count, timeout, *twins = words
            work = Deferred.fromCoroutine(self.call_all(int(count), float(timeout), [int(twin) for twin in twins]))
            work.addErrback(lambda failure: print(failure.getTraceback(), flush=True))
        elif command == "hold":
            self.held = Waiters()
        elif command == "go":
            held, self.held = self.held, None
            assert held is not None
            held.fire(None)
        else:
            print("served", json.dumps({"all": self.served.total(), "different": len(self.served)}), flush=True)

    async def call_all(self, count: int, timeout_s: float, twins: list[int]) -> None:
        halfway = self.number + count // 2
        left = iter(range(count))
        told: list[bool] = []

        async def work() -> None:
            for one in left:
                await self.call(twins[one % len(twins)], timeout_s)
                if self.number < halfway:
                    continue
                if not told:
                    told.append(True)
                    sent = [relay.envelopes_out for relay in self.client.exchange.relays.connections]
                    print("halfway", json.dumps(sent), flush=True)
                if self.held is not None:
                    await self.held.wait()

        await gatherResults([Deferred.fromCoroutine(work()) for _ in range(self.concurrency)])
        print("called", json.dumps({"late": self.late, **self.outcomes}), flush=True)

    async def call(self, twin: int, timeout_s: float) -> None:
        self.number += 1
        data = b"%d-%d" % (self.client.twin, self.number)
        began = reactor.seconds()
        try:
            answer = await self.client.call(twin, "echo", data, timeout=timeout_s)
            self.outcomes["answered" if answer.data == data else "wrong"] += 1
        except CallError as error:
            self.outcomes[type(error).__name__] += 1
        # A busy machine runs timers late: what counts is that the envelope's end, up to a second later, is not passed by much.
        if reactor.seconds() - began > timeout_s + 2:
            self.late += 1


if __name__ == "__main__":
    globalLogBeginner.beginLoggingTo([textFileLogObserver(sys.stderr)], redirectStandardIO=False)
    program = Program(*sys.argv[1:])
    StandardIO(program)
    reactor.callWhenRunning(lambda: Deferred.fromCoroutine(program.run()))
    reactor.run()
