"""``python -m demos.analytics``: from real traffic to tables, a report and ranks that flow back.

The network of :mod:`demos.network` with more clients: some ping an echo, one dials an unknown key, one relay is killed
while a file is on its way. Then ``twistd dmsg-shipper`` moves the event logs to a landing zone, ``python -m dmsg_logs
run`` makes tables, report and signed ranks of them, and a discovery started with those ranks hands them out again.

Ends with 0 only if every line that was logged is in the tables. Needs the package of the log pipeline and a Java.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from demos.network import Demo
from demos.parts import DMSG, TWISTD, Role, RoleFailed, ask, demo_command, sha256, write_random
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.files.part_folder import FOLDER
from dmsg.cli.files.wire import PART_SUFFIX
from dmsg.cli.output import human_bytes
from dmsg.crypto.keys import SecretKey
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.log import short_node
from dmsg.testing.process import free_port

PINGERS: Final = 3
PINGS: Final = 40
#: Polling interval for the arriving file, in seconds: short compared with the transfer of one MiB.
_LOOK_S: Final = 0.002
TRAFFIC_TIMEOUT_S: Final = 60.0
PIPELINE_TIMEOUT_S: Final = 300.0


class AnalyticsDemo(Demo):
    """One run, in ``home``."""

    entities = (
        *("relay-1", "relay-2", "sender", "receiver", "echo", "operator"),
        *(f"pinger-{number}" for number in range(1, PINGERS + 1)),
    )

    def _play(self) -> None:
        url = self._start_network()
        self._ping(url)
        self._transfer_through_a_kill(url)
        self._stop_all()
        shipped = self._ship()
        self._summary = self._analyse()
        self._check(shipped)
        self._use_ranks()

    # --- traffic ---------------------------------------------------------------------------------------------------

    def _client(self, name: str, command: str, url: str, *arguments: str) -> Role:
        return self._start(
            name,
            *(*DMSG, command, *arguments, "--json", "--discovery", url, "--key", f"{name.partition('.')[0]}.key"),
            *("--events", str(self._home / "events")),
        )

    def _ping(self, url: str) -> None:
        echo = self._client("echo", "echo", url)
        self._wait(echo, lambda: bool(echo.lines()), "does not get ready")
        key = str(self._keys["echo"].public_key)
        self._say(f"{PINGERS} clients ping {key[:16]}…, one dials an unknown key")
        for number in range(1, PINGERS + 1):
            self._client(f"pinger-{number}", "ping", url, key, "--count", str(PINGS), "--interval", "0.02")
        absent = str(SecretKey.generate().public_key)
        self._client("pinger-1.lost", "ping", url, absent, "--count", "1")

    def _transfer_through_a_kill(self, url: str) -> None:
        inbox = self._home / "inbox"
        inbox.mkdir()
        receiver = self._client("receiver", "receive", url, str(inbox), "--once")
        self._wait(receiver, lambda: bool(receiver.lines()), "does not get ready")
        relay = self._relay_of("receiver", url)
        source, received = self._home / "payload.bin", inbox / "payload.bin"
        digest = write_random(source, self._size)
        self._say(f"dmsg send of {human_bytes(self._size)}, and {relay.name} is killed on the way")
        sender = self._client("sender", "send", url, str(self._keys["receiver"].public_key), str(source))
        self._wait(sender, lambda: _has_begun(received), "has sent nothing", poll_s=_LOOK_S)
        relay.kill()
        if received.exists():
            self._say(f"so small a file had arrived before {relay.name} was killed: a larger --size shows more")
        for role in self._roles:
            kind = role.name.partition("-")[0]
            if kind in ("sender", "receiver", "pinger"):
                self._finish(role, TRAFFIC_TIMEOUT_S, may_fail=kind == "pinger")
        if not received.is_file() or sha256(received) != digest:
            raise CommandError("the received file is not the one that was sent", Exit.UNVERIFIED)
        self._say(f"the file has arrived unharmed; {relay.name} comes back, and publishes what it had logged")
        relay_node = short_node(self._keys[relay.name].public_key)
        again = self._start_relay(f"{relay.name}.again", relay.name, free_port(), url)
        torn = [path for path in (self._home / "events").rglob("*.part") if path.name.startswith(relay_node)]
        self._wait(again, lambda: not any(path.exists() for path in torn), "left its log behind")

    def _relay_of(self, name: str, url: str) -> Role:
        """The relay of a listening client, through which everything sent to it goes."""
        _, entry = ask(f"{url}/discovery/entries/{self._keys[name].public_key}")
        servers = entry["client"]["delegated_servers"] if entry else []
        for role in self._roles:
            key = self._keys.get(role.name)
            if key is not None and servers == [str(key.public_key)]:
                return role
        raise CommandError(f"discovery does not name one relay of {name}'s, but {servers}")

    # --- logs ------------------------------------------------------------------------------------------------------

    def _events(self, name: str) -> Path:
        return self._home / "events"  # all roles share a directory: their files have different names

    def _ship(self) -> int:
        """Ship the logs; gives the number of lines in the landing zone, counted in the files."""
        events, landing = self._home / "events", self._home / "landing"
        landing.mkdir()
        shipper = self._start("shipper", *TWISTD, "dmsg-shipper", "--from", str(events), "--to", str(landing), "--once")
        self._finish(shipper, PIPELINE_TIMEOUT_S)
        if left := [path for path in events.rglob("*") if path.is_file()]:
            raise RoleFailed(shipper, f"left {len(left)} files behind")
        files = list(landing.rglob("*.jsonl.zst"))
        lines = sum(1 for file in files for _ in read_lines(file))
        self._say(f"dmsg-shipper: {lines:,} lines in {len(files)} files moved to {landing}")
        return lines

    def _analyse(self) -> dict[str, Any]:
        self._say("python -m dmsg_logs run: tables, ranks, report")
        pipeline = self._start(
            "pipeline",
            *(sys.executable, "-m", "dmsg_logs", "run", "--landing", "landing", "--tables", "tables"),
            *("--report", "report", "--ranks", "relay_ranks.json", "--key", "operator.key", "--strict", "--json"),
        )
        self._finish(pipeline, PIPELINE_TIMEOUT_S)
        summary: dict[str, Any] = pipeline.lines()[-1]
        return summary

    def _check(self, lines: int) -> None:
        summary = self._summary
        if summary["in"] != summary["good"] + summary["dup"] + summary["corrupt"] or summary["in"] != lines:
            raise CommandError(f"{lines} lines were logged, but the accounts say {summary}", Exit.UNVERIFIED)

    def _use_ranks(self) -> None:
        """A discovery that knows the operator's key takes the ranks and hands them out."""
        port = free_port()
        discovery = self._start(
            "ranked-discovery",
            *(*TWISTD, "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1", "--store", "memory:"),
            *("--ranks", "relay_ranks.json", "--ranks-key", str(self._keys["operator"].public_key)),
        )

        def handed_out() -> bool:
            _, ranks = ask(f"http://127.0.0.1:{port}/dmsg-discovery/relay_ranks")
            return ranks is not None and bool(ranks["relays"])

        self._wait(discovery, handed_out, "does not hand out the ranks")
        self._say("a discovery took the ranks, signed by the operator's key")

    def _show(self) -> None:
        summary = self._summary
        self._out.table("Tables", ("table", "rows"), [(name, str(rows)) for name, rows in summary["tables"].items()])
        names = {str(key.public_key): name for name, key in self._keys.items()}
        ranks = json.loads((self._home / "relay_ranks.json").read_text())["relays"]
        scores = [(names.get(key, key[:16]), *(str(parts[part]) for part in _PARTS)) for key, parts in ranks.items()]
        self._out.table("Ranks", ("relay", *_PARTS), scores)
        report = self._home / "report" / "report.html"
        self._out.result(
            {"verified": True, "report": str(report), **summary},
            f"verified: {summary['in']:,} lines in, {summary['good']:,} good; report at {report}",
        )


_PARTS: Final = ("score", "success", "latency", "capacity", "drops", "dials", "clients")


def _has_begun(received: Path) -> bool:
    """Whether anything of a file has arrived."""
    try:
        return any(part.stat().st_size for part in (received.parent / FOLDER).glob(f"*{PART_SUFFIX}"))
    except FileNotFoundError:  # it has just been renamed to its final name
        return True


command = demo_command(
    AnalyticsDemo, "Make traffic, ship its logs, run the pipeline on them, and give its ranks to a discovery."
)

if __name__ == "__main__":
    command(prog_name="python -m demos.analytics")
