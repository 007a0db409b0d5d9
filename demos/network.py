"""``python -m demos.network``: everything at once on one machine, and proof that it works.

A discovery on SQLite and two relays run as ``twistd`` processes, ``dmsg receive`` and ``dmsg send`` as two more. A file
of random bytes goes from one client to the other; its SHA-256 is compared. Then the event log of
every role is shown. Ends with 0 only when the file has arrived unharmed; otherwise the logs of the processes are shown.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from demos.parts import DMSG, TWISTD, Role, RoleFailed, ask, demo_command, sha256, write_random
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, human_bytes
from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.eventlog.compress import read_lines
from dmsg.testing.process import free_port

RELAYS: Final = 2
#: How long each step may take, in seconds.
STEP_TIMEOUT_S: Final = 20.0
TRANSFER_TIMEOUT_S: Final = 60.0
#: The pause between two looks, in seconds. Looking again and again is the only way from outside: most processes do not
#: say when they have become ready.
_POLL_S: Final = 0.05
_EVENTS_SHOWN: Final = 6

#: Fields of an event to show, besides its name.
_TELLING: Final = {
    "server_started": ("address", "version"),
    "server_stopped": ("reason", "duration_s"),
    "drained": ("elapsed_ms", "transports"),
    "connection_opened": ("remote", "handshake_ms"),
    "handshake_failed": ("stage", "reason"),
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


class Demo:
    """One run, in ``home``; ``size`` is that of the file in bytes."""

    #: Names that get a key.
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
        """Run it; raises ``CommandError``."""
        try:
            self._play()
        except RoleFailed as error:
            self._out.note(f"--- log of {error.role.name}")
            for line in error.role.tail():
                self._out.note(line)
            raise
        finally:
            self._stop_all()
        self._show()

    def _play(self) -> None:
        self._transfer(self._start_network())

    def _stop_all(self) -> None:
        for role in reversed(self._roles):
            role.stop()

    def _start_network(self) -> str:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        self._say(f"discovery on SQLite at {url}")
        discovery = self._start(
            "discovery",
            *TWISTD,
            "dmsg-discovery",
            *("--listen", f"tcp:{port}:interface=127.0.0.1", "--store", "sqlite:entries.sqlite"),
            *("--events", str(self._events("discovery"))),
        )
        self._wait(discovery, lambda: _listed(url) >= 0, "does not answer")
        relays = []
        for number in range(1, RELAYS + 1):
            name, port = f"relay-{number}", free_port()
            self._say(f"{name} at 127.0.0.1:{port}")
            relays.append(self._start_relay(name, name, port, url))
        self._wait(relays[-1], lambda: _listed(url) == RELAYS, "is not listed in discovery", relays)
        return url

    def _start_relay(self, name: str, key: str, port: int, url: str) -> Role:
        return self._start(
            name,
            *TWISTD,
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
            *(*DMSG, "receive", str(inbox), "--once", *common, "--key", "receiver.key"),
            *("--allow", str(self._keys["sender"].public_key), "--events", str(self._events("receiver"))),
        )
        self._wait(receiver, lambda: bool(receiver.lines()), "does not get ready")
        source = self._home / "payload.bin"
        digest = write_random(source, self._size)
        self._say(f"dmsg send of {human_bytes(self._size)}, SHA-256 {digest}")
        sender = self._start(
            "sender",
            *(*DMSG, "send", receiver_key, str(source), *common, "--key", "sender.key"),
            *("--events", str(self._events("sender"))),
        )
        for role in (sender, receiver):
            self._finish(role, TRANSFER_TIMEOUT_S)
        received = inbox / source.name
        if not received.is_file() or sha256(received) != digest:
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

    def _wait(
        self,
        role: Role,
        ready: Callable[[], bool],
        problem: str,
        watched: list[Role] | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        """Wait until it is ``ready``; raises ``RoleFailed`` if it is not in time, or if one of the ``watched`` ends."""
        give_up = time.monotonic() + STEP_TIMEOUT_S
        while not ready():
            for one in watched or [role]:
                if one.process.poll() is not None:
                    raise RoleFailed(one, f"ended with {one.process.returncode}")
            if time.monotonic() > give_up:
                raise RoleFailed(role, f"{problem} within {STEP_TIMEOUT_S:g} s")
            time.sleep(poll_s)  # a script without a reactor, and processes that do not report

    def _finish(self, role: Role, timeout_s: float, *, may_fail: bool = False) -> None:
        """Wait for its end; raises ``RoleFailed`` if it is late, or ends with an error and not ``may_fail``."""
        try:
            code = role.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RoleFailed(role, f"is not done after {timeout_s:g} s") from None
        if code and not may_fail:
            raise RoleFailed(role, f"ended with {code}")

    def _events(self, name: str) -> Path:
        return self._home / "events" / name

    def _say(self, line: str) -> None:
        self._out.note(line)

    def _show(self) -> None:
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
    status, servers = ask(f"{url}/discovery/available_servers")
    if status == 404:
        return 0
    return len(servers) if servers is not None else -1


command = demo_command(
    Demo, "Send a file between two clients through twistd-run relays, verify it, and show what was logged."
)

if __name__ == "__main__":
    command(prog_name="python -m demos.network")
