"""A Redis of their own for tests of the peer, which can go away and come back."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.address import HostPort, RedisAddress
from dmsg.rmb.peer.redis import RedisLists, Taker
from dmsg.testing.process import free_port


@pytest.fixture
def address(redis_url: str) -> RedisAddress:
    """An empty Redis."""
    return RedisAddress.parse(redis_url)


@pytest.fixture
def opened(guard: None, reactor: Any) -> Iterator[Any]:
    """``opened(RedisLists, …)``: with the reactor, and closed when the test ends."""
    made: list[Any] = []

    def make(kind: type[Any], *arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, reactor, **options))
        return made[-1]

    yield make
    for one in made:
        pytest_twisted.blockon(Deferred.fromCoroutine(one.close()))


@pytest.fixture
def lists(opened: Any, address: RedisAddress) -> RedisLists:
    """Pushes to the empty Redis."""
    return opened(RedisLists, address)


@pytest.fixture
def taker(opened: Any, address: RedisAddress) -> Any:
    """``taker("key")``: takes from it."""

    def make(key: str) -> Taker:
        return opened(Taker, address, key)

    return make


class RedisProcess:
    """A redis-server on one port, which keeps what it has (append-only file) from one start to the next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.address = RedisAddress(HostPort("127.0.0.1", free_port()))

    def start(self, *more: str) -> None:
        """Start it, and wait until it listens."""
        program = shutil.which("redis-server")
        assert program is not None, "these tests need the program redis-server"
        options = ["--port", str(self.address.server.port), "--bind", "127.0.0.1", "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(self._directory), *more]
        self._process = subprocess.Popen([program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"eady to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def pause(self) -> None:
        """It takes commands, and does nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    """A redis-server that is not running yet."""
    process = RedisProcess(tmp_path)
    yield process
    process.kill()
