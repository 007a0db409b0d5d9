"""The Reliable Message Bus on tfchain: a relay and commands as processes, and two nodes of a chain, over sockets."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
import treq

from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key
from dmsg.testing.process import Process, free_port
from tests.rmb.twins.fake_node import Chain, FakeNode

pytestmark = pytest.mark.system


@pytest_twisted.ensureDeferred
async def test_a_call_between_twins_of_the_chain_though_one_node_lies(
    reactor: Any, tmp_path: Path, plugin_path: Path
) -> None:
    chain = Chain()
    nodes = [FakeNode(reactor, chain, 0, "127.0.0.1") for _ in range(2)]
    nodes[0].lies["state_getStorage"] = lambda params: "0x00"
    urls = [word for node in nodes for word in ("--substrate", f"ws://127.0.0.1:{node.port.getHost().port}")]
    for number, name in enumerate(("alice", "bob"), 1):
        key = make_twin_key(tmp_path / name, KeyType.SR25519, os.urandom)
        chain.twin(number, key.account, "old.example")
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
    environ = {**clean, "PYTHONPATH": str(plugin_path), "PYTHONUNBUFFERED": "1"}

    def process(*arguments: str) -> Process:
        return Process(reactor, [sys.executable, "-m", *arguments], environ=environ, directory=tmp_path)

    def command(name: str, *arguments: str) -> Process:
        bus = ("--key", name, "--relay", f"ws://localhost:{port}", *urls)
        return process("dmsg.cli.main", "rmb", *arguments, *bus)

    listen = ("--listen", f"tcp:{port}:interface=127.0.0.1", "--domain", "localhost")
    relay = process("twisted", "--log-format=text", "rmb-relay", "--events", "-", *listen, *urls)
    try:
        async with relay:
            await relay.line("server_started")
            async with command("alice", "serve", "shout", "--exec", "tr a-z A-Z") as serving:
                await serving.line("shout")
                async with command("bob", "call", "1", "shout", "--data", "hello", "--json") as calling:
                    answer = json.loads((await calling.line(r"^\{.*data.*\}$")).group())
                    assert await calling.ended() == 0
            metrics = await treq.get(f"http://127.0.0.1:{port}/metrics", persistent=False)
            # not the entries: one is forgotten when the chain says that its twin was changed
            [misses] = re.findall(r"^rmb_cache_misses_total ([0-9.]+)$", await metrics.text(), re.MULTILINE)
            assert float(misses) >= 2
        assert answer["data"] == "HELLO"
        assert chain.transactions == 2
    finally:
        for node in nodes:
            await node.close()
