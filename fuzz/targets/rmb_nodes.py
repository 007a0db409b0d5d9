"""Questions to several chain nodes that lie, stay silent, refuse and disconnect; without a network."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.errors import RemoteProtocolError
from dmsg.glue.websocket import WebSocketUrl
from dmsg.rmb.twins import substrate as nodes
from dmsg.rmb.twins.errors import MalformedAnswer, NodeFailed, NodeRefused, RegistryError
from dmsg.rmb.twins.node import KEPT_NOTICES, Node, Subscription
from dmsg.rmb.twins.rpc import (
    MAX_COMMAS,
    NOTICE_BURST,
    NOTICES_PER_S,
    SMALL_BYTES,
    member,
    read_hash,
    read_hex,
    read_number,
)
from dmsg.rmb.twins.substrate import REST_S, TRIALS_PER_NODE, Substrate
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import as_text, outcome

DICTIONARY = words.members("jsonrpc", "id", "result", "error", "method", "params", "subscription", "code", "message")

_URLS = tuple(WebSocketUrl.parse(f"ws://{name}.example:80/") for name in "ab")
#: Greatest lengths of an answer.
_LIMITS = (40, 100, SMALL_BYTES)


class _Shell:
    """A connection to a node, and its unanswered questions: the longest allowed answer and the method of each."""

    def __init__(self, node: Node, now: float) -> None:
        self.node = node
        self.gone = self.blamed = False
        self.questions: dict[int, tuple[int, str]] = {}
        self.opened_at = now
        self.notices = 0

    def send(self, text: str) -> None:
        """A question."""
        question = json.loads(text)
        assert question["jsonrpc"] == "2.0" and question["id"] not in self.questions and not self.gone
        method = question["method"]
        self.questions[question["id"]] = question["params"][0] if method == "m" else SMALL_BYTES, method

    def flush(self) -> None:
        """Everything is sent at once."""

    def cut(self) -> None:
        """The connection ends."""
        self.gone = True

    def waited(self, number: int) -> bool:
        """Whether somebody still waits for the answer to this question."""
        return number in self.questions and not self.node._calls[number].called


class _Asked:
    """A question of a caller, and whether it has a result."""

    def __init__(self) -> None:
        self.trials = 0
        self.done = False
        self.rested = False
        self.deferred: Deferred[Any] | None = None


class _World:
    """Two nodes, one connected or dialled at a time; the callers; a subscriber."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.clock = Clock()
        self.substrate = Substrate(self.clock, _URLS)
        self.dial: tuple[Deferred[Any], Node, int] | None = None
        self.shell: _Shell | None = None
        self.asked: list[_Asked] = []
        self.told: set[str] = set()
        #: The node whose turn it is, and how often it was lost without having been of use.
        self.place = self.losses = 0
        self.rest_until = 0.0
        self.closed = False
        #: Failures that a Deferred would hide.
        self.broken: list[Failure] = []
        self.subscription: Subscription | None = None
        self.name = ""
        self.notices: deque[Any] = deque(maxlen=KEPT_NOTICES)
        self.noticed = 0
        self.taking = False

    @property
    def live(self) -> _Shell | None:
        """The connection, if there is one."""
        return None if self.shell is None or self.shell.gone else self.shell

    # --- dials -----------------------------------------------------------------------------------------------------

    def connect(self, _: object, url: WebSocketUrl, node: Node, config: object, *, timeout_s: float) -> Deferred[Any]:
        """In place of the network's: one dial at a time, and only without a connection."""
        assert self.dial is None and self.live is None
        dialling: Deferred[Any] = Deferred()
        self.dial = dialling, node, _URLS.index(url)
        return dialling

    def answer_dial(self, good: bool) -> None:
        """The dial succeeds or fails."""
        if self.dial is None:
            return
        (dialling, node, _), self.dial = self.dial, None
        if good:
            self.shell = _Shell(node, self.clock.seconds())
            self.subscription = None
            dialling.callback(self.shell)
        else:
            lost = self.choices.flag()
            self.turned(lost)
            dialling.errback(NodeFailed("lost") if lost else OSError("no route"))

    def turned(self, lost: bool = False) -> None:
        """A node failed: the next one's turn, unless it was lost for the first time since it was of use."""
        self.losses += 1
        if not lost or self.losses > 1:
            self.losses, self.place = 0, 1 - self.place

    # --- who asks --------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Somebody asks for something that takes one or two questions."""
        if sum(not one.done for one in self.asked) > 4:
            return
        one, limit, count = _Asked(), self.choices.pick(_LIMITS), 1 + self.choices.below(2)
        trials = self.choices.pick((None, None, 1))

        async def job(node: Node) -> list[Any]:
            one.trials += 1
            return [await node.call("m", limit, limit_bytes=limit) for _ in range(count)]

        rests = self.clock.seconds() < self.rest_until
        self.asked.append(one)
        one.deferred = Deferred.fromCoroutine(self.substrate.ask(job, trials))
        one.deferred.addBoth(self.answered, one, trials).addErrback(self.broken.append)
        assert one.rested is rests and not (rests and one.trials)

    def answered(self, result: Any, one: _Asked, trials: int | None) -> None:
        """The answer is a node's; without one, all allowed trials were made, or everything has ended."""
        assert not one.done and one.trials <= (trials or TRIALS_PER_NODE * len(_URLS))
        one.done = True
        if not isinstance(result, Failure):
            assert {json.dumps(each) for each in result} <= self.told
            self.losses = 0
        elif result.check(RegistryError):
            error = cast(RegistryError, result.value)
            one.rested = error.detail == "no node answered a moment ago"
            assert error.reason == "unavailable" or (self.closed and error.reason == "closed")
            if trials is None and not one.rested:
                self.rest_until = self.clock.seconds() + REST_S
        else:
            result.trap(CancelledError)

    def give_in(self) -> None:
        """A caller cancels its question."""
        waiting = [one for one in self.asked if not one.done]
        if waiting:
            one = self.choices.pick(waiting)
            assert one.deferred is not None
            one.deferred.cancel()
            assert one.done

    # --- what nodes do ---------------------------------------------------------------------------------------------

    def receive(self, shell: _Shell, text: str) -> bool:
        """A message arrives; gives whether it was expected."""
        try:
            shell.node.handle_events(cast(Any, shell), [text])
            shell.node.after_read(cast(Any, shell))
        except RemoteProtocolError as error:
            shell.gone = True
            self.turned()
            shell.node.connection_lost(cast(Any, shell), error, Failure(error))
            return False
        return True

    def answer(self, shell: _Shell) -> None:
        """An answer, or a refusal, after which the next node is asked. A too long answer is not accepted."""
        if not shell.questions:
            return
        choices = self.choices
        number = choices.pick(tuple(shell.questions))
        waited = shell.waited(number)
        limit, method = shell.questions.pop(number)
        refused = choices.below(4) == 0
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": number}
        if refused:
            message["error"] = choices.pick(({"code": -1, "message": "no"}, {}, 5, {"code": "c", "message": "n" * 999}))
        else:
            message["result"] = f"{len(self.told)}".rjust(choices.byte() % 100, "0")
            self.told.add(json.dumps(message["result"]))
        text = json.dumps(message, separators=(",", ":"))
        good = len(text) <= limit
        if good and refused and waited and method == "m":
            self.turned()
        assert self.receive(shell, text) is good

    def say_anything(self, shell: _Shell, text: str) -> None:
        """Any text is an answer to something that was asked, a notice, or the end."""
        waited = {number: one for number, (_, one) in shell.questions.items() if shell.waited(number)}
        known = dict(shell.questions)
        message = outcome(lambda: json.loads(text), (ValueError, RecursionError))[1]
        if isinstance(message, dict):
            self.told.add(json.dumps(message.get("result")))
        if isinstance(message, dict) and "method" in message:
            shell.notices += 1
            params = message.get("params")
            if isinstance(params, dict) and "result" in params and params.get("subscription") == self.name:
                self.notices.append(params["result"])
        if not self.receive(shell, text):
            return
        assert text.count(",") <= MAX_COMMAS
        if "method" not in message:
            number = message["id"]
            assert len(text) <= known[number][0]
            shell.questions.pop(number)
            if message.get("error") is not None and waited.get(number) == "m":
                self.turned()

    def binary(self, shell: _Shell) -> None:
        """A binary message ends the connection."""
        assert outcome(lambda: shell.node.handle_events(cast(Any, shell), [b"{}"]), MalformedAnswer)[0] == "error"
        self.lose(shell, MalformedAnswer("a binary message"))

    def lose(self, shell: _Shell, error: RemoteProtocolError | None = None) -> None:
        """A connection is lost."""
        shell.gone = True
        self.turned(lost=error is None)
        shell.node.connection_lost(cast(Any, shell), error, Failure(error or OSError("reset")))

    def wait(self) -> None:
        """Time passes; a node that has not answered in time is left."""
        shell = self.live
        late = shell is not None and bool(shell.questions)
        self.clock.advance(self.choices.byte() / 8)
        if shell is not None and shell.gone:
            assert late
            self.turned()

    # --- who listens -------------------------------------------------------------------------------------------------

    def subscribe(self, shell: _Shell) -> None:
        """A caller subscribes, and gives up a node that sends nonsense."""

        async def listen(node: Node) -> None:
            try:
                self.subscription = await node.subscribe("s", "u")
                self.name = cast(str, self.subscription._name)
                self.notices.clear()
                self.taking = False
            except MalformedAnswer as error:
                self.turned()
                self.substrate.give_up(node, NodeFailed("malformed", error.problem))
            except NodeRefused:
                return
            except NodeFailed as error:
                # All who wait for that node are told.
                if error.reason == "malformed" and error.detail == "one subscription twice" and not shell.blamed:
                    shell.blamed = True
                    self.turned()

        if self.subscription is None:
            Deferred.fromCoroutine(listen(shell.node)).addErrback(self.broken.append)

    def notice(self, shell: _Shell, count: int) -> None:
        """News of the subscription, perhaps too many at once."""
        for _ in range(count):
            shell.notices += 1
            self.noticed += 1
            self.notices.append(self.noticed)
            earned = (self.clock.seconds() - shell.opened_at) * NOTICES_PER_S
            text = json.dumps({"method": "n", "params": {"subscription": self.name, "result": self.noticed}})
            fits = len(text) <= max((limit for limit, _ in shell.questions.values()), default=SMALL_BYTES)
            good = self.receive(shell, text)
            assert good or shell.notices > NOTICE_BURST or not fits
            assert not good or shell.notices <= NOTICE_BURST + earned + 1
            if not good:
                self.notices.pop()
                return

    def take_notice(self) -> None:
        """Take the next notice or the newest one, or wait for one."""
        subscription = self.subscription
        if subscription is None or self.live is None or self.taking:
            return
        newest = self.choices.flag()
        self.taking = True
        taken = subscription.newest(5.0) if newest else subscription.next(5.0)
        taken_now = Deferred.fromCoroutine(taken)
        taken_now.addBoth(self.taken, newest, subscription).addErrback(self.broken.append)
        assert self.taking is (not taken_now.called)

    def taken(self, result: Any, newest: bool, subscription: Subscription) -> None:
        """Check that it is the oldest notice kept, or the newest."""
        if isinstance(result, Failure):
            result.trap(NodeFailed)
            self.taking = self.taking and subscription is not self.subscription
            return
        while newest and len(self.notices) > 1:
            self.notices.popleft()
        assert self.notices.popleft() == result
        self.taking = False

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The right node has its turn, and every caller that waits has a reason."""
        self.raise_broken()
        if self.live is None:
            self.subscription = None
        assert self.substrate._place == self.place
        assert self.dial is None or self.dial[2] == self.place
        if any(not one.done for one in self.asked):
            assert self.dial is not None or self.live is not None

    def raise_broken(self) -> None:
        """Raise the first of what failed."""
        for failure in self.broken:
            failure.raiseException()

    def close(self) -> None:
        """All callers get an error, and nothing goes on."""
        self.closed = True
        Deferred.fromCoroutine(self.substrate.close())
        self.dial = None
        assert all(one.done for one in self.asked) and self.live is None
        assert not self.clock.getDelayedCalls()
        self.clock.advance(REST_S)
        self.ask()
        assert self.asked[-1].done and not self.asked[-1].trials
        self.raise_broken()


def one_input(data: bytes) -> None:
    """First byte odd: the rest is a value of an answer. Even: operations, and then a close."""
    choices = Choices(data)
    if choices.flag():
        _values(choices)
        return
    world = _World(choices)
    with mock.patch.object(nodes, "connect_websocket", world.connect):
        for _ in range(60):
            if not choices.left:
                break
            _operation(world, choices)
            world.check()
        world.close()


def _operation(world: _World, choices: Choices) -> None:
    shell = world.live
    match choices.below(14):
        case 0:
            world.wait()
        case 1:
            world.answer_dial(choices.below(4) > 0)
        case 2:
            world.give_in()
        case 3 if shell:
            world.lose(shell)
        case 4 if shell:
            text = as_text(choices.chunk())
            world.say_anything(shell, text.ljust(MAX_COMMAS + 1, ",") if text.endswith(",") else text)
        case 5 if shell:
            world.subscribe(shell)
        case 6 if shell and world.subscription:
            world.notice(shell, 1 + choices.byte() // 250 * 60)
        case 7:
            world.take_notice()
        case 8 if shell and world.subscription and not world.taking:
            world.subscription.close()
            world.subscription = None
        case 9 if shell:
            world.binary(shell)
        case 10 | 11 | 12 if shell:
            world.answer(shell)
        case _:
            world.ask()


def _values(choices: Choices) -> None:
    """Bytes, hashes and numbers are read as they were written, within their limits."""
    limit = choices.byte()
    kind, value = outcome(lambda: json.loads(as_text(choices.rest())), (ValueError, RecursionError))
    if kind == "error":
        return
    kind, data = outcome(lambda: read_hex(value, limit), MalformedAnswer)
    if kind == "value":
        assert len(data) <= limit and value.lower() == "0x" + data.hex()
    kind, text = outcome(lambda: read_hash(value), MalformedAnswer)
    assert kind == "error" or (text == value and len(value) == 66 and len(bytes.fromhex(value[2:])) == 32)
    kind, number = outcome(lambda: read_number(value, limit), MalformedAnswer)
    if kind == "value":
        assert type(number) is int and 0 <= number <= limit
        assert number == (int(value[2:], 16) if isinstance(value, str) else value)
    kind, found = outcome(lambda: member(value, "a"), MalformedAnswer)
    assert (kind == "value") == (isinstance(value, dict) and "a" in value) and (kind == "error" or found == value["a"])


def seeds() -> Iterator[bytes]:
    """Values of each kind; answers, refusals, silence, losses, dials that fail; a subscription with too many notices."""
    for value in (
        *(
            b'"0x00ff"',
            b'"0x0"',
            b'"0x00 "',
            b'"00"',
            b'"0x 0"',
            b'"0xzz"',
            b'"0x' + b"0a" * 32 + b'"',
            b'"0x1_0"',
            b"7",
            b"-1",
            b"true",
        ),
        *(b"null", b"[]", b'{"a":1}', b'{"b":1}', b'"0x' + b"f" * 16 + b'"', b"{"),
    ):
        yield b"\x01\x21" + value
    ask, dial, fail, reply = b"\x0d\x02\x01\x00", b"\x01\x01", b"\x01\x00\x00", b"\x0a\x01\x05"
    yield b"\x00" + ask + dial + reply * 2 + ask + reply * 2
    yield b"\x00" + ask * 2 + fail * 2 + dial + reply * 4
    yield b"\x00" + ask + fail * 4 + ask + b"\x00\x20" + ask + dial
    yield b"\x00" + b"\x0d\x00\x00\x02" + dial + b"\x0a\x01\x60" + ask
    yield b"\x00" + ask + dial + b"\x0a\x00\x00" + dial + b"\x0a\x00\x03" + dial + b"\x03" + dial + b"\x03" + dial
    yield b"\x00" + ask + dial + b"\x00\x60" + dial + b"\x09" + b"\x02" + ask + dial + b"\x02" + reply
    yield b"\x00" + ask + dial + b"\x00\x58" + reply + b"\x00\x08" + dial + reply
    for text in (
        *(
            b'{"id":1,"result":7}',
            b'{"id":1,"error":{"code":1,"message":"m"}}',
            b'{"id":1}',
            b'{"id":2,"result":1}',
            b"[]",
        ),
        *(
            b'{"id":true,"result":1}',
            b"{",
            b'{"method":"n"}',
            b'{"method":"n","params":{"subscription":[],"result":1}}',
        ),
        *(b'{"method":"n","params":{"subscription":"x","result":1}}', b",", b'{"id":1,"result":"\xed\xa0\x80"}'),
    ):
        yield b"\x00" + ask + dial + b"\x04" + bytes((len(text),)) + text
    listen = b"\x00" + ask + dial + b"\x05\x0b\x01\x01\x00"
    news = b"\x06\x00"
    yield (
        listen
        + news * 3
        + b"\x07\x00" * 2
        + news * 20
        + b"\x07\x00\x07\x01\x07\x00"
        + news
        + b"\x07\x01\x00\x30"
        + b"\x08"
        + news
    )
    yield listen + b"\x06\xff" * 3 + b"\x00\x08\x06\xff" * 2
    yield listen + b"\x07\x00\x03" + b"\x05"
    yield listen + b"\x08\x05\x0b\x01\x01\x00\x07\x00\x07\x00"
    for result in (b"[]", b"7", b'"' + b"s" * 65 + b'"', b"true", b'"s"'):
        text = b'{"id":3,"result":' + result + b"}"
        say = b"\x04" + bytes((len(text),))
        yield b"\x00" + ask + dial + b"\x05\x05" + say + text.replace(b"3", b"2") + say + text
    yield b"\x00" + bytes((number * 7919) % 251 for number in range(400))
