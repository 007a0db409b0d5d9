"""The processes of a soak: two kinds of twistd roles, three kinds of clients, programs at a tunnel, and strangers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.commands import Command
from benchmarks.processes import Cast, Child
from benchmarks.sizes import SoakSize
from benchmarks.soak.levels import Levels
from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.testing.process import free_port

_FAULTS: Final = ("kill a relay", "kill a relay", "cut a connection", "stop a receiver", "discovery")
#: Seconds before an ended relay or discovery is started again.
_AWAY_S: Final = 1.0


class TwistdRole:
    """A relay or a discovery with its ports and files, whatever its present process."""

    def __init__(self, cast: Cast, levels: Levels, name: str, **options: Any) -> None:
        self.name = name
        self.port = free_port()
        self._options = {"port": self.port, "admin": free_port(), **options}
        self._cast = cast
        self._levels = levels
        self.process: Child

    def start(self) -> None:
        """Start it, or its successor."""
        self.process = self._cast.start("twistd_role", wait=False, **self._options)

    def ready(self) -> None:
        """Wait until it serves."""
        self.process.ready()
        self._levels.watch(self.name, self.process.pid, self.process, self._options["admin"])

    def kill(self) -> None:
        """SIGKILL it, and start another process a second later."""
        self._levels.forget(self.process.pid)
        self.process.kill()
        self._again()

    def restart(self) -> None:
        """Stop it cleanly, and start another process a second later."""
        self._levels.forget(self.process.pid)
        self.process.ask("stop")
        self._again()

    def _again(self) -> None:
        self.process.close()
        time.sleep(_AWAY_S)
        self.start()
        self.ready()


class Network:
    """All processes, started. ``faults`` lists the possible faults."""

    def __init__(self, cast: Cast, levels: Levels, home: Path, size: SoakSize, seed: int) -> None:
        self.size = size
        # during the warm-up, so that growing buffers do not count as growth later
        self._first_faults = ["stop a receiver", "kill a relay", "discovery"]
        store = f"sqlite:{home / 'entries.sqlite'}"
        self.discovery = TwistdRole(cast, levels, "discovery", serve="discovery", store=store, events=str(home / "d"))
        self.discovery.start()
        url = f"http://127.0.0.1:{self.discovery.port}"
        self.relays = []
        for number in range(size.relays):
            key_file = home / f"relay-{number}.key"
            write_key_file(key_file, SecretKey.generate())
            name = "relay, never killed" if number == 0 else f"relay {number}, killed"
            options = {
                "serve": "relay",
                "key_file": str(key_file),
                "discovery": url,
                "events": str(home / f"r{number}"),
            }
            self.relays.append(TwistdRole(cast, levels, name, **options))
        self.discovery.ready()
        for relay in self.relays:
            relay.start()
        for relay in self.relays:
            relay.ready()
        self.answering, self.dialling = self._clients(cast, levels, url, seed, extended=True)
        self.base = self._clients(cast, levels, url, seed, extended=False) if size.base_clients else None
        self.tcp = self._tunnel(cast, levels, home, url) if size.tunnel else None
        self.strangers = cast.start(
            "strangers",
            relays=[one.process.facts for one in self.relays],
            discovery=self.discovery.port,
            targets=[self.answering.facts["key"], self.dialling.facts["key"]],
            seed=seed,
        )

    def _clients(self, cast: Cast, levels: Levels, url: str, seed: int, *, extended: bool) -> tuple[Child, Child]:
        options: dict[str, Any] = {
            "discovery": url,
            "min_servers": min(2, self.size.relays),
            "seed": seed,
            "block_sizes": (1, self.size.block_bytes),
            "interval_s": self.size.interval_s,
            "extended": extended,
            "security": "prefer" if extended else "hop",
        }
        kind = "client" if extended else "2019 client"
        pair = [cast.start("mixed", wait=False, **options) for _ in range(2)]
        for name, one in zip(("answering", "dialling"), pair, strict=True):
            one.ready()
            levels.watch(f"{kind}, {name}", one.pid, one)
        return pair[0], pair[1]

    def _tunnel(self, cast: Cast, levels: Levels, home: Path, url: str) -> tuple[Child, int]:
        tcp = cast.start("tcp")
        target = f"tcp:127.0.0.1:{tcp.facts['port']}"
        expose = Command(cast, home, "dmsg expose", "expose", target, "--discovery", url)
        levels.watch("dmsg expose", expose.pid)
        peer = expose.result["public_key"]
        port = free_port()
        listen = f"tcp:{port}:interface=127.0.0.1"
        forward = Command(cast, home, "dmsg forward", "forward", peer, listen, "--discovery", url)
        levels.watch("dmsg forward", forward.pid)
        return tcp, port

    # --- load ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open the streams and start the other load, with more short transports than later: see :meth:`settle`."""
        size = self.size
        self.dialling.ask("open", target=self.answering.facts["key"], count=size.streams)
        ours = self.answering.facts["key"]
        self._begin(self.dialling, ours, lookups_per_s=size.lookups_per_s, ping=True)
        if self.base is not None:
            answering, dialling = self.base
            self._begin(dialling, answering.facts["key"])
            self._begin(answering, ours)
        if self.tcp is not None:
            self.tcp[0].ask("begin", port=self.tcp[1], per_s=size.warm_up_times * size.short_per_s / 2)

    def _begin(self, client: Child, target: str, *, lookups_per_s: float = 0.0, ping: bool = False) -> None:
        per_s = self.size.warm_up_times * self.size.short_per_s
        client.ask("begin", target=target, short_per_s=per_s, lookups_per_s=lookups_per_s, ping=ping)

    def settle(self) -> None:
        """The warm-up is over: short transports at their steady rate."""
        for one in (self.dialling, *(self.base or ())):
            one.ask("pace", per_s=self.size.short_per_s)
        if self.tcp is not None:
            self.tcp[0].ask("pace", per_s=self.size.short_per_s / 2)

    # --- faults ----------------------------------------------------------------------------------------------------

    def fault(self, chance: random.Random, *, young: bool) -> str:
        """Do one thing to it; gives its name. While the run is ``young`` discovery is restarted; later it is stopped for
        a while only, so that its last life is long enough to be judged.
        """
        name = self._first_faults.pop(0) if self._first_faults else chance.choice(_FAULTS)
        if name == "kill a relay":
            chance.choice(self.relays[1:]).kill()
        elif name == "cut a connection":
            chance.choice((self.answering, self.dialling)).ask("cut")
        elif name == "stop a receiver":
            self.answering.stop(self.size.stop_s)
        elif young:
            self.discovery.restart()
            name = "restart discovery"
        else:
            self.discovery.process.stop(self.size.stop_s)
            name = "stop discovery"
        return name
