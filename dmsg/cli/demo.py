"""``python -m dmsg.cli.demo``: everything at once on one machine, and proof that it works.

A discovery on SQLite and two relays run as ``twistd`` processes, ``dmsg receive`` and ``dmsg send`` as two more. A file
of random bytes goes from one client to the other; its SHA-256 is taken here, before and after. Then the event log of
every role is shown. Ends with 0 only when the file has arrived unharmed; otherwise the logs of the processes are shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

import dmsg
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, human_bytes
from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.ops.compress import read_lines

MEBIBYTE: Final = 1024 * 1024
RELAYS: Final = 2
#: How long each step may take, in seconds.
STEP_TIMEOUT_S: Final = 20.0
TRANSFER_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05
_LOG_TAIL_LINES: Final = 25
_EVENTS_SHOWN: Final = 6
_TWISTD: Final = (sys.executable, "-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile=")
_DMSG: Final = (sys.executable, "-m", "dmsg.cli.main")

#: What is worth showing of an event, besides its name.
_TELLING: Final = {
    "server_started": ("address", "version"),
    "server_stopped": ("reason", "duration_s"),
    "drained": ("elapsed_ms", "transports"),
    "connection_opened": ("remote", "handshake_ms"),
    "connection_closed": ("remote", "reason", "bytes_in", "bytes_out"),
    "transport_opened": ("initiator", "responder", "accept_ms"),
    "transport_closed": ("initiator", "responder", "reason", "bytes_in", "bytes_out"),
    "dial_finished": ("target", "ok", "elapsed_ms", "security"),
    "session_up": ("server", "duration_s"),
    "session_down": ("server", "reason", "duration_s"),
    "entry_published": ("kind", "sequence", "ok", "elapsed_ms"),
    "discovery_request": ("method", "path", "status", "elapsed_ms"),
}
_KEYS: Final = frozenset({"remote", "initiator", "responder", "target", "server"})


class Role:
    """One process: its ``name``, its log and what it wrote to standard output."""

    def __init__(self, name: str, home: Path, command: list[str]) -> None:
        self.name = name
        self.log = home / f"{name}.log"
        self.results = home / f"{name}.out"
        root = str(Path(dmsg.__file__).resolve().parent.parent)
        # Whatever the environment says about dmsg is about another network.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DMSG_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        with self.log.open("wb") as log, self.results.open("wb") as results:
            self.process = subprocess.Popen(
                command, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=results, stderr=log
            )

    def lines(self) -> list[dict[str, Any]]:
        """The JSON objects it has written so far."""
        text = self.results.read_text("utf-8", "replace")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def tail(self) -> list[str]:
        """The last lines of what it wrote."""
        written = [path.read_text("utf-8", "replace") for path in (self.results, self.log)]
        return "".join(written).splitlines()[-_LOG_TAIL_LINES:]

    def stop(self) -> None:
        """Ask it to end; make it end when it does not."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class RoleFailed(CommandError):
    """A process ended, or did not come to the point; its log tells why."""

    def __init__(self, role: Role, problem: str) -> None:
        super().__init__(f"{role.name}: {problem}")
        self.role = role


class Demo:
    """One run, in ``home``; ``size`` is that of the file in bytes."""

    #: Who gets a key.
    entities: tuple[str, ...] = ("relay-1", "relay-2", "sender", "receiver")

    def __init__(self, out: Output, home: Path, size: int) -> None:
        self._out = out
        self._home = home
        self._size = size
        self._roles: list[Role] = []
        self._keys = {name: SecretKey.generate() for name in self.entities}
        for name, key in self._keys.items():
            write_key_file(home / f"{name}.key", key)

    def run(self) -> None:
        """Do it; raises ``CommandError``."""
        try:
            url = self._start_network()
            self._transfer(url)
        except RoleFailed as error:
            self._out.note(f"--- log of {error.role.name}")
            for line in error.role.tail():
                self._out.note(line)
            raise
        finally:
            for role in reversed(self._roles):
                role.stop()
        self._show_events()

    def _start_network(self) -> str:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        self._say(f"discovery on SQLite at {url}")
        discovery = self._start(
            "discovery",
            *_TWISTD,
            "dmsg-discovery",
            *("--listen", f"tcp:{port}:interface=127.0.0.1", "--store", "sqlite:entries.sqlite"),
            *("--events", str(self._events("discovery"))),
        )
        self._wait(discovery, lambda: _listed(url) >= 0, "does not answer")
        relays = []
        for number in range(1, RELAYS + 1):
            name, port = f"relay-{number}", _free_port()
            self._say(f"{name} at 127.0.0.1:{port}")
            relays.append(self._start_relay(name, name, port, url))
        self._wait(relays[-1], lambda: _listed(url) == RELAYS, "is not listed in discovery", relays)
        return url

    def _start_relay(self, name: str, key: str, port: int, url: str) -> Role:
        return self._start(
            name,
            *_TWISTD,
            "dmsg-server",
            *("--key", f"{key}.key", "--listen", f"tcp:{port}:interface=127.0.0.1"),
            *("--public-address", f"127.0.0.1:{port}", "--discovery", url, "--drain-timeout", "1"),
            *("--events", str(self._events(key))),
        )

    def _transfer(self, url: str) -> None:
        inbox = self._home / "inbox"
        inbox.mkdir()
        receiver_key = str(self._keys["receiver"].public_key)
        common = ("--json", "--discovery", url)
        self._say(f"dmsg receive, key {receiver_key}")
        receiver = self._start(
            "receiver",
            *(*_DMSG, "receive", str(inbox), "--once", *common, "--key", "receiver.key"),
            *("--allow", str(self._keys["sender"].public_key), "--events", str(self._events("receiver"))),
        )
        self._wait(receiver, lambda: bool(receiver.lines()), "does not get ready")
        source = self._home / "payload.bin"
        digest = _write_random(source, self._size)
        self._say(f"dmsg send of {human_bytes(self._size)}, SHA-256 {digest}")
        sender = self._start(
            "sender",
            *(*_DMSG, "send", receiver_key, str(source), *common, "--key", "sender.key"),
            *("--events", str(self._events("sender"))),
        )
        for role in (sender, receiver):
            try:
                code = role.process.wait(TRANSFER_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise RoleFailed(role, f"is not done after {TRANSFER_TIMEOUT_S:g} s") from None
            if code:
                raise RoleFailed(role, f"ended with {code}")
        received = inbox / source.name
        if not received.is_file() or _sha256(received) != digest:
            raise CommandError("the received file is not the one that was sent", Exit.UNVERIFIED)
        result = sender.lines()[-1]
        rate, elapsed_s = result["bytes_per_s"], result["elapsed_s"]
        data = {"verified": True, "sha256": digest, "size_bytes": self._size}
        data |= {name: result[name] for name in ("server", "security", "elapsed_s", "bytes_per_s")}
        self._out.result(
            data,
            f"verified: {human_bytes(self._size)} in {elapsed_s:.2f} s, {human_bytes(rate)}/s"
            f" through {result['server'][:16]}… ({result['security']})",
        )

    def _start(self, name: str, *command: str) -> Role:
        role = Role(name, self._home, list(command))
        self._roles.append(role)
        return role

    def _wait(self, role: Role, ready: Callable[[], bool], problem: str, watched: list[Role] | None = None) -> None:
        give_up = time.monotonic() + STEP_TIMEOUT_S
        while not ready():
            for one in watched or [role]:
                if one.process.poll() is not None:
                    raise RoleFailed(one, f"ended with {one.process.returncode}")
            if time.monotonic() > give_up:
                raise RoleFailed(role, f"{problem} within {STEP_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def _events(self, name: str) -> Path:
        return self._home / "events" / name

    def _say(self, line: str) -> None:
        self._out.note(line)

    def _show_events(self) -> None:
        names = {str(key.public_key): name for name, key in self._keys.items()}
        rows: list[tuple[str, str, str, str]] = []
        events = {role.name: _read_events(self._events(role.name)) for role in self._roles}
        first = min((event["ts"] for found in events.values() for event in found), default=0.0)
        for role, found in events.items():
            half = _EVENTS_SHOWN // 2
            shown = found if len(found) <= _EVENTS_SHOWN else [*found[:half], None, *found[-half:]]
            for event in shown:
                if event is None:
                    rows.append((role, "", f"… {len(found) - 2 * half} more", ""))
                else:
                    rows.append((role, f"{event['ts'] - first:.3f}", event["event"], _details(event, names)))
        self._out.table("Events", ("role", "seconds", "event", "what"), rows)
        missing = [role for role, found in events.items() if not found]
        if missing:
            raise CommandError(f"no events were logged by {', '.join(missing)}")


def _details(event: dict[str, Any], names: dict[str, str]) -> str:
    parts = []
    for field in _TELLING.get(event["event"], ()):
        value = event.get(field)
        if field in _KEYS:
            value = names.get(str(value), str(value)[:12])
        elif isinstance(value, float):
            value = f"{value:.2f}"
        parts.append(f"{field}={value}")
    return " ".join(parts)


def _read_events(directory: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(directory.rglob("*.jsonl.zst")) for line in read_lines(path)]
    return sorted(map(json.loads, lines), key=lambda event: (event["ts"], event["seq"]))


def _listed(url: str) -> int:
    """How many servers discovery lists; -1 when it does not answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
    try:
        with opener.open(f"{url}/discovery/available_servers", timeout=STEP_TIMEOUT_S) as answer:
            return len(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return 0 if error.code == 404 else -1
    except OSError:
        return -1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_random(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, size, MEBIBYTE):
            block = os.urandom(min(MEBIBYTE, size - start))
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MEBIBYTE):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _home(directory: str | None) -> Iterator[Path]:
    if directory is None:
        path = Path(tempfile.mkdtemp(prefix="dmsg-demo-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
    else:
        path = Path(directory).resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise CommandError(f"{path} is not empty", Exit.USAGE)
        yield path


@click.command()
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Empty directory to work in, and to keep.")
@click.option("--size", type=click.IntRange(1, 4096), default=64, show_default=True, help="Size of the file in MiB.")
@click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
def command(directory: str | None, size: int, json_lines: bool) -> None:
    """Send a file between two clients through twistd-run relays, verify it, and show what was logged."""
    out = Output(sys.stdout, sys.stderr, json_lines=json_lines)
    began = time.monotonic()
    # Asked to end, it ends its processes, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _home(directory) as home:
            Demo(out, home, size * MEBIBYTE).run()
    except CommandError as error:
        out.failure(error)
        sys.exit(error.exit)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    out.note(f"demo: all well after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    command(prog_name="python -m dmsg.cli.demo")
