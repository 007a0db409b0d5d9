"""``python -m dmsg.cli.demo_analytics``: from real traffic to tables, a report and ranks that flow back.

The network of :mod:`dmsg.cli.demo` with more clients: some ping an echo, one dials a key nobody has, one relay is killed
while a file is on its way. Then ``twistd dmsg-shipper`` moves the event logs to a landing zone, ``python -m dmsg_logs
run`` makes tables, report and signed ranks of them, and a discovery started with those ranks hands them out again.

Ends with 0 only if every line that was logged is in the tables. Needs the package of the log pipeline and a Java.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import click

from dmsg.cli.demo import _DMSG, _TWISTD, MEBIBYTE, Demo, Role, RoleFailed, _free_port, _home, _sha256, _write_random
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, human_bytes
from dmsg.crypto.keys import SecretKey
from dmsg.ops.compress import read_lines
from dmsg.ops.logs import short_node

PINGERS: Final = 3
PINGS: Final = 40
#: Into the transfer at which a relay is killed, in seconds.
KILL_AFTER_S: Final = 0.25
TRAFFIC_TIMEOUT_S: Final = 60.0
PIPELINE_TIMEOUT_S: Final = 300.0


class AnalyticsDemo(Demo):
    """One run, in ``home``."""

    entities = (
        *("relay-1", "relay-2", "sender", "receiver", "echo", "operator"),
        *(f"pinger-{number}" for number in range(1, PINGERS + 1)),
    )

    def run(self) -> None:
        """Do it; raises ``CommandError``."""
        try:
            url = self._start_network()
            self._ping(url)
            self._transfer_through_a_kill(url)
            self._stop_all()
            shipped = self._ship()
            summary = self._analyse()
            self._check(shipped, summary)
            self._use_ranks()
        except RoleFailed as error:
            self._out.note(f"--- log of {error.role.name}")
            for line in error.role.tail():
                self._out.note(line)
            raise
        finally:
            self._stop_all()
        self._show(summary)

    # --- traffic ---------------------------------------------------------------------------------------------------

    def _client(self, name: str, command: str, url: str, *arguments: str) -> Role:
        return self._start(
            name,
            *(*_DMSG, command, *arguments, "--json", "--discovery", url, "--key", f"{name.partition('.')[0]}.key"),
            *("--events", str(self._home / "events")),
        )

    def _ping(self, url: str) -> None:
        echo = self._client("echo", "echo", url)
        self._wait(echo, lambda: bool(echo.lines()), "does not get ready")
        key = str(self._keys["echo"].public_key)
        self._say(f"{PINGERS} clients ping {key[:16]}…, one dials a key nobody has")
        for number in range(1, PINGERS + 1):
            self._client(f"pinger-{number}", "ping", url, key, "--count", str(PINGS), "--interval", "0.02")
        nobody = str(SecretKey.generate().public_key)
        self._client("pinger-1.lost", "ping", url, nobody, "--count", "1")

    def _transfer_through_a_kill(self, url: str) -> None:
        inbox = self._home / "inbox"
        inbox.mkdir()
        receiver = self._client("receiver", "receive", url, str(inbox), "--once")
        self._wait(receiver, lambda: bool(receiver.lines()), "does not get ready")
        source = self._home / "payload.bin"
        digest = _write_random(source, self._size)
        self._say(f"dmsg send of {human_bytes(self._size)}, and relay-1 is killed on the way")
        sender = self._client("sender", "send", url, str(self._keys["receiver"].public_key), str(source))
        time.sleep(KILL_AFTER_S)
        relay = next(role for role in self._roles if role.name == "relay-1")
        relay.process.kill()
        relay.process.wait()
        for role in self._roles:
            if role.name.partition("-")[0].partition(".")[0] in ("sender", "receiver", "pinger"):
                try:
                    code = role.process.wait(TRAFFIC_TIMEOUT_S)
                except Exception:
                    raise RoleFailed(role, f"is not done after {TRAFFIC_TIMEOUT_S:g} s") from None
                if code and role in (sender, receiver):
                    raise RoleFailed(role, f"ended with {code}")
        received = inbox / source.name
        if not received.is_file() or _sha256(received) != digest:
            raise CommandError("the received file is not the one that was sent", Exit.UNVERIFIED)
        self._say("the file has arrived unharmed; relay-1 comes back, and publishes what it had logged")
        relay_node = short_node(self._keys["relay-1"].public_key)
        again = self._start_relay("relay-1.again", "relay-1", _free_port(), url)
        torn = [path for path in (self._home / "events").rglob("*.part") if path.name.startswith(relay_node)]
        self._wait(again, lambda: not any(path.exists() for path in torn), "left its log behind")

    def _stop_all(self) -> None:
        for role in reversed(self._roles):
            role.stop()

    # --- logs ------------------------------------------------------------------------------------------------------

    def _events(self, name: str) -> Path:
        return self._home / "events"  # all roles share a directory: their files have different names

    def _ship(self) -> int:
        """Ship what was logged; gives how many lines there are in the landing zone, counted in the files."""
        events, landing = self._home / "events", self._home / "landing"
        landing.mkdir()
        shipper = self._start(
            "shipper", *_TWISTD, "dmsg-shipper", "--from", str(events), "--to", str(landing), "--once"
        )
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

    def _check(self, lines: int, summary: dict[str, Any]) -> None:
        if summary["in"] != summary["good"] + summary["dup"] + summary["corrupt"] or summary["in"] != lines:
            raise CommandError(f"{lines} lines were logged, but the accounts say {summary}", Exit.UNVERIFIED)

    def _use_ranks(self) -> None:
        """A discovery that knows the operator's key takes the ranks and hands them out."""
        port = _free_port()
        discovery = self._start(
            "ranked-discovery",
            *(*_TWISTD, "dmsg-discovery", "--listen", f"tcp:{port}:interface=127.0.0.1", "--store", "memory:"),
            *("--ranks", "relay_ranks.json", "--ranks-key", str(self._keys["operator"].public_key)),
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def handed_out() -> bool:
            try:
                with opener.open(f"http://127.0.0.1:{port}/dmsg-discovery/relay_ranks", timeout=5) as answer:
                    return bool(json.load(answer)["relays"])
            except OSError:
                return False

        self._wait(discovery, handed_out, "does not hand out the ranks")
        self._say("a discovery took the ranks, signed by the operator's key")

    def _finish(self, role: Role, timeout_s: float) -> None:
        try:
            code = role.process.wait(timeout_s)
        except Exception:
            raise RoleFailed(role, f"is not done after {timeout_s:g} s") from None
        if code:
            raise RoleFailed(role, f"ended with {code}")

    def _show(self, summary: dict[str, Any]) -> None:
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


@click.command()
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Empty directory to work in, and to keep.")
@click.option("--size", type=click.IntRange(1, 4096), default=64, show_default=True, help="Size of the file in MiB.")
@click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
def command(directory: str | None, size: int, json_lines: bool) -> None:
    """Make traffic, ship its logs, run the pipeline on them, and give its ranks to a discovery."""
    out = Output(sys.stdout, sys.stderr, json_lines=json_lines)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _home(directory) as home:
            AnalyticsDemo(out, home, size * MEBIBYTE).run()
    except CommandError as error:
        out.failure(error)
        sys.exit(error.exit)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    out.note(f"demo: all well after {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    command(prog_name="python -m dmsg.cli.demo_analytics")
