"""One connection at a time to one of several nodes, with failover to the next node."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NoReturn, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import WebSocketUrl, connect_websocket
from dmsg.rmb.twins.errors import MalformedAnswer, NodeFailed, RegistryError
from dmsg.rmb.twins.node import TRIAL_S, WEBSOCKET, Node

#: How often each node is tried at most for one question.
TRIALS_PER_NODE: Final = 2
#: Seconds for which questions fail at once after all attempts of one have failed, because they would ask the same nodes.
REST_S: Final = 2.0

T = TypeVar("T")
Job = Callable[[Node], Coroutine[Any, Any, T]]
_log = Logger()


class Substrate:
    """The nodes at ``urls``. Raises ``ValueError`` if there are none.

    After a lost connection it reconnects to the same node, unless that connection is lost too before it has answered anything.
    If a node did not answer or cannot be trusted, it connects to the next node.
    """

    def __init__(self, reactor: Any, urls: Sequence[WebSocketUrl]) -> None:
        if not urls:
            raise ValueError("no node")
        self._clock: IReactorTime = reactor
        self._urls = tuple(urls)
        self._reactor = reactor
        self._place = 0
        self._losses = 0
        self._blamed: set[int] = set()
        self._node: Node | None = None
        self._connecting: Deferred[None] | None = None
        self._waiting: Waiters[Node] = Waiters()
        self._rest_until = self._clock.seconds()
        self._closed = False

    @property
    def trials(self) -> int:
        """How often a question is asked at most."""
        return TRIALS_PER_NODE * len(self._urls)

    async def ask(self, job: Job[T], trials: int | None = None, limit_s: float | None = TRIAL_S) -> T:
        """The result of ``job``, which asks one node and has ``limit_s``.

        If it raises ``NodeFailed`` or ``MalformedAnswer``, it is tried again, with the next node if need be. Raises
        :class:`~dmsg.rmb.twins.errors.RegistryError` after ``trials`` attempts (by default :attr:`trials`), and while the
        nodes rest.
        """
        if self._clock.seconds() < self._rest_until:
            raise RegistryError("unavailable", "no node answered a moment ago")
        problem: NodeFailed | None = None
        for _ in range(self.trials if trials is None else trials):
            try:
                node = await self.node()
            except NodeFailed as error:
                problem = error
                continue
            try:
                work: Deferred[T] = Deferred.fromCoroutine(job(node))
                if limit_s is not None:
                    work.addTimeout(limit_s, self._clock, _late)
                found = await work
                self.worked()
                return found
            except NodeFailed as error:
                problem = error
            except MalformedAnswer as error:
                problem = NodeFailed("malformed", error.problem)
            self.give_up(node, problem)
        if self._closed:
            raise RegistryError("closed")
        if trials is None:
            self._rest_until = self._clock.seconds() + REST_S
        raise RegistryError("unavailable", str(problem))

    async def node(self) -> Node:
        """The connected node, or a new one after an attempt of at most ``TRIAL_S``; raises ``NodeFailed``."""
        if self._closed:
            raise RegistryError("closed")
        if self._node is not None:
            return self._node
        waiter = self._waiting.wait()
        if self._connecting is None:
            dialing = Deferred.fromCoroutine(self._dial())
            if not dialing.called:
                self._connecting = dialing
            dialing.addErrback(lambda why: why.trap(CancelledError) and None)
        return await waiter

    def give_up(self, node: Node, error: NodeFailed) -> None:
        """End the connection to ``node``, and switch to the next node unless the connection was only lost."""
        if node is self._node:
            self._node = None
            self._turn(error)
        node.fail(error)

    def worked(self) -> None:
        """The node has answered correctly."""
        self._losses = 0
        self._blamed.discard(self._place)

    async def close(self) -> None:
        """Close the connection; every question under way fails."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._node is not None:
            self.give_up(self._node, NodeFailed("closed"))
        self._waiting.fail(RegistryError("closed"))

    async def _dial(self) -> None:
        node = Node(self._clock, self._lost)
        outcome: Node | Failure = node
        try:
            url = self._urls[self._place]
            node.connected(await connect_websocket(self._reactor, url, node, WEBSOCKET, timeout_s=TRIAL_S))
            node.check()
            self._node = node
        except CancelledError:
            raise
        except Exception as error:
            failed = error if isinstance(error, NodeFailed) else NodeFailed("connect", str(error))
            self._turn(failed)
            outcome = Failure(failed)
        finally:
            self._connecting = None
        self._waiting.fire(outcome)

    def _lost(self, node: Node, error: NodeFailed) -> None:
        if node is self._node:
            self._node = None
            self._turn(error)

    def _turn(self, error: NodeFailed) -> None:
        if self._place not in self._blamed:
            self._blamed.add(self._place)
            host = self._urls[self._place].address
            _log.info("the node at {host} failed: {reason}", host=host, reason=error.reason)
        self._losses += 1
        if self._losses > 1 or error.reason not in ("lost", "closed"):
            self._losses = 0
            self._place = (self._place + 1) % len(self._urls)


def _late(_: object, limit_s: float) -> NoReturn:
    raise NodeFailed("timeout", "too slow")
