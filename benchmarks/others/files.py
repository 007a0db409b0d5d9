"""Commands that send a file: ours, croc, and wormhole, each through a relay of its own kind on this machine.

The time is from the start of the second of the two commands to the end of both, when the first one waits for it: it
includes starting a program, agreeing on a key, and comparing a hash of the file.
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

from benchmarks.commands import Command
from benchmarks.others import LeftOut, find, serve, version_of
from benchmarks.others.transit import Transit
from benchmarks.processes import Cast, Child
from dmsg.testing.process import free_port

_LIMIT_S: Final = 300.0
#: What a sender of others needs to be waiting at its relay; told apart from the time that is measured.
_HEAD_START_S: Final = 3.0


class Dmsg:
    """``dmsg send`` and ``dmsg receive``, sealed from end to end."""

    name = "dmsg send"

    def __init__(self, cast: Cast, server: Child) -> None:
        self._cast = cast
        self._relay = ("--server", f"{server.facts['key']}@127.0.0.1:{server.facts['port']}")

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        receive = Command(self._cast, directory, "receive", "receive", str(directory), "--once", *self._relay)
        began = time.perf_counter()
        send = Command(self._cast, directory, "send", "send", receive.result["public_key"], str(path), *self._relay)
        for command in (send, receive):
            command.wait(_LIMIT_S)
        return time.perf_counter() - began


class Croc:
    """croc, with its own relay; no compression, since the file is random. Raises ``LeftOut``."""

    def __init__(self, cast: Cast) -> None:
        self._croc = find("croc")
        self.name = f"croc {version_of(self._croc, '--version')}"
        port = free_port()  # and the four behind it
        serve(cast, (self._croc, "relay", "--host", "127.0.0.1", "--port", str(port)), port)
        self._options = ("--yes", "--ignore-stdin", "--disable-clipboard", "--no-compress", "--overwrite")
        self._options += ("--relay", f"127.0.0.1:{port}")

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        secret = {"CROC_SECRET": f"1234-{secrets.token_hex(6)}"}
        return _both(
            (self._croc, *self._options, "send", "--no-local", str(path)),
            (self._croc, *self._options),
            directory,
            secret,
        )


class Wormhole:
    """Magic Wormhole, with its own mailbox and transit relay. Raises ``LeftOut``."""

    def __init__(self, cast: Cast) -> None:
        wormhole = find("wormhole")
        self.name = f"wormhole {version_of(wormhole, '--version')}"
        transit, port = Transit(cast), free_port()
        endpoint = f"tcp:{port}:interface=127.0.0.1"
        store = tempfile.mkdtemp(prefix="bench-mailbox-")
        cast.close_at_end(lambda: [path.unlink() for path in Path(store).iterdir()] and os.rmdir(store))
        mailbox = ("wormhole-mailbox", "--port", endpoint, "--channel-db", f"{store}/mailbox.sqlite")
        serve(cast, (transit.python, "-m", "twisted", *mailbox), port)
        relays = ("--relay-url", f"ws://127.0.0.1:{port}/v1", "--transit-helper", f"tcp:127.0.0.1:{transit.port}")
        self._wormhole = (wormhole, *relays)

    def send(self, path: Path, directory: Path) -> float:
        """Send the file into ``directory``; seconds."""
        code = f"7-{secrets.token_hex(4)}"
        send = ("send", "--no-listen", "--hide-progress", "--code", code, str(path))
        receive = ("receive", "--no-listen", "--hide-progress", "--accept-file", code)
        return _both((*self._wormhole, *send), (*self._wormhole, *receive), directory, {})


def _both(first: Sequence[str], second: Sequence[str], directory: Path, variables: Mapping[str, str]) -> float:
    """Run ``first``, then ``second`` in ``directory``; seconds from the start of that to the end of both."""
    with tempfile.TemporaryFile() as said:
        # Settings of whoever runs the bench are not those of the bench.
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
