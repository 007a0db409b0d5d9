"""``dmsg servers`` and ``dmsg entry``: what is printed of entries."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager

import pytest
import pytest_twisted

from dmsg.address import PinnedServer
from dmsg.cli import lookup
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output
from dmsg.cli.ping import run_echo
from dmsg.cli.settings import Invocation, client_settings
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.testing.network import LocalNetwork

KEY = SecretKey(b"\x11" * 32)


@pytest.mark.parametrize(
    ("address", "port", "read"),
    [
        ("192.0.2.1:80", "", "192.0.2.1:80"),
        ("192.0.2.1", "8080", "192.0.2.1:8080"),
        ("2001:db8::1", "8080", "[2001:db8::1]:8080"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_addresses_are_printed_as_a_command_takes_them(monkeypatch, address, port, read):
    entry = Entry("0.0.1", 0, 1, KEY.public_key, server=ServerPart(address, 9, port)).sign(KEY)

    class Discovery:
        async def available_servers(self, protocol):
            return [entry]

        async def get_entry(self, public_key):
            return entry

    @asynccontextmanager
    async def opened(settings, reactor):
        yield Discovery()

    monkeypatch.setattr(lookup, "open_discovery", opened)
    written = io.StringIO()
    call = Invocation(client_settings({}), Output(written, io.StringIO(), json_lines=False))
    await lookup.list_servers(call, None)
    await lookup.show_entry(call, None, KEY.public_key)
    listed, *_, shown = written.getvalue().splitlines()
    assert str(PinnedServer.parse(listed.split()[0])) == f"{KEY.public_key}@{read}"
    assert shown == f"server at   {read} (9 connections available)"


@pytest.mark.parametrize(("protocol", "other"), [("dmsg", "messaging"), ("messaging", "dmsg")])
@pytest_twisted.ensureDeferred
async def test_who_finds_no_server_is_told_of_another_protocol(reactor, protocol, other):
    counts = {"relays": int(other == "dmsg"), "messaging_relays": int(other == "messaging")}
    async with LocalNetwork(reactor, discovery="http", **counts) as network:
        settings = client_settings({"discovery": network.discovery_url}, protocol)
        call = Invocation(settings, Output(io.StringIO(), io.StringIO(), json_lines=True))
        says = f"discovery knows no server with room for {protocol}, but one for --protocol {other}"
        for command, code in ((lookup.list_servers, Exit.NOT_FOUND), (run_echo, Exit.UNREACHABLE)):
            with pytest.raises(CommandError) as caught:
                await command(call, reactor)
            assert (str(caught.value), caught.value.exit) == (says, code)
