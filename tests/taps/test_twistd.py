"""The exact command lines of the documentation, as processes."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from twisted.internet.interfaces import IStreamServerEndpoint

from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.names import LogFileName, folder
from dmsg.testing.process import environ_without_settings, free_port

from .conftest import Program

pytestmark = pytest.mark.system
KEY = SecretKey(b"\x11" * 32)
Start = Callable[..., Program]
RUNNERS = [("twistd", "-n", "--pidfile="), ("twist", "--log-format=text")]


def get(port: int, path: str) -> tuple[int, Any]:
    """Status and JSON (or text) of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, _body(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _body(error)


def _body(answer: Any) -> Any:
    text = answer.read().decode()
    return json.loads(text) if answer.headers["content-type"] == "application/json" else text


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Every line of every published file, checked against what the files are called."""
    lines = []
    for path in sorted(directory.rglob("*.jsonl.zst")):
        held = [json.loads(line) for line in read_lines(path)]
        name = LogFileName.parse(path.name)
        assert name is not None and name.lines == len(held)
        assert str(path.parent.relative_to(directory)) == folder(held[0]["role"], held[0]["ts"])
        assert {(name.node, name.boot)} == {(line["node"], line["boot"]) for line in held}
        lines += held
    return lines


def test_help_lists_both_roles(start: Start) -> None:
    for command in ("twistd", "twist"):
        program = start(command, "--help")
        assert program.wait() == 0
        assert "dmsg-server" in program.text and "dmsg-discovery" in program.text


@pytest.mark.parametrize(
    ("output", "status", "told"),
    [
        ("/dev/full", 1, "dmsg-server: standard output: No space left on device\n"),
        ("", 0, ""),
    ],
)
def test_a_help_that_cannot_be_written_is_no_traceback(plugin_path: Path, output: str, status: int, told: str) -> None:
    """Without ``output`` its reader has gone."""
    command = [str(Path(sys.executable).with_name("twistd")), "dmsg-server", "--help"]
    if output:
        descriptor = os.open(output, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    environ = environ_without_settings() | {"PYTHONPATH": str(plugin_path)}
    try:
        ended = subprocess.run(command, env=environ, stdout=descriptor, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(descriptor)
    assert (ended.returncode, ended.stderr) == (status, told)


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
def test_a_discovery_serves_and_ends_well(start: Start, runner: tuple[str, ...], tmp_path: Path) -> None:
    port, admin = free_port(), free_port()
    command = [*runner, "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1", "--store"]
    more = ["--events", "events", "--admin", f"tcp:{admin}:interface=127.0.0.1"]
    program = start(*command, f"sqlite:{tmp_path}/entries.db", *more)
    program.wait_for(f"dmsg-discovery runs, on tcp:{port}")
    assert get(port, "/discovery/available_servers")[0] == 404
    assert get(admin, "/readyz") == (200, {"status": "ready"})
    status, text = get(admin, "/metrics")
    assert status == 200 and 'path="discovery/available_servers",status="404"' in text
    assert get(port, "/metrics")[0] == 404
    assert program.terminate() == 0
    assert "Traceback" not in program.text
    events = read_events(tmp_path / "events")
    assert [event.get("path", event["event"]) for event in events] == [
        "server_started",
        "discovery/available_servers",
        "unknown",
        "drained",
        "server_stopped",
    ]
    assert [event["seq"] for event in events] == [0, 1, 2, 3, 4]
    assert events[0]["address"] == f"127.0.0.1:{port}"
    assert not list((tmp_path / "events").rglob("*.part"))


@pytest.mark.parametrize(
    ("options", "environ", "reactor"),
    [
        ((), {}, "dmsg.glue.lean_epoll.LeanEpollReactor"),
        ((), {"DMSG_REACTOR": "poll"}, "twisted.internet.pollreactor.PollReactor"),
        (("--reactor=epoll",), {"DMSG_REACTOR": "poll"}, "twisted.internet.epollreactor.EPollReactor"),
    ],
)
def test_a_role_runs_on_our_reactor_unless_another_is_asked_for(
    start: Start, options: tuple[str, ...], environ: dict[str, str], reactor: str
) -> None:
    listen = f"tcp:{free_port()}:interface=127.0.0.1"
    command = [*RUNNERS[0], *options, "dmsg-discovery", "--listen", listen, "--store", "memory:"]
    program = start(*command, environ={"DMSG_REACTOR": "", **environ})
    program.wait_for("dmsg-discovery runs, on tcp:")
    assert f"reactor class: {reactor}." in program.text
    assert program.terminate() == 0


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(256, 3_000, 3_000), (256, 256, 256)])
def test_a_role_has_as_many_descriptors_as_it_may_have(start: Start, soft: int, hard: int, allowed: int) -> None:
    """Systems start a program with 1,024, and one address of a relay may have as many connections."""
    listen = f"tcp:{free_port()}:interface=127.0.0.1"
    command = [*RUNNERS[0], "dmsg-discovery", "--listen", listen, "--store", "memory:"]
    program = start(*command, descriptors=(soft, hard))
    program.wait_for("dmsg-discovery runs, on tcp:")
    limits = Path(f"/proc/{program.pid}/limits").read_text()
    assert re.search(rf"Max open files +{allowed} +{hard} ", limits)
    assert program.terminate() == 0


def test_connections_for_which_there_is_no_descriptor_do_not_fill_the_log(start: Start) -> None:
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    program = start(*RUNNERS[0], "dmsg-discovery", "--listen", listen, "--store", "memory:", descriptors=(48, 48))
    program.wait_for("dmsg-discovery runs, on tcp:")
    with contextlib.ExitStack() as held:
        for _ in range(48):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port)) as refused:
                assert refused.recv(1) == b""
    assert program.terminate() == 0
    told = [line for line in program.text.splitlines() if "cannot be accepted" in line]
    assert 1 <= len(told) <= 3 and "all 48 file descriptors of this process are in use" in told[0]
    assert "LimitNOFILE" in told[0] and "EMFILE" not in program.text


def test_a_first_request_needs_no_descriptor_but_that_of_its_connection(start: Start) -> None:
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    program = start(*RUNNERS[0], "dmsg-discovery", "--listen", listen, "--store", "memory:", descriptors=(48, 48))
    program.wait_for("dmsg-discovery runs, on tcp:")
    with contextlib.ExitStack() as held:
        first = held.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(48):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port)) as refused:
            assert refused.recv(1) == b""
        first.sendall(b"GET /discovery/available_servers HTTP/1.1\r\nHost: here\r\n\r\n")
        assert first.recv(1024).startswith(b"HTTP/1.1 404 ")
    assert program.terminate() == 0
    assert "Traceback" not in program.text


_LATE = """
import time

from twisted.internet import defer, error, interfaces, task
from twisted.plugin import IPlugin
from zope.interface import implementer

@implementer(interfaces.IStreamServerEndpoint)
class Endpoint:
    def __init__(self, reactor, what):
        self.reactor, self.what = reactor, what

    def listen(self, factory):
        if self.what == "breaks":
            self.reactor.callInThread(time.sleep, 0)
            self.reactor.mainLoop = self.fail
        if self.what != "fails":
            return defer.Deferred()
        failed = error.CannotListenError("here", 1, OSError("it is not to be had"))
        return task.deferLater(self.reactor, 0.1, defer.fail, failed)

    def fail(self):
        raise MemoryError("there is no more")

@implementer(IPlugin, interfaces.IStreamServerEndpointStringParser)
class Parser:
    prefix = "late"

    def parseStreamServer(self, reactor, what):
        return Endpoint(reactor, what)

late = Parser()
"""


@pytest.fixture
def late(tmp_path: Path, plugin_path: Path) -> dict[str, str]:
    """An environment with endpoints that take their time: "late:waits" and "late:fails". "late:breaks" breaks the reactor."""
    (tmp_path / "site" / "twisted" / "plugins").mkdir(parents=True)
    (tmp_path / "site" / "twisted" / "plugins" / "late.py").write_text(_LATE)
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{plugin_path}"}


ROLES = ["dmsg-discovery", "dmsg-server", "rmb-relay"]


def options_of(role: str, key_file: Callable[[SecretKey], Path]) -> tuple[str, ...]:
    return {"dmsg-server": ("--key", str(key_file(KEY))), "rmb-relay": ("--registry", "twins.sqlite")}.get(role, ())


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_not_ready_before_it_listens(
    start: Start, late: dict[str, str], key_file: Callable[[SecretKey], Path], role: str
) -> None:
    admin = free_port()
    more = ("--listen", "late:waits", "--admin", f"tcp:{admin}:interface=127.0.0.1", *options_of(role, key_file))
    program = start(*RUNNERS[0], role, *more, environ=late)
    program.wait_for(f"{role} runs, on late:waits")
    assert get(admin, "/readyz")[0] == 503
    assert program.terminate() == 0
    assert "Traceback" not in program.text, program.text


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
def test_a_role_whose_reactor_fails_ends_with_a_status(
    start: Start, late: dict[str, str], runner: tuple[str, ...]
) -> None:
    """Although a thread of the reactor's pool still waits for work."""
    program = start(*runner, "dmsg-discovery", "--listen", "late:breaks", "--store", "memory:", environ=late)
    assert program.wait() == 1
    assert "the program ends: its reactor has failed" in program.text and "there is no more" in program.text


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_finds_out_late_that_it_cannot_listen_ends(
    start: Start, late: dict[str, str], key_file: Callable[[SecretKey], Path], role: str
) -> None:
    program = start(*RUNNERS[0], role, "--listen", "late:fails", *options_of(role, key_file), environ=late)
    assert program.wait() == 1
    assert "listen: cannot listen on late:fails: it is not to be had" in program.text
    assert "Unhandled error" not in program.text, program.text


def test_a_discovery_on_redis(start: Start, redis_url: str) -> None:
    port = free_port()
    program = start(*RUNNERS[1], "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1", "--store", redis_url)
    program.wait_for(f"dmsg-discovery runs, on tcp:{port}")
    assert get(port, "/discovery/available_servers")[0] == 404
    assert program.terminate() == 0


def test_a_discovery_speaks_https_with_clients_that_say_what_they_speak(
    start: Start, tmp_path: Path, self_signed: Any
) -> None:
    """Most do, by ALPN; Twisted's does not."""
    (tmp_path / "site.pem").write_bytes(self_signed(x509.IPAddress(ipaddress.ip_address("127.0.0.1"))))
    port = free_port()
    listen = f"ssl:port={port}:interface=127.0.0.1:privateKey=site.pem"
    start(*RUNNERS[0], "dmsg-discovery", "--listen", listen, "--store", "memory:").wait_for("dmsg-discovery runs")
    for offered, spoken in (([], None), (["http/1.1"], "http/1.1"), (["h2", "http/1.1"], "http/1.1")):
        trusting = ssl.create_default_context(cafile=str(tmp_path / "site.pem"))
        if offered:
            trusting.set_alpn_protocols(offered)
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            trusting.wrap_socket(plain, server_hostname="127.0.0.1") as sealed,
        ):
            assert sealed.selected_alpn_protocol() == spoken
            sealed.sendall(b"GET /discovery/available_servers HTTP/1.0\r\n\r\n")
            with sealed.makefile("rb") as answer:
                assert answer.readline().endswith(b" 404 Not Found\r\n")


@pytest.mark.parametrize("role", ["dmsg-discovery", "dmsg-server"])
def test_a_role_whose_sockets_were_removed_stops_in_order(
    start: Start, tmp_path: Path, key_file: Any, role: str
) -> None:
    """Something tidies up under /tmp or /run while the role serves there."""
    more = ("--key", str(key_file(KEY))) if role == "dmsg-server" else ()
    program = start(
        *RUNNERS[0], role, *more, "--listen", "unix:s", "--admin", "unix:a", "--events", "events"
    )  # fmt: skip
    program.wait_for(f"{role} runs, on unix:s")
    for name in ("s", "a"):
        (tmp_path / name).unlink()
    assert program.terminate() == 0
    assert [event["event"] for event in read_events(tmp_path / "events")][-2:] == ["drained", "server_stopped"]
    assert not list((tmp_path / "events").rglob("*.part"))
    assert "Traceback" not in program.text
    assert "s was not closed well: s: No such file or directory" in program.text


def test_a_socket_of_systemd_outlives_the_role(start: Start) -> None:
    """Who connects while the role is being started again waits for the new one."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1]
        command = [*RUNNERS[0], "dmsg-discovery", "--listen", "systemd:domain=INET:index=0", "--store", "memory:"]
        first = start(*command, listens=listens)
        first.wait_for("dmsg-discovery runs, on systemd:")
        assert get(port, "/discovery/available_servers")[0] == 404
        assert first.terminate() == 0
        with socket.create_connection(("127.0.0.1", port)) as waiting:
            waiting.sendall(b"GET /discovery/available_servers HTTP/1.0\r\n\r\n")
            second = start(*command, listens=listens)
            assert waiting.makefile("rb").readline().endswith(b" 404 Not Found\r\n")
        assert second.terminate() == 0


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
def test_a_server_registers_drains_and_withdraws(start: Start, runner: tuple[str, ...], key_file: Any) -> None:
    port, relay, admin = free_port(), free_port(), free_port()
    found = start(*runner, "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1", "--store", "memory:")
    found.wait_for(f"dmsg-discovery runs, on tcp:{port}")
    program = start(
        *runner, "dmsg-server", "--key", str(key_file(KEY)), "--listen", f"tcp:{relay}:interface=127.0.0.1",
        "--public-address", f"127.0.0.1:{relay}", "--discovery", f"http://127.0.0.1:{port}",
        "--events", "-", "--admin", f"tcp:{admin}:interface=127.0.0.1",
    )  # fmt: skip
    assert f'"address":"127.0.0.1:{relay}"' in program.wait_for('"event":"server_started"')
    assert '"ok":true' in program.wait_for('"event":"entry_published"')
    status, [entry] = get(port, "/discovery/available_servers")
    assert (status, entry["static"], entry["server"]["address"]) == (200, str(KEY.public_key), f"127.0.0.1:{relay}")
    assert get(admin, "/readyz")[0] == 200
    assert "dmsg_server_connections 0.0" in get(admin, "/metrics")[1]
    assert program.terminate() == 0
    assert '"event":"drained"' in program.text and '"event":"server_stopped"' in program.text
    assert "Traceback" not in program.text
    assert bytes(KEY).hex() not in program.text
    assert get(port, "/discovery/available_servers")[0] == 404
    assert found.terminate() == 0


def test_relays_of_all_protocols_serve_the_same_metrics(start: Start, key_file: Any) -> None:
    key = str(key_file(KEY))

    def metrics(role: str) -> set[str]:
        admin = free_port()
        command = [*RUNNERS[1], role, "--key", key, "--listen", f"tcp:{free_port()}:interface=127.0.0.1"]
        program = start(*command, "--admin", f"tcp:{admin}:interface=127.0.0.1")
        program.wait_for(f"{role} runs, on tcp:")
        status, text = get(admin, "/metrics")
        assert status == 200 and program.terminate() == 0
        return {line.rpartition(" ")[0] for line in text.splitlines()}

    names = metrics("dmsg-server")
    assert names == metrics("messaging-server")
    assert "dmsg_server_connections" in names and len(names) > 50


def test_settings_come_from_file_and_environment(start: Start, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "etc").mkdir()
    table = '[discovery]\nlisten = "tcp:1"\nstore = "sqlite:entries.db"\nevents = "events"\n'
    (tmp_path / "etc" / "dmsg.toml").write_text(table)
    program = start(
        *RUNNERS[1], "dmsg-discovery", "--config", "etc/dmsg.toml",
        environ={"DMSG_LISTEN": f"tcp:{port}:interface=127.0.0.1"},
    )  # fmt: skip
    program.wait_for(f"dmsg-discovery runs, on tcp:{port}")
    assert program.terminate() == 0
    assert (tmp_path / "etc" / "entries.db").exists()
    assert read_events(tmp_path / "etc" / "events")


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("dmsg-server", "--key", "missing"), "dmsg-server: key: "),
        (("dmsg-discovery", "--store", "gopher:"), "dmsg-discovery: store: a store is memory:, sqlite:PATH or "),
        (("dmsg-discovery", "--colour", "red"), "dmsg-discovery: option --colour not recognized"),
        (
            ("dmsg-discovery", "--events", "/dev/null/x"),
            "dmsg-discovery: events: /dev/null/x cannot be used: Not a dir",
        ),
        (("dmsg-discovery", "--limit-headers", "-3"), "dmsg-discovery: limit_headers: must not be negative"),
    ],
)
def test_mistakes_end_with_one_line_and_a_status(
    start: Start, runner: tuple[str, ...], arguments: tuple[str, ...], line: str
) -> None:
    program = start(*runner, *arguments, "--listen", "tcp:0:interface=127.0.0.1")
    assert program.wait() == 1
    assert line in program.text.splitlines()[-1]
    assert "Traceback" not in program.text


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
def test_a_reactor_that_is_none_is_a_mistake_like_others(start: Start, runner: tuple[str, ...]) -> None:
    program = start(*runner, "dmsg-discovery", "--listen", "tcp:0", environ={"DMSG_REACTOR": "pol"})
    assert program.wait() == 1
    assert program.text.splitlines()[-1] == "dmsg-discovery: reactor: 'pol' is none; twistd --help-reactors lists them"


def test_a_daemon_runs_on_our_reactor(start: Start, tmp_path: Path) -> None:
    port = free_port()
    listen = f"tcp:{port}:interface=127.0.0.1"
    command = [
        "twistd",
        "--pidfile=pid",
        "--logfile",
        "log",
        "dmsg-discovery",
        "--listen",
        listen,
        "--store",
        "memory:",
    ]
    assert start(*command, environ={"DMSG_REACTOR": ""}).wait() == 0
    daemon = int((tmp_path / "pid").read_text())
    try:
        assert "LeanEpollReactor" in (tmp_path / "log").read_text()
        assert get(port, "/discovery/available_servers")[0] == 404
    finally:
        os.kill(daemon, signal.SIGTERM)


@pytest.mark.parametrize("runner", RUNNERS, ids=["twistd", "twist"])
def test_a_port_in_use_ends_with_one_line_and_a_status(start: Start, runner: tuple[str, ...], key_file: Any) -> None:
    key = str(key_file(KEY))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"tcp:{taken.getsockname()[1]}:interface=127.0.0.1"
        for role in (("dmsg-discovery",), ("dmsg-server", "--key", key)):
            program = start(*runner, *role, "--listen", where)
            assert program.wait() == 1
            expected = f"{role[0]}: listen: cannot listen on {where}: Address already in use"
            assert program.text.splitlines()[-1].endswith(expected)
            assert "Traceback" not in program.text


def test_a_daemon_tells_the_terminal_what_is_wrong(start: Start) -> None:
    program = start(
        "twistd", "--pidfile=", "--logfile", "log", "dmsg-discovery", "--store", "gopher:", "--listen", "tcp:0"
    )
    assert program.wait() == 1
    assert "store: a store is memory:" in program.text


def test_endpoints_bound_early_are_endpoints() -> None:
    from twisted.internet import reactor

    from dmsg.taps._service import BoundEndpoint

    assert IStreamServerEndpoint.providedBy(BoundEndpoint(reactor, "listen", "tcp:0"))
