"""A connection to a Substrate node: calls, which are answered in time or fail, and subscriptions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.glue.shell import Shell
from dmsg.glue.waiters import Waiters
from dmsg.glue.websocket import WebSocketShell
from dmsg.rmb.twins.errors import MalformedAnswer, NodeFailed, NodeRefused
from dmsg.rmb.twins.metadata import MAX_METADATA_BYTES
from dmsg.rmb.twins.rpc import SMALL_BYTES, Answer, Notice, Refusal, Rpc, SubscriptionId, subscription_id
from dmsg.sansio.websocket import WebSocketConfig

#: Timeout of connecting, and of each call, in seconds.
TRIAL_S: Final = 12.0
#: Subscriptions of one connection: heads, and transactions under way.
MAX_SUBSCRIPTIONS: Final = 16
#: Notices queued until they are taken; above that, the oldest are dropped, since a newer head always follows.
KEPT_NOTICES: Final = 16

#: The longest message is metadata in hex.
WEBSOCKET: Final = WebSocketConfig(
    max_message_bytes=2 * MAX_METADATA_BYTES + SMALL_BYTES, text=True, message_timeout_s=TRIAL_S
)


class Subscription:
    """Notices of one subscription, in order."""

    def __init__(self, node: Node, name: SubscriptionId, unsubscribe: str) -> None:
        self._node = node
        self._name = name
        self._unsubscribe = unsubscribe
        self._notices: deque[Any] = deque(maxlen=KEPT_NOTICES)
        self._waiting: Waiters[None] = Waiters()

    async def next(self, limit_s: float) -> Any:
        """The next notice; raises :class:`~dmsg.rmb.twins.errors.NodeFailed` (``timeout``) if none comes in time."""
        if not self._notices:
            self._node.check()
            await self._waiting.wait_at_most(limit_s, self._node.clock)
            if not self._notices:
                raise NodeFailed("timeout", "no notice")
        return self._notices.popleft()

    async def newest(self, limit_s: float) -> Any:
        """The latest queued notice, or the next one if none is queued; older notices are dropped."""
        found = await self.next(limit_s)
        while self._notices:
            found = self._notices.popleft()
        return found

    def close(self) -> None:
        """End the subscription, and tell the node."""
        self._node.unsubscribe(self._name, self._unsubscribe)

    def heard(self, notice: Any) -> None:
        """A notice has come."""
        self._notices.append(notice)
        self._waiting.fire(None)

    def lost(self, error: NodeFailed) -> None:
        """No more notices will come."""
        self._waiting.fail(error)


class Node:
    """A connection to a node; ``over`` is called once, when it has ended.

    It is the owner of a shell (:class:`dmsg.glue.shell.Owner`). An invalid message ends the connection, and with it all calls.
    """

    def __init__(self, clock: IReactorTime, over: Callable[[Node, NodeFailed], None]) -> None:
        self.clock = clock
        self._over = over
        self._rpc = Rpc(clock.seconds())
        self._shell: WebSocketShell | None = None
        self._error: NodeFailed | None = None
        self._calls: dict[int, Deferred[Any]] = {}
        self._subscriptions: dict[SubscriptionId, Subscription] = {}

    def connected(self, shell: WebSocketShell) -> None:
        """The connection is open."""
        self._shell = shell

    def check(self) -> None:
        """Raise the error with which the connection has ended, if it has."""
        if self._error is not None:
            raise self._error

    async def call(self, method: str, *params: Any, limit_bytes: int = SMALL_BYTES) -> Any:
        """The result of ``method``, in at most ``limit_bytes``; raises ``NodeFailed``, ``NodeRefused``.

        The connection is closed if the node does not answer within :data:`TRIAL_S`.
        """
        self.check()
        assert self._shell is not None
        number, text = self._rpc.ask(method, params, limit_bytes)
        answer: Deferred[Any] = Deferred()
        self._calls[number] = answer
        late = self.clock.callLater(TRIAL_S, self.fail, NodeFailed("timeout", method))
        self._shell.send(text)
        self._shell.flush()
        try:
            return await answer
        finally:
            if late.active():
                late.cancel()

    async def subscribe(self, method: str, unsubscribe: str, *params: Any) -> Subscription:
        """Subscribe with ``method``; the notices come until the subscription is closed."""
        name = subscription_id(await self.call(method, *params))
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS or name in self._subscriptions:
            raise self.fail(NodeFailed("malformed", "one subscription twice"))
        made = self._subscriptions[name] = Subscription(self, name, unsubscribe)
        return made

    def unsubscribe(self, name: SubscriptionId, method: str) -> None:
        """Forget a subscription, and tell the node, whose answer does not matter."""
        if self._subscriptions.pop(name, None) is not None and self._error is None:
            Deferred.fromCoroutine(self.call(method, name)).addErrback(lambda why: why.trap(NodeFailed) and None)

    def fail(self, error: NodeFailed) -> NodeFailed:
        """End the connection with ``error``, and return ``error``."""
        if self._error is None:
            self._error = error
            if self._shell is not None:
                self._shell.cut()
            calls, self._calls = self._calls, {}
            subscriptions, self._subscriptions = self._subscriptions, {}
            for call in calls.values():
                if not call.called:
                    call.errback(error)
            for subscription in subscriptions.values():
                subscription.lost(error)
            self._over(self, error)
        return error

    # --- from the shell --------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Hand answers and notices to their callers."""
        for event in events:
            if isinstance(event, str):
                self._received(self._rpc.receive(event, self.clock.seconds()))
            elif isinstance(event, bytes):
                raise MalformedAnswer("a binary message")

    def after_read(self, shell: Shell) -> None:
        """Send what was asked meanwhile."""
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Do nothing: calls are short, so none waits for room."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        """Fail all calls and subscriptions."""
        if isinstance(error, MalformedAnswer):
            self.fail(NodeFailed("malformed", error.problem))
        elif isinstance(error, RemoteProtocolError):
            self.fail(NodeFailed("malformed", error.reason))
        else:
            self.fail(NodeFailed("lost", str(error or reason.getErrorMessage())))

    def _received(self, message: Answer | Refusal | Notice) -> None:
        if isinstance(message, Notice):
            subscription = self._subscriptions.get(message.subscription)
            if subscription is not None:
                subscription.heard(message.result)
            return
        call = self._calls.pop(message.number, None)
        if call is None or call.called:  # it was cancelled
            return
        if isinstance(message, Refusal):
            call.errback(NodeRefused(message.code, message.text))
        else:
            call.callback(message.result)
