"""``twistd dmsg-discovery``: what it lists, by its settings."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import Entry, ServerPart
from dmsg.testing.process import free_port

from .conftest import Program
from .test_twistd import get


def post(port: int, address: str) -> tuple[int, str]:
    """Register a server that is not there: status and text."""
    key = SecretKey.generate()
    entry = Entry("0.0.1", 0, time.time_ns(), key.public_key, None, ServerPart(address, 5)).sign(key)
    request = urllib.request.Request(f"http://127.0.0.1:{port}/discovery/entries", entry.to_json(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["message"]


@pytest.mark.parametrize(
    ("options", "loopback", "listed"),
    [
        ([], 200, 0),
        (["--list-unproven"], 200, 1),
        (["--list-unproven", "--private-addresses", "no"], 422, 0),
    ],
    ids=["proving", "not proving", "global addresses only"],
)
def test_what_is_listed(start: Callable[..., Program], options: list[str], loopback: int, listed: int) -> None:
    port, admin, nothing = free_port(), free_port(), free_port()
    command = ["twistd", "-n", "--pidfile=", "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1"]
    program = start(*command, "--admin", f"tcp:{admin}:interface=127.0.0.1", *options)
    program.wait_for(f"dmsg-discovery runs, on tcp:{port}")
    assert post(port, "10.0.0.1:80") == (
        (200, "wrote a new entry") if listed else (422, "server address is not global")
    )
    assert post(port, f"127.0.0.1:{nothing}")[0] == loopback
    status, body = get(port, "/discovery/available_servers")
    assert (status, len(body)) == ((200, 2) if listed else (404, len(body)))
    metrics = get(admin, "/metrics")[1]
    assert ("dmsg_discovery_proofs_refused 1.0" in metrics) is (not options)
    assert ("dmsg_discovery_relays_listed" in metrics) is (not options)
    assert program.terminate() == 0
    assert "Traceback" not in program.text
