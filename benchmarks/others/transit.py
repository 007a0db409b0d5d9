"""Magic Wormhole's transit relay, and two ends that meet there: its own ``wormhole.transit``, in its own environment.

Data over it is sealed from end to end. Both ends get the key from the bench; a wormhole would have agreed on it.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from benchmarks.others import find, serve, version_of
from benchmarks.processes import Cast, Child, process_cpu_s
from dmsg.testing.process import free_port


class Transit:
    """A relay on ``port``, and the means to connect to it. Raises ``LeftOut``."""

    def __init__(self, cast: Cast) -> None:
        wormhole = find("wormhole")
        self.python = str(Path(wormhole).resolve().with_name(Path(sys.executable).name))
        relay = "import importlib.metadata as m; print(m.version('magic-wormhole-transit-relay'))"
        self.name = f"transit relay {version_of(self.python, '-c', relay)}"
        self.port = free_port()
        endpoint = f"tcp:{self.port}:interface=127.0.0.1"
        self._process = serve(cast, (self.python, "-m", "twisted", "transitrelay", "--port", endpoint), self.port)
        self._cast = cast

    def pair(self, source_port: int = 0, sink_port: int = 0) -> tuple[Child, Child]:
        """A sending and an answering end, connected over the relay's port, or ports that lead there."""
        key = secrets.token_hex(32)
        command = (self.python, "-m", "benchmarks.child", "transit")
        ends = [
            self._cast.start("transit", command=command, port=port or self.port, key=key, sends=sends)
            for port, sends in ((source_port, True), (sink_port, False))
        ]
        for end in ends:
            end.send("connect")
        for end in ends:
            end.answer()
        return ends[0], ends[1]

    def cpu_s(self) -> float:
        """CPU seconds of the relay so far."""
        return process_cpu_s(self._process.pid)


def push(source: Child, size: int, total: int, limit_s: float) -> float:
    """Send ``total`` bytes in records of ``size``; MB/s until the other end has confirmed them."""
    result = source.ask("push", size=size, total=total, timeout_s=limit_s)
    if result["received_bytes"] != total:
        raise RuntimeError(f"{total} sent, {result['received_bytes']} arrived")
    rate: float = total / result["elapsed_s"] / 1e6
    return rate
