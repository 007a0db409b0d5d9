"""``dmsg rmb serve``: a program that answers the requests of other twins."""

from __future__ import annotations

import shlex
import shutil
import time
from typing import Any, Final

import click
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.task import deferLater

from dmsg.address import RedisAddress
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import printable, tell_failed
from dmsg.cli.rmb.network import Network, network_options
from dmsg.cli.rmb.programs import Program, ProgramFailed
from dmsg.cli.settings import UNICODE, ValueType
from dmsg.glue.errors import RedisAway, RedisRefused
from dmsg.glue.redis import TAKE_S, Taker
from dmsg.glue.tasks import Tasks
from dmsg.glue.waiters import Waiters
from dmsg.ops.values import DURATION, SIZE
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.errors import Refusal
from dmsg.rmb.client.handlers import Request
from dmsg.rmb.core.errors import InvalidMessage, PeerCode
from dmsg.rmb.core.lifetime import remaining
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.core.messages import IncomingRequest, JsonError, OutgoingResponse
from dmsg.rmb.peer.commands import REPLY, list_of
from dmsg.rmb.peer.redis import RedisLists

#: Programs that run at once, and how many seconds one may take.
CONCURRENCY: Final = 8
TIME_LIMIT_S: Final = 30.0
#: The longest answer: an envelope has to hold it, with its addresses and signature.
OUTPUT_LIMIT_BYTES: Final = MAX_ENVELOPE_BYTES - 4096
#: After so many seconds without a relay the command says why, and again when the reason is another one.
PATIENCE_S: Final = 5.0
#: Seconds between two attempts at a Redis that is away.
RETRY_S: Final = 0.5
#: Requests that wait for a program; more are refused. With Redis, requests wait in Redis.
WAITING: Final = 256


@click.command(short_help="Answer requests by running a program.")
@click.argument("command", metavar="COMMAND", type=UNICODE)
@click.option(
    "--exec",
    "program",
    metavar="PROGRAM",
    required=True,
    help="Run for each request: payload on standard input, answer from standard output; a status that is not 0 is an error. "
    "May have arguments. RMB_SOURCE, RMB_COMMAND, RMB_UID and RMB_SCHEMA are in its environment.",
)
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=CONCURRENCY, show_default=True, help="Programs at a time."
)
@click.option(
    "--time-limit",
    "time_limit_s",
    type=ValueType(DURATION, 0.1, 1800),
    default=TIME_LIMIT_S,
    show_default=True,
    help="Seconds after which a program is killed.",
)
@click.option(
    "--output-limit",
    "output_limit_bytes",
    type=ValueType(SIZE, 0, OUTPUT_LIMIT_BYTES),
    default=OUTPUT_LIMIT_BYTES,
    show_default=True,
    help="Longest answer, in bytes.",
)
@network_options
def serve(network: Network, command: str, program: str, **options: Any) -> None:
    """Answer requests for COMMAND by running a program, until interrupted."""
    network.execute(lambda reactor: run_serve(network, reactor, command, program, **options))


async def run_serve(
    network: Network,
    reactor: Any,
    command: str,
    program: str,
    *,
    concurrency: int = CONCURRENCY,
    time_limit_s: float = TIME_LIMIT_S,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> None:
    """``dmsg rmb serve``."""
    server = _Server(network, reactor, command, _split(program), time_limit_s, output_limit_bytes)
    if network.redis is not None:
        await server.serve_redis(network.redis, concurrency)
        return
    config = RmbConfig(handlers=concurrency, waiting_requests=WAITING)
    async with network.client(reactor, session=None, config=config) as client:
        client.service(command)(server.handle)
        said: dict[str, str] = {}
        since = "yet"
        while True:  # until interrupted
            try:
                await client.when_ready().addTimeout(PATIENCE_S, reactor)
            except TimeoutError:
                problems = client.problems()
                for url, problem in problems.items():
                    if said.get(url) != problem:  # a relay may be away for days
                        text = f"not connected to {url} {since}: {problem}" if url else problem
                        data = {"relay": url} if url else {"reason": "RegistryError"}
                        tell_failed(network.out, CommandError(text, data=data), text)
                said = problems
                continue
            if said or since == "yet":
                server.ready(client.twin)
                said, since = {}, "any more"
            await deferLater(reactor, PATIENCE_S)


def _split(program: str) -> list[str]:
    try:
        arguments = shlex.split(program)
    except ValueError as error:
        raise CommandError(f"--exec: {error}", Exit.USAGE) from None
    found = shutil.which(arguments[0]) if arguments else None
    if found is None:
        raise CommandError(f"--exec: there is no program {printable(program)!r}", Exit.USAGE)
    return [found, *arguments[1:]]


class _Server:
    """Answers requests by running a program, and reports each."""

    def __init__(
        self,
        network: Network,
        reactor: Any,
        command: str,
        arguments: list[str],
        time_limit_s: float,
        output_limit_bytes: int,
    ) -> None:
        self._out = network.out
        self._reactor = reactor
        self._command = command
        self._program = Program(reactor, arguments, time_limit_s=time_limit_s, output_limit_bytes=output_limit_bytes)

    def ready(self, twin: int | None) -> None:
        """Say that requests are answered from now on."""
        self._out.result({"event": "ready", "twin": twin, "command": self._command})
        self._out.note(f"{self._command} is served" + (f" by twin {twin}" if twin else ""))

    async def handle(self, request: Request) -> bytes:
        """Answer a request that came over a relay."""
        try:
            return await self._answer(
                str(request.source), request.uid, request.schema, request.data, request.remaining_s
            )
        except ProgramFailed as failed:
            raise Refusal(PeerCode.HANDLER_FAILED, failed.text) from None

    async def _answer(self, source: str, uid: str, schema: str | None, payload: bytes, left_s: float) -> bytes:
        began, problem = self._reactor.seconds(), ""
        variables = {"RMB_SOURCE": source, "RMB_COMMAND": self._command, "RMB_UID": uid, "RMB_SCHEMA": schema or ""}
        try:
            return await self._program.run(payload, variables, left_s)
        except ProgramFailed as failed:
            problem = failed.text
            raise
        finally:
            elapsed_ms = (self._reactor.seconds() - began) * 1000
            line = {"event": "answered", "source": source, "error": problem or None, "elapsed_ms": round(elapsed_ms, 1)}
            self._out.result(line)
            self._out.note(f"{source}: {problem or 'answered'} ({elapsed_ms:.0f} ms)")

    async def serve_redis(self, address: RedisAddress, concurrency: int) -> None:
        """Take requests from the command's list in Redis, no more at a time than programs may run."""
        key = list_of(self._command)
        if key is None:
            raise CommandError(f"a peer hands out no command {printable(self._command)!r}", Exit.USAGE)
        lists, taker = RedisLists(address, self._reactor), Taker(address, key, self._reactor)
        running, taking, freed = Tasks(), Tasks(), Waiters[None]()
        over: Deferred[None] = Deferred()
        stopping = False

        async def one() -> None:
            while len(running) >= concurrency and not stopping:
                await freed.wait()
            data = None if stopping else await taker.take()
            if data is not None and stopping:
                await lists.put_back(key, data)
            elif data is not None:
                running.begin(self._answer_redis(lists, data)).addBoth(lambda _: freed.fire(None))

        async def take_all() -> None:
            said = ""
            while not stopping:
                try:
                    await one()
                    said = ""
                except RedisAway as away:
                    if str(away) != said:  # it is tried twice a second, and Redis may be away for days
                        said = str(away)
                        tell_failed(self._out, away, said)
                    await deferLater(self._reactor, RETRY_S)
                except RedisRefused as refused:
                    over.errback(CommandError(str(refused)))
                    return

        try:
            await lists.ping()
            self.ready(None)
            taking.begin(take_all())
            await over  # until interrupted
        finally:
            stopping = True
            freed.fire(None)
            # Not cancelled while it waits for a message: Redis may be giving out one right now.
            await taking.end(TAKE_S + RETRY_S, self._reactor)
            running.cancel()
            await running.end(RETRY_S, self._reactor)  # whose programs were stopped are told so
            await taker.close()
            await lists.close()

    async def _answer_redis(self, lists: RedisLists, data: bytes) -> None:
        try:
            request = IncomingRequest.from_json(data)
        except InvalidMessage:
            return
        left_s = remaining(time.time(), request.timestamp, request.expiration)
        if left_s is None:
            return
        ends_at = self._reactor.seconds() + left_s
        payload, error = b"", None
        try:
            payload = await self._answer(str(request.source), request.uid, request.schema, request.payload, left_s)
        except ProgramFailed as failed:
            error = JsonError(PeerCode.HANDLER_FAILED, failed.text)
        answer = OutgoingResponse(
            uid=request.uid,
            destination=request.source,
            timestamp=int(time.time()),
            payload=payload,
            error=error,
        )
        while (left_s := ends_at - self._reactor.seconds()) > 0:
            try:
                await lists.push(REPLY, answer.to_json(), left_s)  # a second push does no harm: the caller takes one
                return
            except RedisRefused:
                return
            except RedisAway:
                await deferLater(self._reactor, RETRY_S)
