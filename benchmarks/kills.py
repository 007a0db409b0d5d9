"""Kills relays one after another under many end-to-end transports, whose applications may notice no more than a pause.

Three relays, discovery over SQLite and two clients, each a process of its own. Transports between the clients carry
numbered blocks both ways. Every few seconds a relay is ended by SIGKILL and started again a second later, with the same key
and port: all three in a random order, then again in another order. The receivers check every byte
(:mod:`benchmarks.roles.streams`).

The pause for a kill is measured at the receivers, from the last data over the old path to the first over the new path. It
includes the detection, the search, the handshake, the retransmission, and the time up to the sender's next block.
``SOAK_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Cast, Child
from benchmarks.report import Row, percentile, row
from benchmarks.sizes import KillsSize, Sizes
from dmsg.crypto.keys import SecretKey, write_key_file

NAME: Final = "kills"
RELAYS: Final = 3
P50_LIMIT_MS: Final = 1_500.0
P99_LIMIT_MS: Final = 5_000.0
#: Seconds after the last kill for transports to find their path and to send everything.
FINISH_LIMIT_S: Final = 40.0


@dataclass
class Findings:
    """The results of a run. ``faults`` has a line for each stream that did not carry exactly the expected data."""

    transports: int
    kills: int = 0
    seed: int = 0
    elapsed_s: float = 0.0
    #: Bytes that arrived correctly, both directions together.
    verified_bytes: int = 0
    lost_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    #: Times without a path, as reported by the dialling clients.
    resumed_ms: list[float] = field(default_factory=list)
    #: Times without data at each receiver, for each change of path.
    gaps_ms: list[float] = field(default_factory=list)


def run(sizes: Sizes) -> list[Row]:
    """Rows of faults and of pauses."""
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"kills: SOAK_SEED={seed}", file=sys.stderr, flush=True)
    found = run_kills(sizes.kills, seed)
    for fault in found.faults:
        print(f"kills: {fault}", file=sys.stderr)
    what = f"{found.transports} transports, {found.kills} kills of relays"
    rows = [
        row(NAME, f"{what}: streams with a fault", [len(found.faults)], "", at_most=0),
        row(NAME, f"{what}: lost", [found.lost_bytes], "bytes", at_most=0),
        row(NAME, f"{what}: verified", [found.verified_bytes / 1e6], "MB"),
        row(NAME, f"{what}: resumptions", [len(found.resumed_ms)], ""),
    ]
    for name, measured in (("silence at a receiver", found.gaps_ms), ("without a path", found.resumed_ms)):
        values = measured or [0.0]
        rows.append(row(NAME, f"{name}, p50", [percentile(values, 0.5)], "ms", at_most=P50_LIMIT_MS))
        rows.append(row(NAME, f"{name}, p99", [percentile(values, 0.99)], "ms", at_most=P99_LIMIT_MS))
        rows.append(row(NAME, f"{name}, longest", [max(values)], "ms"))
    return rows


def run_kills(size: KillsSize, seed: int) -> Findings:
    """Run it once; nothing is left behind."""
    found = Findings(size.transports, seed=seed)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="dmsg-kills-") as directory, Cast() as cast:
        home = Path(directory)
        url = cast.start("discovery", store=f"sqlite:{home / 'entries.sqlite'}").facts["url"]
        relays = [_Relay(cast, url, home / f"relay-{number}.key") for number in range(RELAYS)]
        common: dict[str, Any] = {
            "discovery": url,
            "min_servers": size.min_servers,
            "seed": seed,
            "block_sizes": (1, size.block_bytes),
            "interval_s": size.interval_s,
        }
        answering = cast.start("streams", **common)
        dialling = cast.start("streams", **common)
        dialling.ask("open", target=answering.facts["key"], count=size.transports)
        began = time.monotonic()
        victims: list[_Relay] = []
        for number in range(size.kills):
            _sleep_until(began + (number + 1) * size.kill_every_s)
            if not victims:  # each once before any a second time
                victims = chance.sample(relays, RELAYS)
            relay = victims.pop()
            relay.process.kill()
            found.kills += 1
            time.sleep(size.restart_s)
            relay.start()
        _sleep_until(began + (size.kills + 1) * size.kill_every_s)
        for client in (dialling, answering):
            client.send("finish", limit_s=FINISH_LIMIT_S)
        for client in (dialling, answering):
            client.answer(FINISH_LIMIT_S + 10)
        found.elapsed_s = time.monotonic() - began
        compare(dialling.ask("result"), answering.ask("result"), found)
    return found


class _Relay:
    """One relay with its key and port, whatever its present process."""

    def __init__(self, cast: Cast, url: str, key_file: Path) -> None:
        write_key_file(key_file, SecretKey.generate())
        self._cast = cast
        self._options: dict[str, Any] = {"discovery": url, "key_file": str(key_file), "port": 0}
        self.process: Child
        self.start()
        self._options["port"] = self.process.facts["port"]

    def start(self) -> None:
        """Start it, or its successor."""
        self.process = self._cast.start("server", **self._options)


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def compare(dialling: dict[str, Any], answering: dict[str, Any], found: Findings) -> None:
    """Compare the data that one end of each stream sent with the data that the other received; note it in ``found``."""
    found.resumed_ms = dialling["resumed_ms"] + answering["resumed_ms"]
    found.gaps_ms = dialling["gaps_ms"] + answering["gaps_ms"]
    for number in range(found.transports):
        ends = [one["streams"].get(str(number)) for one in (dialling, answering)]
        if None in ends:
            found.faults.append(f"stream {number} was never there")
            continue
        for name, sender, receiver in (("forth", *ends), ("back", *ends[::-1])):
            found.verified_bytes += 0 if receiver["fault"] else receiver["received_bytes"]
            found.lost_bytes += abs(sender["sent_bytes"] - receiver["received_bytes"])
            fault = receiver["fault"] or ("" if receiver["complete"] else "its end is missing")
            if receiver["outcome"] != "done":
                fault += f"; the receiver's transport: {receiver['outcome'] or 'not over'}"
            if fault or sender["sent_bytes"] != receiver["received_bytes"]:
                amounts = f"{sender['sent_bytes']} bytes sent, {receiver['received_bytes']} received"
                found.faults.append(f"stream {number} {name}: {fault or 'wrong length'} ({amounts})")
