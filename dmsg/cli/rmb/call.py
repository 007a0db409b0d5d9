"""``dmsg rmb call``: one call of another twin's command."""

from __future__ import annotations

import base64
import math
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Final

import click

from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, printable
from dmsg.cli.rmb.network import Network, exit_of, network_options
from dmsg.cli.settings import UNICODE, ValueType
from dmsg.glue.redis import Taker
from dmsg.ops.values import DURATION
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES, MAX_TTL_S, MAX_TWIN
from dmsg.rmb.core.messages import IncomingResponse, OutgoingRequest
from dmsg.rmb.peer.commands import LOCAL
from dmsg.rmb.peer.redis import RedisLists

#: How long an answer may take by default, in seconds.
TIMEOUT_S: Final = 30.0
#: A peer answers before a request expires; if not even an error comes within this many seconds after that, there is no peer.
_GRACE_S: Final = 1


@click.command()
@click.argument("twin", metavar="TWIN", type=click.IntRange(1, MAX_TWIN))
@click.argument("command", metavar="COMMAND", type=UNICODE)
@click.option("--data", metavar="TEXT|@FILE|-", default="", help="The payload: a text, a file, or standard input.")
@click.option("--schema", metavar="TYPE", type=UNICODE, help="The MIME type of the payload, such as application/json.")
@click.option(
    "--session",
    metavar="NAME",
    type=UNICODE,
    help="The session of the twin to call; default: the one without a name.",
)
@click.option("--fail-fast", is_flag=True, help="Fail at once when the twin is offline, instead of waiting for it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=ValueType(DURATION, 0.1, MAX_TTL_S - 1),
    default=TIMEOUT_S,
    show_default=True,
    help="How long the answer may take, in seconds.",
)
@network_options
def call(network: Network, twin: int, command: str, data: str, timeout_s: float, **options: Any) -> None:
    """Call COMMAND of TWIN, and print the answer."""
    try:
        payload = read_payload(data)
    except (OSError, CommandError) as error:
        network.out.leave(error)
    network.execute(lambda reactor: run_call(network, reactor, twin, command, payload, timeout_s=timeout_s, **options))


def read_payload(data: str) -> bytes:
    """The payload that ``--data`` stands for. Raises ``OSError``, or ``CommandError`` for one that is too long."""
    if data == "-":
        name, payload = "standard input", sys.stdin.buffer.read(MAX_ENVELOPE_BYTES + 1)
    elif data.startswith("@"):
        name = data[1:]
        with Path(name).open("rb") as file:
            payload = file.read(MAX_ENVELOPE_BYTES + 1)
    else:
        name, payload = "--data", data.encode("utf-8", "surrogateescape")
    if len(payload) > MAX_ENVELOPE_BYTES:
        text = f"{name} is longer than {MAX_ENVELOPE_BYTES >> 20} MiB, which is the most that a message may have"
        raise CommandError(text, data={"reason": "EnvelopeTooLarge"})
    return payload


async def run_call(
    network: Network,
    reactor: Any,
    twin: int,
    command: str,
    payload: bytes,
    *,
    timeout_s: float = TIMEOUT_S,
    schema: str | None = None,
    session: str | None = None,
    fail_fast: bool = False,
) -> None:
    """``dmsg rmb call``."""
    tags = "fail-fast" if fail_fast else None
    if network.redis is not None:
        if session is not None:
            raise CommandError("a peer calls the session without a name: --session needs --relay", Exit.USAGE)
        request = OutgoingRequest(
            command=command,
            destinations=(twin,),
            reply_to=f"dmsg.rmb.call.{uuid.uuid4()}",
            expiration=math.ceil(timeout_s),
            timestamp=int(time.time()),
            payload=payload,
            tags=tags,
            schema=schema,
        )
        answer = await _call_through_redis(network, reactor, request, timeout_s)
        _tell(network.out, twin, command, answer.source, answer.schema, answer.payload)
        return
    # A session of its own: the one without a name may belong to a program that serves.
    async with network.client(reactor, session=f"call-{uuid.uuid4().hex[:16]}", config=RmbConfig()) as client:
        found = await client.call(twin, command, payload, timeout=timeout_s, session=session, schema=schema, tags=tags)
    _tell(network.out, twin, command, str(found.source), found.schema, found.data)


async def _call_through_redis(
    network: Network, reactor: Any, request: OutgoingRequest, timeout_s: float
) -> IncomingResponse:
    assert network.redis is not None
    lists, taker = RedisLists(network.redis, reactor), Taker(network.redis, request.reply_to, reactor)
    try:
        await lists.push(LOCAL, request.to_json())
        data = await taker.take(math.ceil(timeout_s) + _GRACE_S)
    finally:
        await taker.close()
        await lists.close()
    if data is None:
        text = f"no answer from a peer within {timeout_s:g} s: is an rmb-peer running at {network.redis}?"
        raise CommandError(text, Exit.UNREACHABLE)
    answer = IncomingResponse.from_json(data)
    if answer.error is not None:
        error = answer.error
        text = f"call of twin {request.destinations[0]}: refused with code {error.code}: {error.message}"
        details = {"reason": "CallRefused", "code": error.code, "text": error.message}
        raise CommandError(text, exit_of(error.code), details)
    return answer


def _tell(out: Output, twin: int, command: str, source: str, schema: str | None, payload: bytes) -> None:
    result: dict[str, Any] = {"twin": twin, "command": command, "source": source, "schema": schema}
    try:
        text = payload.decode()
        result["data"] = text
    except UnicodeDecodeError:
        text = payload.decode("utf-8", "replace")
        result["data_base64"] = base64.b64encode(payload).decode()
    if out.json or sys.stdout.isatty():
        # text of another twin must not become instructions to a terminal
        out.result(result, *map(printable, text.splitlines()))
    else:
        out.raw(payload)
