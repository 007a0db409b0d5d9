"""Paths to somewhere far away are as far and as narrow as they were asked to be."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from benchmarks import wan
from benchmarks.roles.link import Role
from benchmarks.sizes import TINY
from dmsg.testing.process import free_port


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


@pytest.fixture
def link(listener, request):
    role = Role({"to": listener.getsockname()[1], "delay_s": 0.05, **request.param})
    yield role
    role.close()


def ends(link, listener):
    near = socket.create_connection(("127.0.0.1", link.facts["port"]), 10)
    far, _ = listener.accept()
    far.settimeout(10)
    return near, far


@pytest.mark.parametrize("link", [{}], indirect=True)
def test_a_round_trip_is_twice_the_delay(link, listener):
    near, far = ends(link, listener)
    with near, far:
        began = time.monotonic()
        near.sendall(b"there")
        far.sendall(far.recv(100))
        assert near.recv(100) == b"there"
        assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("link", [{"bits_per_s": 8_000_000, "buffer_bytes": 20_000}], indirect=True)
def test_data_comes_at_the_rate_and_waits_when_the_path_is_full(link, listener):
    near, far = ends(link, listener)
    data = bytes(range(256)) * 4096  # 1 MiB: 1.05 s
    with near, far:
        near.setblocking(False)
        began, sent, got = time.monotonic(), 0, b""
        far.settimeout(0.01)
        while len(got) < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += near.send(data[sent : sent + 65536])
            with contextlib.suppress(TimeoutError):
                got += far.recv(65536)
        assert got == data
        assert time.monotonic() - began >= 1.0
    assert link.do("full", {})["full_s"][0] > 0.1


def test_ports_of_another_address_lead_to_those_of_the_same_numbers(listener):
    port = listener.getsockname()[1]
    other = free_port("127.0.0.2")
    link = Role({"to": [port, other], "host": "127.0.0.2", "delay_s": 0.0})
    near = socket.create_connection(("127.0.0.2", port), 10)
    far, _ = listener.accept()
    far.settimeout(10)
    with near, far:
        near.sendall(b"there")
        assert far.recv(100) == b"there"
    with socket.create_connection(("127.0.0.2", other), 10) as nobody:
        assert nobody.recv(1) == b""
    link.close()


@pytest.mark.parametrize("link", [{}], indirect=True)
def test_a_cut_ends_both_sides(link, listener):
    near, far = ends(link, listener)
    with near, far:
        link.do("cut", {})
        assert near.recv(1) == far.recv(1) == b""


@pytest.mark.long
@pytest.mark.system
def test_each_distance_gives_rows_and_what_is_not_installed_is_told(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("BENCH_OTHERS", raising=False)
    rows = wan.run(TINY)
    assert capsys.readouterr().err.splitlines() == [
        "left out: derper is not installed",
        "left out: wormhole is not installed",
    ]
    assert {one.bench for one in rows} == {"wan"}
    assert sum(bool(one.target) for one in rows) == 3
    assert all(one.value > 0 for one in rows)
