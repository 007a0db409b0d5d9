"""Look-ups of host names that strangers chose take turns, and others do not wait for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest_twisted
from twisted.internet._resolver import GAIResolver
from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.interfaces import IReactorPluggableNameResolver
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from zope.interface import implementer

from dmsg.glue import names
from dmsg.glue.names import AT_ONCE, SLOW_AT_ONCE, SLOW_S, WAITING, WAITING_S, NamesOfStrangers, resolve


class Bench(Clock):
    """A resolver whose threads stand still until they are told to end; all names have one address."""

    def __init__(self) -> None:
        super().__init__()
        self.at_work: dict[str, Callable[[], None]] = {}
        self.names = NamesOfStrangers(self, self._look_up, lambda work: work())
        self.found: dict[str, list[str]] = {}

    def _look_up(self, host: str) -> list[str]:
        self._host = host
        return [f"192.0.2.{len(host)}"]

    def callFromThread(self, done: Callable[..., None], *arguments: Any) -> None:
        self.at_work[self._host] = lambda: done(*arguments)

    def ask(self, *hosts: str) -> None:
        for host in hosts:
            resolve(self.names, host).addCallback(lambda found, host=host: self.found.update({host: found}))

    def end(self, *hosts: str) -> None:
        for host in hosts:
            self.at_work.pop(host)()


def evil(count: int) -> list[str]:
    return [f"evil{number}" for number in range(count)]


def test_a_name_is_looked_up_once_for_all_who_ask_meanwhile() -> None:
    bench = Bench()
    found: list[list[str]] = []
    for _ in range(3):
        resolve(bench.names, "name").addCallback(found.append)
    assert list(bench.at_work) == ["name"]
    bench.end("name")
    assert found == [["192.0.2.4"]] * 3
    bench.ask("name")
    assert list(bench.at_work) == ["name"]


def test_an_address_needs_no_thread() -> None:
    bench = Bench()
    bench.ask("192.0.2.77", "2001:db8::7")
    assert bench.found == {"192.0.2.77": ["192.0.2.77"], "2001:db8::7": ["2001:db8::7"]} and not bench.at_work


def test_names_that_took_long_before_leave_threads_to_others() -> None:
    bench = Bench()
    hosts = evil(AT_ONCE)
    bench.ask(*hosts, "good")
    assert "good" not in bench.at_work
    bench.advance(SLOW_S + 0.5)
    bench.end(*hosts)
    assert list(bench.at_work) == ["good"]
    bench.end("good")
    bench.ask(*hosts, "good")
    assert len(bench.at_work) == SLOW_AT_ONCE + 1 and "good" in bench.at_work
    bench.end(*bench.at_work)  # they are quick now
    assert set(hosts) - set(bench.found) == set() and bench.found["good"]


def test_a_name_that_was_quick_lately_is_not_slow_any_more() -> None:
    bench = Bench()
    hosts = evil(SLOW_AT_ONCE + 1)
    bench.ask(*hosts)
    bench.advance(SLOW_S + 0.5)
    bench.end(*hosts)
    bench.ask(hosts[0])
    bench.end(hosts[0])
    bench.ask(*hosts)
    assert len(bench.at_work) == SLOW_AT_ONCE + 1


def test_what_waits_for_a_thread_is_bounded_in_number_and_time() -> None:
    bench = Bench()
    hosts = evil(AT_ONCE + WAITING)
    bench.ask(*hosts, "one too many")
    assert bench.found == {"one too many": []}
    bench.advance(WAITING_S + 0.5)
    bench.end(hosts[0])
    assert bench.found[hosts[-1]] == [] and len(bench.found) == WAITING + 2
    bench.ask("good")
    assert "good" in bench.at_work


def test_who_gets_an_answer_may_ask_for_another_name() -> None:
    bench = Bench()
    hosts = evil(AT_ONCE + 3)
    bench.ask(*hosts[:-3])
    for number, host in enumerate(hosts[-3:]):
        resolve(bench.names, host).addCallback(lambda _, number=number: bench.ask(f"next{number}"))
    bench.advance(WAITING_S + 0.5)
    bench.end(hosts[0])
    bench.end(hosts[1], hosts[2])
    assert {"next0", "next1", "next2"} <= set(bench.at_work)
    bench.end(*bench.at_work)
    assert {"next0", "next1", "next2"} <= set(bench.found)


def test_a_name_for_which_there_is_no_thread_has_no_address_and_later_ones_have() -> None:
    def start(work: Callable[[], None]) -> None:
        if len(started) < AT_ONCE:
            started.append(work)
            raise RuntimeError("can't start new thread")
        work()

    started: list[Callable[[], None]] = []
    bench = Bench()
    bench.names = NamesOfStrangers(bench, bench._look_up, start)
    hosts = evil(AT_ONCE)
    bench.ask(*hosts)
    assert all(bench.found[host] == [] for host in hosts)
    bench.ask("good")
    bench.end("good")
    assert bench.found["good"]


def test_what_is_no_name_has_no_address() -> None:
    assert names.addresses_of("a" * 300) == []


WITHOUT_DESCRIPTORS = """
import resource, sys
from twisted.internet import reactor
from dmsg.glue.names import resolve

def begin():
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    resolve(reactor, "localhost").addCallback(again, most)

def again(found, most):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resolve(reactor, "localhost").addCallback(end, found)

def end(found, before):
    print(before, bool(found))
    reactor.stop()

reactor.callWhenRunning(begin)
reactor.callLater(10.0, reactor.stop)
reactor.run()
"""


def test_a_look_up_that_has_no_descriptor_comes_to_an_end() -> None:
    """Discovery looks up four names at a time: four that did not end would be the last ones."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[] True\n", "")


@implementer(IReactorPluggableNameResolver)
class Pool(Clock):
    """A reactor with a resolver of Twisted's, and a pool that has no thread."""

    def __init__(self) -> None:
        super().__init__()
        self.nameResolver = GAIResolver(cast(Any, self))

    def installNameResolver(self, resolver: object) -> Any:
        raise NotImplementedError

    def getThreadPool(self) -> Pool:
        return self

    def callInThreadWithCallback(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")


def test_a_look_up_that_has_no_thread_comes_to_an_end() -> None:
    found: list[list[str]] = []
    resolve(Pool(), "localhost").addCallback(found.append)
    assert found == [[]]


@pytest_twisted.ensureDeferred
async def test_an_endpoint_connects_to_a_name(reactor: Any) -> None:
    port = reactor.listenTCP(0, Factory.forProtocol(Protocol), interface="127.0.0.1")
    endpoint = HostnameEndpoint(NamesOfStrangers(reactor), "localhost", port.getHost().port)
    protocol = await endpoint.connect(Factory.forProtocol(Protocol))
    protocol.transport.abortConnection()
    await port.stopListening()
