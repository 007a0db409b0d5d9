"""``twistd dmsg-shipper`` as an operator starts it: once, watched, stopped, killed; into a directory and into S3."""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.task import Clock

from dmsg.errors import ConfigError
from dmsg.eventlog.compress import read_lines
from dmsg.taps import shipper
from dmsg.taps.settings import ShipperSettings, Verify
from dmsg.testing.process import free_port

from .conftest import Program
from .test_options import parse, refusal
from .test_twistd import get

Start = Callable[..., Program]
TWISTD = ("twistd", "-n", "--pidfile=", "dmsg-shipper")
system = pytest.mark.system
limited = pytest.mark.time_limit(90)


def left(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


# --- options -----------------------------------------------------------------------------------------------------------


def test_everything_can_be_said(tmp_path: Path) -> None:
    line = f"--from {tmp_path} --to s3://b/p --once --keep --verify read --parallel 2 --poll-s 5 --events - --node s1"
    more = "--option endpoint_url=http://127.0.0.1:9000 --option region=eu-central-1 --attempts 7 --drain-timeout 3"
    settings = parse(shipper, *line.split(), *more.split())
    assert (settings.source, settings.target, settings.verify) == (tmp_path, "s3://b/p", Verify.READ)
    assert settings.option == "endpoint_url=http://127.0.0.1:9000 region=eu-central-1"
    assert settings.once and settings.keep and (settings.parallel, settings.attempts) == (2, 7)
    settings = parse(shipper, "--from", "x", "--to", "y")
    assert settings.source == Path.cwd() / "x" and not settings.once and not settings.keep
    settings = parse(shipper, DMSG_FROM="x", DMSG_TO="y", DMSG_ONCE="yes", DMSG_OPTION="a=b c=d", DMSG_LISTEN="tcp:1")
    assert settings.once and settings.option == "a=b c=d"


def test_settings_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "dmsg.toml"
    path.write_text('[server]\nkey = "k"\n[shipper]\nfrom = "events"\nto = "s3://b"\nonce = true\n')
    settings = parse(shipper, "--config", str(path))
    assert (settings.source, settings.target, settings.once) == (tmp_path / "events", "s3://b", True)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "dmsg-shipper: from: must be given (--from, DMSG_FROM, or [shipper] in --config)"),
        ("--from /a", "dmsg-shipper: to: must be given"),
        ("--from /a --to /a/b", "dmsg-shipper: to: must be neither the directory files are shipped from"),
        ("--from /a --to gopher://x/y", "dmsg-shipper: to: gopher:// is not known to fsspec"),
        ("--from /a --to memory://x", "dmsg-shipper: to: memory:// is the shipper's own memory"),
        ("--from /a --to s3://me:hunter2@[bad/x", "dmsg-shipper: to: must be a directory or a URL such as"),
        ("--from /a --to s3://b --option secret=hunter2", "dmsg-shipper: option: secret: credentials are given in"),
        ("--from /a --to s3://b --option endpoint", "dmsg-shipper: option: must be name=value"),
        ("--from /a --to /b --verify maybe", "dmsg-shipper: verify: must be one of auto, read"),
        ("--from /a --to /b --poll-s 0", "dmsg-shipper: poll_s: must be more than 0"),
        ("--from /a --to /b --retry-limit-s 0", "dmsg-shipper: retry_limit_s: must be more than 0"),
        ("--from /a --to /b --once=yes", "dmsg-shipper: option --once must not have an argument"),
        ("--from /a --to /b --listen tcp:1", "dmsg-shipper: option --listen not recognized"),
    ],
)
def test_mistakes_end_with_one_line(arguments: str, line: str) -> None:
    said = refusal(shipper, *arguments.split())
    assert said.startswith(line) and "hunter2" not in said


@pytest.mark.parametrize("name", ["poll_s", "retry_limit_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_no_pause_is_none_and_none_is_for_ever(name: str, value: float) -> None:
    """Settings made without options are checked, too."""
    settings = ShipperSettings(**{"source": Path("/a"), "target": "/b", name: value})
    with pytest.raises(ConfigError, match=f"{name}: must be more than 0, and finite"):
        shipper.ShipperService(Clock(), settings)


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    options = shipper.Options({})
    options.parseOptions(["--from", str(tmp_path), "--to", "ftp://me:hunter2@127.0.0.1/x"])
    service = shipper.makeService(options)
    assert service.where() == f"from {tmp_path} to ftp://…@127.0.0.1/x"


# --- once --------------------------------------------------------------------------------------------------------------


@system
@limited
def test_once_into_a_directory(start: Start, tmp_path: Path, event_file: Any, landed: Any) -> None:
    for number in range(3):
        event_file(tmp_path / "events", number)
    (tmp_path / "landing").mkdir()
    program = start(*TWISTD, "--from", "events", "--to", "landing", "--once", "--events", "own")
    assert program.wait() == 0, program.text
    assert f"dmsg-shipper runs, from {tmp_path}/events to {tmp_path}/landing" in program.text
    assert "Traceback" not in program.text
    assert [one for file in landed(tmp_path / "landing").values() for one in file] == [
        1000 * number + one for number in range(3) for one in range(3)
    ]
    assert not left(tmp_path / "events")


@system
@limited
def test_once_with_something_left(start: Start, tmp_path: Path, event_file: Any) -> None:
    event_file(tmp_path / "events")
    program = start(*TWISTD, "--from", "events", "--to", "missing", "--once", "--attempts", "1")
    assert program.wait() == 1
    assert "no_such_place" in program.text and "given up" in program.text and "Traceback" not in program.text
    assert len(left(tmp_path / "events")) == 1


@system
@limited
def test_once_into_s3_with_credentials_of_the_environment(
    start: Start, tmp_path: Path, event_file: Any, landed: Any, bucket: Any, s3_environ: dict[str, str]
) -> None:
    for number in range(3):
        event_file(tmp_path / "events", number, pad=1000)
    event_file(tmp_path / "events", 9, says=4)
    program = start(
        *TWISTD, "--from", "events", "--to", f"{bucket.url}/fleet", "--once",
        "--option", f"endpoint_url={bucket.endpoint}", "--option", "region=us-east-1", environ=s3_environ,
    )  # fmt: skip
    assert program.wait() == 1, "one was damaged"
    assert "a damaged file was not shipped" in program.text
    assert s3_environ["AWS_SECRET_ACCESS_KEY"] not in program.text
    there = landed(bucket.sync_to(tmp_path / "copy") / "fleet")
    assert [len(lines) for lines in there.values()] == [3, 3, 3]
    assert all(path.startswith("role=server/date=2026-01-02/hour=05/") for path in there)
    [kept] = left(tmp_path / "events")
    assert kept.relative_to(tmp_path / "events").parts[0] == ".damaged"


# --- watching ----------------------------------------------------------------------------------------------------------


@system
@limited
def test_it_watches_tells_how_it_is_and_ends_well(
    start: Start, tmp_path: Path, event_file: Any, landed: Any, s3_environ: dict[str, str]
) -> None:
    admin = free_port()
    landing = tmp_path / "landing"
    program = start(
        *TWISTD, "--from", "events", "--to", "landing", "--poll-s", "0.05", "--retry-limit-s", "0.2",
        "--events", "-", "--admin", f"tcp:{admin}:interface=127.0.0.1",
    )  # fmt: skip
    program.wait_for('"event":"server_started"')
    program.wait_for("dmsg-shipper runs, from")
    event_file(tmp_path / "events", 0)
    assert '"reason":"no_such_place"' in program.wait_for('"event":"file_shipped"')
    status, body = get(admin, "/readyz")
    assert status == 503 and body["reason"].startswith("no_such_place")
    assert "dmsg_shipper_backlog_files 1.0" in get(admin, "/metrics")[1]
    landing.mkdir()
    line = program.wait_for('"ok":true')
    assert '"reason":""' in line
    assert get(admin, "/readyz") == (200, {"status": "ready"})
    text = get(admin, "/metrics")[1]
    assert 'dmsg_files_shipped_total{result="ok"} 1.0' in text and "dmsg_shipped_lines_total 3.0" in text
    assert 'dmsg_files_shipped_total{result="no_such_place"}' in text
    assert "dmsg_shipper_backlog_files 0.0" in text and "dmsg_shipper_oldest_file_age_seconds 0.0" in text
    assert program.terminate() == 0
    assert '"event":"server_stopped"' in program.text and "Traceback" not in program.text
    assert len(landed(landing)) == 1 and not left(tmp_path / "events")


# --- killed ------------------------------------------------------------------------------------------------------------


@system
@limited
@pytest.mark.parametrize("kind", ["local", "s3"])
def test_killed_at_random_moments_every_line_arrives_once(
    kind: str, start: Start, tmp_path: Path, event_file: Any, landed: Any, request: Any
) -> None:
    """Whenever it is killed: each line is here or there, and in the end all are there, each file once."""
    chance = random.Random(7)
    events, landing = tmp_path / "events", tmp_path / "landing"
    total, kills = (60, 2) if kind == "local" else (16, 1)
    for number in range(total):
        event_file(events, number, pad=20_000)
    landing.mkdir()
    target, environ = [str(landing)], {}
    if kind == "s3":
        bucket = request.getfixturevalue("bucket")
        environ = request.getfixturevalue("s3_environ")
        target = [bucket.url, "--option", f"endpoint_url={bucket.endpoint}"]
    command = [*TWISTD, "--from", "events", "--parallel", "3", "--events", "-", "--to", *target]
    for _ in range(kills):
        program = start(*command, environ=environ)
        program.wait_for("dmsg-shipper runs, from")
        program.wait_for_many('"event":"file_shipped"', chance.randint(1, 7))
        program.kill()
        program.wait()
        if kind == "s3":
            bucket.sync_to(landing)
        there = {seq for lines in landed(landing).values() for seq in lines}
        here = {1000 * int(path.name.split("-")[2]) + one for path in left(events) for one in range(3)}
        assert there | here == {1000 * number + one for number in range(total) for one in range(3)}
    assert left(events), "it was killed in the midst of its work"
    assert start(*command, "--once", environ=environ).wait() == 0
    if kind == "s3":
        bucket.sync_to(landing)
    lines = [seq for file in landed(landing).values() for seq in file]
    assert lines == [1000 * number + one for number in range(total) for one in range(3)]
    assert not left(events)
    assert not [path for path in left(landing) if path.name.startswith(".")]


class Cutting:
    """Passes bytes on to a server until a client has sent ``limit`` of them at a time; then calls ``cut``."""

    def __init__(self, endpoint: str, limit: int) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._limit = limit
        self.cut: Callable[[], None] = lambda: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for arguments in ((client, server, self._limit), (server, client, 1 << 60)):
                self._threads.append(threading.Thread(target=self._pass, args=arguments))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, limit: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(4096):
                passed += len(piece)
                if passed > limit:
                    self.cut()
                    break
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections, and wait for the others to end."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()


@system
@limited
def test_killed_in_the_midst_of_an_upload(
    start: Start, tmp_path: Path, event_file: Any, landed: Any, bucket: Any, s3_environ: dict[str, str]
) -> None:
    events = tmp_path / "events"
    source = event_file(events, lines=4, pad=100_000)
    proxy = Cutting(bucket.endpoint, limit=source.stat().st_size // 2)
    command = [*TWISTD, "--from", "events", "--to", bucket.url, "--once"]
    program = start(*command, "--option", f"endpoint_url={proxy.endpoint}", environ=s3_environ)
    proxy.cut = program.kill
    assert program.wait() == -signal.SIGKILL, program.text
    proxy.close()
    assert bucket.keys() == [] and source.exists(), "half an object is none"
    assert start(*command, "--option", f"endpoint_url={bucket.endpoint}", environ=s3_environ).wait() == 0
    assert list(landed(bucket.sync_to(tmp_path / "copy")).values()) == [[0, 1, 2, 3]]
    assert not left(events)


@system
@limited
def test_two_at_once_and_a_sigterm_in_the_midst(start: Start, tmp_path: Path, event_file: Any, landed: Any) -> None:
    """New files come while both work, so that whichever is quicker cannot have them all."""
    made, events, landing = (tmp_path / name for name in ("made", "events", "landing"))
    landing.mkdir()
    enough, fed = threading.Event(), 0

    def feed() -> None:
        nonlocal fed
        while not enough.wait(0.01):
            file = event_file(made, fed, pad=10_000)
            target = events / file.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
            fed += 1

    one, other = (
        start(
            *TWISTD, "--from", "events", "--to", "landing", "--poll-s", "0.1", "--retry-limit-s", "0.5", "--events", "-"
        )
        for _ in range(2)
    )
    for program in (one, other):
        program.wait_for("dmsg-shipper runs, from")
    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        one.wait_for_many('"ok":true', 5)
        assert one.terminate() == 0 and "Traceback" not in one.text
        other.wait_for_many('"ok":true', 20)
        assert other.terminate() == 0 and "Traceback" not in other.text
    finally:
        enough.set()
        feeder.join()
    assert start(*TWISTD, "--from", "events", "--to", "landing", "--once").wait() == 0
    lines = [seq for file in landed(landing).values() for seq in file]
    assert lines == [1000 * number + one for number in range(fed) for one in range(3)]
    assert not [path for path in left(landing) if path.name.startswith(".")]


@system
@limited
def test_from_roles_into_the_landing_zone(start: Start, tmp_path: Path) -> None:
    """A discovery and a shipper that watches the directory both write to; nothing is missing in the end."""
    port = free_port()
    landing = tmp_path / "landing"
    landing.mkdir()
    short = ("--events", "events", "--events-rotate-s", "0.2")
    where = f"tcp:{port}:interface=127.0.0.1"
    found = start("twistd", "-n", "--pidfile=", "dmsg-discovery", "--listen", where, *short)
    found.wait_for("dmsg-discovery runs, on")
    program = start(*TWISTD, "--from", "events", "--to", "landing", "--poll-s", "0.1", *short)
    program.wait_for("dmsg-shipper runs, from")
    for _ in range(20):
        assert get(port, "/discovery/available_servers")[0] == 404
    assert found.terminate() == 0
    assert program.terminate() == 0
    for _ in range(2):
        assert start(*TWISTD, "--from", "events", "--to", "landing", "--once").wait() == 0
    runs: dict[str, list[dict[str, Any]]] = {}
    for path in landing.rglob("*.jsonl.zst"):
        for line in read_lines(path):
            runs.setdefault(json.loads(line)["role"], []).append(json.loads(line))
    for lines in runs.values():
        assert sorted(line["seq"] for line in lines) == list(range(len(lines)))
        assert {"server_started", "server_stopped"} <= {line["event"] for line in lines}
    assert len([line for line in runs["discovery"] if line["event"] == "discovery_request"]) == 20
    told = [line["name"] for line in runs["shipper"] if line["event"] == "file_shipped"]
    assert all(name.startswith("role=discovery/") for name in told)
    assert not left(tmp_path / "events")


@system
@limited
def test_a_target_that_hangs_does_not_keep_it_from_ending(
    start: Start, tmp_path: Path, event_file: Any, s3_environ: dict[str, str]
) -> None:
    source = event_file(tmp_path / "events")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        endpoint = f"endpoint_url=http://127.0.0.1:{silent.getsockname()[1]}"
        to = ("--to", "s3://b", "--option", endpoint, "--drain-timeout", "0.2", "--events", "-")
        program = start(*TWISTD, "--from", "events", *to, environ=s3_environ)
        client, _ = silent.accept()
        with client:
            assert program.terminate() == 0
    assert '"reason":"uploads were abandoned"' in program.text and "Traceback" not in program.text
    assert source.exists()
