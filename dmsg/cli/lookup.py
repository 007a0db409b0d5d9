"""``dmsg servers`` and ``dmsg entry``: what discovery knows."""

from __future__ import annotations

import json
from typing import Any

import click

from dmsg.cli.client import no_server, not_given, open_discovery
from dmsg.cli.exits import Exit
from dmsg.cli.output import printable
from dmsg.cli.settings import PUBLIC_KEY, Invocation, common_options
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry


@click.command(short_help="List the relays with room for more clients.")
@common_options
def servers(call: Invocation) -> None:
    """List the relays with room for more clients, in the random order in which discovery names them."""
    call.execute(lambda reactor: list_servers(call, reactor))


@click.command()
@click.argument("public_key", metavar="PK", type=PUBLIC_KEY)
@common_options
def entry(call: Invocation, public_key: PublicKey) -> None:
    """Show the entry of PK; its signature has been verified."""
    call.execute(lambda reactor: show_entry(call, reactor, public_key))


async def list_servers(call: Invocation, reactor: Any) -> None:
    """``dmsg servers``."""
    async with open_discovery(call.settings, reactor) as discovery:
        _require(discovery, call)
        found = await discovery.available_servers(call.settings.protocol)
        missing = None if found else await no_server(call.settings, discovery, Exit.NOT_FOUND)
    rows = [(str(one.static), str(one.server.host_port), one.server.available_connections) for one in found]
    listed = [{"public_key": key, "address": address, "available": room} for key, address, room in rows]
    # in the form that --server takes
    lines = [f"{key}@{address}  {room} connections available" for key, address, room in rows]
    call.out.result({"servers": listed}, *lines)
    if missing is not None:
        raise missing


async def show_entry(call: Invocation, reactor: Any, public_key: PublicKey) -> None:
    """``dmsg entry``."""
    async with open_discovery(call.settings, reactor) as discovery:
        _require(discovery, call)
        found: Entry = await discovery.get_entry(public_key)
    lines = [
        f"public key  {found.static}",
        f"version     {printable(found.version)}",
        f"sequence    {found.sequence}",
        f"timestamp   {found.timestamp}",
    ]
    if found.client is not None:
        lines += [f"client via  {server}" for server in found.client.delegated_servers or ()] or [
            "client via  no server"
        ]
    if found.server is not None:
        room = found.server.available_connections
        lines.append(f"server at   {found.server.host_port} ({room} connections available)")
    call.out.result(json.loads(found.to_json()), *lines)


def _require(discovery: object, call: Invocation) -> None:
    if discovery is None:
        raise not_given("--discovery URL", "DMSG_DISCOVERY", call.settings)
