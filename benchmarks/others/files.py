"""Commands that send a file: ours, croc, and wormhole, each through a relay of its own kind, near or far.

The time is from the start of the second command, for which the first one waits, to the end of both: it includes starting
a program, agreeing on a key, and comparing a hash of the file.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.commands import Command, send
from benchmarks.others import LeftOut, find, serve, version_of
from benchmarks.others.transit import Transit
from benchmarks.processes import Cast, Child
from dmsg.testing.process import free_port

_LIMIT_S: Final = 300.0
#: Seconds for another program's sender to reach its relay, before the measurement.
_HEAD_START_S: Final = 3.0
#: Addresses of this machine when it stands for a distant one.
_FAR_HOSTS: Final = ("127.0.0.2", "127.0.0.3")
#: With 127.0.0.1 a croc relay would listen on all addresses.
_CROC_HOST: Final = "127.0.0.4"
#: A croc relay listens on this many consecutive ports, and announces them on the first one.
_CROC_PORTS: Final = 5


class Way:
    """How the two commands reach ports of this machine: directly, or each over a link of ``shape``."""

    def __init__(self, cast: Cast, shape: Mapping[str, float] | None = None) -> None:
        self._cast = cast
        self._shape = dict(shape or {})

    def ports(self, port: int) -> tuple[int, int]:
        """The ports of this machine that lead to ``port``, for each of the two."""
        if not self._shape:
            return port, port
        sending, receiving = (self._cast.start("link", to=port, **self._shape).facts["port"] for _ in range(2))
        return sending, receiving

    def hosts(self, host: str, ports: Sequence[int]) -> tuple[str, str]:
        """The addresses whose ``ports`` lead to those of ``host``, for each of the two."""
        if not self._shape:
            return host, host
        for far in _FAR_HOSTS:
            self._cast.start("link", to=list(ports), to_host=host, host=far, **self._shape)
        return _FAR_HOSTS


class Dmsg:
    """``dmsg send`` and ``dmsg receive``, sealed from end to end."""

    name = "dmsg send"

    def __init__(self, cast: Cast, server: Child, way: Way) -> None:
        self._cast = cast
        key, ports = server.facts["key"], way.ports(server.facts["port"])
        self._relays = [("--server", f"{key}@127.0.0.1:{port}") for port in ports]

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        near, far = self._relays
        receive = Command(self._cast, directory, "receive", "receive", str(directory), "--once", *far)
        began = time.perf_counter()
        send((str(path),), (receive.result["public_key"], *near))
        receive.wait(_LIMIT_S)
        return time.perf_counter() - began


class Croc:
    """croc, with its own relay; no compression, since the file is random. Raises ``LeftOut``."""

    def __init__(self, cast: Cast, way: Way) -> None:
        croc = find("croc")
        self.name = f"croc {version_of(croc, '--version')}"
        port = free_port()
        serve(cast, (croc, "relay", "--port", str(port), "--host", _CROC_HOST), port, _CROC_HOST)
        hosts = way.hosts(_CROC_HOST, range(port, port + _CROC_PORTS))
        options = ("--yes", "--ignore-stdin", "--disable-clipboard", "--no-compress", "--overwrite")
        self._sender, self._receiver = ((croc, *options, "--relay", f"{host}:{port}") for host in hosts)

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        secret = {"CROC_SECRET": f"1234-{secrets.token_hex(6)}"}
        return _both(
            (*self._sender, "send", "--no-local", str(path)),
            self._receiver,
            directory,
            secret,
        )


class Wormhole:
    """Magic Wormhole, with its own mailbox and transit relay. Raises ``LeftOut``."""

    def __init__(self, cast: Cast, way: Way) -> None:
        wormhole = find("wormhole")
        self.name = f"wormhole {version_of(wormhole, '--version')}"
        transit, port = Transit(cast), free_port()
        endpoint = f"tcp:{port}:interface=127.0.0.1"
        store = tempfile.mkdtemp(prefix="bench-mailbox-")
        cast.close_at_end(lambda: [path.unlink() for path in Path(store).iterdir()] and os.rmdir(store))
        mailbox = ("wormhole-mailbox", "--port", endpoint, "--channel-db", f"{store}/mailbox.sqlite")
        serve(cast, (transit.python, "-m", "twisted", *mailbox), port)
        self._sender, self._receiver = (
            (wormhole, "--relay-url", f"ws://127.0.0.1:{mailbox}/v1", "--transit-helper", f"tcp:127.0.0.1:{relay}")
            for mailbox, relay in zip(way.ports(port), way.ports(transit.port), strict=True)
        )

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        code = f"7-{secrets.token_hex(4)}"
        send = ("send", "--no-listen", "--hide-progress", "--code", code, str(path))
        receive = ("receive", "--no-listen", "--hide-progress", "--accept-file", code)
        return _both((*self._sender, *send), (*self._receiver, *receive), directory, {})


def _both(first: Sequence[str], second: Sequence[str], directory: Path, variables: Mapping[str, str]) -> float:
    """Run ``first``, then ``second`` in ``directory``; seconds from the start of that to the end of both."""
    with tempfile.TemporaryFile() as said:
        # Do not use the settings of the user who runs the bench.
        environment = {**os.environ, "HOME": str(directory), **variables}
        options = {"cwd": directory, "env": environment, "stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
        running = [subprocess.Popen(first, **options)]  # type: ignore[call-overload]
        try:
            time.sleep(_HEAD_START_S)
            began = time.perf_counter()
            running.append(subprocess.Popen(second, **options))  # type: ignore[call-overload]
            statuses = [process.wait(_LIMIT_S) for process in reversed(running)]
            elapsed_s = time.perf_counter() - began
        finally:
            for process in running:
                process.kill()
                process.wait()
        if any(statuses):
            said.seek(0)
            last = said.read().decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing"]
            raise LeftOut(f"{Path(first[0]).name} ended with {statuses}: {last[0]}")
    return elapsed_s
