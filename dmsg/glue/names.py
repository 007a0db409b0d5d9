"""Host names and their IP addresses."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable
from threading import Thread
from typing import Any, Final

from twisted.internet._resolver import GAIResolver
from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import (
    IAddress,
    IHostnameResolver,
    IHostResolution,
    IReactorPluggableNameResolver,
    IResolutionReceiver,
)
from twisted.internet.threads import deferToThreadPool
from zope.interface import implementer

from dmsg.address import parse_ip

#: Names chosen by strangers that are looked up at once, each in a thread; and how many of them may have been slow before.
AT_ONCE: Final = 32
SLOW_AT_ONCE: Final = 8
#: A look-up that takes longer than this, in seconds, is slow: the caller has given up by then. So many slow names are
#: remembered.
SLOW_S: Final = 2.0
REMEMBERED: Final = 4096
#: Names that may wait for a thread, and for how many seconds: as long as those who ask.
WAITING: Final = 1024
WAITING_S: Final = 3.0


@implementer(IResolutionReceiver)
class _Receiver:
    """Gathers the addresses of one resolution."""

    def __init__(self) -> None:
        self.done: Deferred[list[str]] = Deferred()
        self._found: list[str] = []

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:
        """Nothing to note: it cannot be stopped."""

    def addressResolved(self, address: IAddress) -> None:
        if isinstance(address, (IPv4Address, IPv6Address)) and address.host not in self._found:
            self._found.append(address.host)

    def resolutionComplete(self) -> None:
        self.done.callback(self._found)


def resolve(reactor: Any, host: str) -> Deferred[list[str]]:
    """The IP addresses of ``host``, in the resolver's order; empty when there are none.

    ``reactor`` is an ``IReactorPluggableNameResolver``. Its resolver holds a thread until there is an answer.
    """
    resolver = IReactorPluggableNameResolver(reactor).nameResolver
    if type(resolver) is GAIResolver:  # it never answers when the process has no descriptor left
        try:
            return deferToThreadPool(reactor, reactor.getThreadPool(), addresses_of, host)
        except RuntimeError:  # the system gives no more threads
            return succeed([])
    receiver = _Receiver()
    resolver.resolveHostName(receiver, host, 0, [IPv4Address, IPv6Address])
    return receiver.done


class _Question:
    """A name that is looked up, or waits for a thread, and the callbacks for its addresses."""

    def __init__(self, host: str, asked_at: float) -> None:
        self.host = host
        self.asked_at = asked_at
        self.began_at = 0.0
        self.is_slow = False
        self.asking: list[Callable[[list[str]], None]] = []

    def answer(self, found: list[str]) -> None:
        """Tell all who ask."""
        for answer in self.asking:
            answer(found)


@implementer(IHostResolution)
class _Resolution:
    def __init__(self, name: str) -> None:
        self.name = name

    def cancel(self) -> None:
        """A thread cannot be stopped, and does not have to be waited for."""


@implementer(IReactorPluggableNameResolver, IHostnameResolver)
class NamesOfStrangers:
    """``reactor`` for endpoints to hosts that strangers named: their names are looked up in threads of their own.

    The reactor has ten threads for all its work: a few names whose name server does not answer would block the rest for a
    minute. Here such names get :data:`SLOW_AT_ONCE` threads at most, once they are known to be slow.
    ``look_up(host)`` gives addresses and may take its time; ``start(work)`` runs ``work`` in a thread.
    """

    def __init__(
        self,
        reactor: Any,
        look_up: Callable[[str], list[str]] | None = None,
        start: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._reactor = reactor
        self._look_up = look_up or addresses_of
        # The end of the program does not wait for these threads: a look-up may take half a minute.
        self._start = start or (lambda work: Thread(target=work, daemon=True).start())
        self._questions: dict[str, _Question] = {}
        self._line: OrderedDict[str, _Question] = OrderedDict()
        self._slow: OrderedDict[str, None] = OrderedDict()
        self._slow_at_work = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reactor, name)

    @property
    def nameResolver(self) -> NamesOfStrangers:
        """See ``IReactorPluggableNameResolver``."""
        return self

    def resolveHostName(
        self,
        resolutionReceiver: Any,
        hostName: str,
        portNumber: int = 0,
        addressTypes: Any = None,
        transportSemantics: str = "TCP",
    ) -> IHostResolution:
        """See ``IHostnameResolver``; gives addresses of both types, for TCP."""
        resolution = _Resolution(hostName)
        resolutionReceiver.resolutionBegan(resolution)

        def answer(found: list[str]) -> None:
            for host in found:
                kind = IPv6Address if ":" in host else IPv4Address
                resolutionReceiver.addressResolved(kind("TCP", host, portNumber))
            resolutionReceiver.resolutionComplete()

        if parse_ip(hostName) is None:
            self._ask(hostName, answer)
        else:
            answer([hostName])
        return resolution

    def _ask(self, host: str, answer: Callable[[list[str]], None]) -> None:
        question = self._questions.get(host)
        if question is None:
            if len(self._line) >= WAITING:
                answer([])
                return
            question = self._questions[host] = self._line[host] = _Question(host, self._reactor.seconds())
        question.asking.append(answer)
        self._go_on()

    def _go_on(self) -> None:
        """Begin the look-ups that may begin, and give up those that have waited too long for their callers."""
        now = self._reactor.seconds()
        given_up: list[_Question] = []
        for host, question in list(self._line.items()):
            is_late = now - question.asked_at > WAITING_S
            if not is_late and len(self._questions) - len(self._line) >= AT_ONCE:
                break
            if is_late or host not in self._slow or self._slow_at_work < SLOW_AT_ONCE:
                del self._line[host]
                if is_late or not self._begin(question, now):
                    del self._questions[host]
                    given_up.append(question)
        for question in given_up:  # last: a callback may ask for another name
            question.answer([])

    def _begin(self, question: _Question, now: float) -> bool:
        """Whether there is a thread for ``question``."""
        question.began_at = now
        question.is_slow = question.host in self._slow

        def work() -> None:
            found: list[str] = []
            try:
                found = self._look_up(question.host)
            finally:
                self._reactor.callFromThread(self._done, question, found)

        try:
            self._start(work)
        except RuntimeError:  # the system gives no more of them
            return False
        self._slow_at_work += question.is_slow
        return True

    def _done(self, question: _Question, found: list[str]) -> None:
        self._slow_at_work -= question.is_slow
        self._slow.pop(question.host, None)
        if self._reactor.seconds() - question.began_at > SLOW_S:
            self._slow[question.host] = None
            if len(self._slow) > REMEMBERED:
                self._slow.popitem(last=False)
        del self._questions[question.host]
        question.answer(found)
        self._go_on()


def addresses_of(host: str) -> list[str]:
    """The IP addresses of ``host``, in the system's order; blocks."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
