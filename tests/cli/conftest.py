"""Commands in this process, on the test's reactor, and commands as processes of their own."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThread

from dmsg.address import PinnedServer
from dmsg.cli.output import Output
from dmsg.cli.protocols import PROTOCOLS, Settings
from dmsg.cli.settings import Invocation
from dmsg.crypto.keys import SecretKey, write_key_file
from dmsg.discovery.entry import DMSG, MESSAGING
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.testing.network import LocalNetwork
from dmsg.testing.process import environ_without_settings

ROOT = Path(__file__).parents[2]
#: Twisted keeps a descriptor in reserve for when there are none left, and never closes it.
_RESERVED = "ignore:unclosed file <_io.TextIOWrapper name='/dev/null':ResourceWarning"


class Lines(io.StringIO):
    """A stream whose JSON lines can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[Callable[[dict[str, Any]], bool], Deferred[dict[str, Any]]]] = []

    def write(self, text: str) -> int:
        written = super().write(text)
        for wanted, waiter in list(self._waiting):
            found = next(filter(wanted, self.objects()), None)
            if found is not None:
                self._waiting.remove((wanted, waiter))
                waiter.callback(found)
        return written

    def objects(self) -> list[dict[str, Any]]:
        """Every line so far."""
        return [json.loads(line) for line in self.getvalue().splitlines(keepends=True) if line.endswith("\n")]

    async def wait_for(self, **members: Any) -> dict[str, Any]:
        """The first line with these members."""

        def wanted(line: dict[str, Any]) -> bool:
            return members.items() <= line.items()

        found = next(filter(wanted, self.objects()), None)
        if found is not None:
            return found
        waiter: Deferred[dict[str, Any]] = Deferred()
        self._waiting.append((wanted, waiter))
        return await waiter


class Command:
    """A command that runs in this process; ``ended`` is its outcome."""

    def __init__(self, call: Invocation, stdout: Lines, stderr: io.StringIO) -> None:
        self.call = call
        self.stdout = stdout
        self.stderr = stderr
        self.ended: Deferred[Any]

    async def ready(self) -> dict[str, Any]:
        """What it prints when it is ready; its error if it never is."""
        waiting = Deferred.fromCoroutine(self.stdout.wait_for(event="ready"))

        def over(outcome: Any) -> Any:
            if not waiting.called:
                waiting.cancel()
            return outcome

        self.ended.addBoth(over)
        return await waiting

    async def stop(self) -> None:
        """Interrupt it and wait until it is gone."""
        if not self.ended.called:  # otherwise its outcome was the test's own business
            self.ended.addErrback(lambda failure: failure.trap(CancelledError))
            self.ended.cancel()
            await self.ended


class Bench:
    """Runs commands that speak ``protocol`` against a network."""

    def __init__(self, reactor: Any, network: LocalNetwork, directory: Path, protocol: str) -> None:
        self.reactor = reactor
        self.network = network
        self.directory = directory
        self.protocol = protocol
        self.commands: list[Command] = []

    @property
    def pinned(self) -> list[PinnedServer]:
        """Its servers of the protocol: keys and addresses."""
        return self.network.messaging_pinned if self.protocol == MESSAGING else self.network.pinned

    @property
    def relays(self) -> list[Any]:
        """Its servers of the protocol."""
        return [*(self.network.messaging_relays if self.protocol == MESSAGING else self.network.relays)]

    async def client(self, **options: Any) -> Any:
        """A client that is no command."""
        network = self.network
        return await (network.messaging_client if self.protocol == MESSAGING else network.client)(**options)

    def key(self, name: str) -> tuple[SecretKey, str]:
        """A new key and its file."""
        key, path = SecretKey.generate(), self.directory / f"{name}.key"
        write_key_file(path, key)
        return key, str(path)

    def settings(self, key_file: str = "", events: str = "", **more: Any) -> Settings:
        url = self.network.discovery_url
        settings: Settings = PROTOCOLS[self.protocol].settings(
            key=Path(key_file) if key_file else None,
            discovery=url or None,
            servers=() if url else tuple(self.pinned),
            state_dir="none",
            events=Path(events) if events else None,
            **more,
        )
        return settings

    def start(
        self,
        run: Callable[..., Coroutine[Any, Any, Any]],
        *args: Any,
        key_file: str = "",
        events: str = "",
        security: Security | None = None,
        config: Any = None,
        **options: Any,
    ) -> Command:
        """Start ``run(call, reactor, …)``."""
        stdout, stderr = Lines(), io.StringIO()
        settings = {name: one for name, one in (("security", security), ("config", config)) if one is not None}
        call = Invocation(self.settings(key_file, events, **settings), Output(stdout, stderr, json_lines=True))
        command = Command(call, stdout, stderr)
        command.ended = Deferred.fromCoroutine(run(call, self.reactor, *args, **options))
        self.commands.append(command)
        return command

    async def run(self, run: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **options: Any) -> list[Any]:
        """Run to the end and give what was printed."""
        command = self.start(run, *args, **options)
        await command.ended
        return command.stdout.objects()

    async def close(self) -> None:
        for command in self.commands:
            await command.stop()
        await self.network.stop()


@pytest.fixture(params=[None])
def bench(request: pytest.FixtureRequest, guard: None, reactor: Any, tmp_path: Path) -> Iterator[Bench]:
    """A network of one server on pinned addresses and commands on it.

    Parametrize with ``"http"`` for a discovery, with ``"messaging"`` for a server and commands of that protocol, and with
    ``"messaging http"`` for both.
    """
    words = (request.param or "").split()
    protocol = MESSAGING if MESSAGING in words else DMSG
    counts = {"relays": 0, "messaging_relays": 1} if protocol == MESSAGING else {"relays": 1}
    network = LocalNetwork(reactor, discovery="http" if "http" in words else None, **counts)
    pytest_twisted.blockon(Deferred.fromCoroutine(network.start()))
    bench = Bench(reactor, network, tmp_path, protocol)
    yield bench
    pytest_twisted.blockon(Deferred.fromCoroutine(bench.close()))


class Process:
    """``dmsg`` as a process of its own."""

    def __init__(self, arguments: tuple[str, ...], directory: Path, environ: dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-W", _RESERVED, "-m", *arguments],
            cwd=directory,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> dict[str, Any]:
        """Its next line of results."""
        assert self.popen.stdout is not None
        text = await deferToThread(self.popen.stdout.readline)
        if not text:
            _, _, errors = await self.ended()
            pytest.fail(f"it ended without another line:\n{errors}")
        found: dict[str, Any] = json.loads(text)
        return found

    async def ended(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        out, err = await deferToThread(self.popen.communicate)
        return self.popen.returncode, out, err

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def stop(self) -> None:
        """End it in any state."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdout, self.popen.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """``start("ping", pk, environ={}, module="dmsg.cli.main") -> Process`` in the test's directory."""
    processes: list[Process] = []

    def run(*arguments: str, environ: dict[str, str] | None = None, module: str = "dmsg.cli.main") -> Process:
        clean = environ_without_settings() | {"PYTHONPATH": str(ROOT), **(environ or {})}
        processes.append(Process((module, *arguments), tmp_path, clean))
        return processes[-1]

    yield run
    for process in processes:
        process.stop()
