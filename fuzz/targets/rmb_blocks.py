"""Blocks that change twins: a chain that grows and reverts blocks, nodes that fail, and the twins read again for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.rmb.twins import blocks as blocks_module
from dmsg.rmb.twins.blocks import BlockConfig, BlockWatch
from dmsg.rmb.twins.errors import NodeFailed, NodeRefused
from dmsg.rmb.twins.node import Node
from dmsg.rmb.twins.scale import EVENTS_KEY, compact, with_length
from dmsg.rmb.twins.substrate import Substrate
from fuzz.choices import Choices

_CONFIG = BlockConfig(stalled_s=7.0, catchup_threshold=6, catchup_at_once=2, pause_s=4.0)
_TWINS = range(1, 7)
_MAX_CHANGES = 4
_STORED, _UPDATED = b"\x19\x0b", b"\x19\x0c"
_BAD_ANSWERS: tuple[Any, ...] = (
    None,
    "0x00",
    "0x0",
    7,
    [],
    "0x" + "zz" * 32,
    NodeRefused(-32000, "no"),
    {"number": "0x1"},
)
_BAD_HEADS: tuple[Any, ...] = (
    None,
    {},
    {"number": -1, "parentHash": "0x" + "00" * 32},
    {"number": "0x1", "parentHash": "0x00"},
    5,
)


class _Block(NamedTuple):
    name: str
    parent: str
    number: int
    twins: frozenset[int]


@lru_cache(maxsize=4_096)
def _hash(number: int) -> str:
    return "0x" + hashlib.sha256(b"%d" % number).hexdigest()


def _listed(*items: bytes) -> bytes:
    return compact(len(items)) + b"".join(items)


def _enumeration(number: int, *variants: tuple[bytes, int]) -> bytes:
    named = [with_length(name) + b"\x00" + bytes((index,)) + b"\x00" for name, index in variants]
    return compact(number) + b"\x00\x00\x01" + _listed(*named) + b"\x00"


_TYPES = _listed(
    _enumeration(0, (b"update_twin", 18)), _enumeration(1, (b"TwinStored", _STORED[1]), (b"TwinUpdated", _UPDATED[1]))
)
_PALLET = with_length(b"TfgridModule") + b"\x00\x01\x00\x01\x04\x00\x00" + _STORED[:1]
_METADATA = "0x" + with_length(b"meta\x0e" + _TYPES + _listed(_PALLET) + b"\x00\x04\x00").hex()


def _header(block: _Block) -> dict[str, Any]:
    return {"number": hex(block.number), "parentHash": block.parent, "stateRoot": block.name}


class _Call(NamedTuple):
    """A question that a node has not answered yet."""

    method: str
    params: tuple[Any, ...]
    answer: Deferred[Any]


class _Heads:
    """The news of one node."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self.waiting: list[Any] = [world.head()]
        self.asked: Deferred[Any] | None = None
        self.asked_at = 0.0
        self.closed = False

    async def newest(self, limit_s: float) -> Any:
        """The last head, or the next one."""
        world = self._world
        self.asked_at = world.clock.seconds()
        if not self.waiting:
            self.asked = Deferred()
            self.asked.addTimeout(limit_s, world.clock, _late)
            await self.asked
        found = self.waiting[-1]
        self.waiting.clear()
        if found == world.head():
            world.heard |= world.old
        return found

    def tell(self, head: Any) -> None:
        self.waiting.append(head)
        if self.asked is not None and not self.asked.called:
            self.asked.callback(None)

    def close(self) -> None:
        self.closed = True


def _late(_: object, limit_s: float) -> None:
    raise NodeFailed("timeout", "no notice")


class _Node:
    """A node that answers when the input tells it to."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self.calls: list[_Call] = []
        self.heads: _Heads | None = None
        self.error: NodeFailed | None = None

    async def call(self, method: str, *params: Any, limit_bytes: int = 0) -> Any:
        if self.error is not None:
            raise self.error
        call = _Call(method, params, Deferred())
        self.calls.append(call)
        return await call.answer

    async def subscribe(self, method: str, unsubscribe: str) -> _Heads:
        await self.call(method)
        self.heads = _Heads(self._world)
        return self.heads

    def fail(self, error: NodeFailed) -> None:
        """The node fails: everything that waits for it fails."""
        if self.error is None:
            self.error = error
            calls, self.calls = self.calls, []
            for call in calls:
                if not call.answer.called:
                    call.answer.errback(error)
            if self.heads is not None and self.heads.asked is not None and not self.heads.asked.called:
                self.heads.asked.errback(error)


class _World:
    """The chain, the node in use, the watch, and the twins that may be remembered in an old state.

    Also stands for :class:`Substrate`.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.clock = Clock()
        self.made = 0
        self.chain: list[_Block] = []
        #: The blocks whose hashes nodes have told.
        self.seen: set[str] = set()
        #: All blocks, including reverted ones.
        self.blocks: dict[str, _Block] = {}
        #: Twins that have changed since they were last read.
        self.old: set[int] = set()
        #: Whether a node failed since the last block was read, and whether blocks came that are too many, too large or reverts.
        self.failed = self.missed = True
        self.needless = False
        #: The last block that was being read when a node failed.
        self.failed_at = -1
        #: Those of the old twins whose blocks were announced to the watch.
        self.heard: set[int] = set()
        self.current: _Node | None = None
        self.refuses = False
        #: Reasons why nodes were given up.
        self.given_up: list[str] = []
        self.failures = 0
        self.useful = 0
        self.append(frozenset())
        self.watch = BlockWatch(self.clock, cast(Substrate, self), self.changed, self.unknown, _CONFIG)

    # --- in place of Substrate ---------------------------------------------------------------------------------------

    async def node(self) -> Node:
        if self.refuses:
            self.failures += 1
            raise NodeFailed("connect")
        if self.current is None:
            self.current = _Node(self)
        return cast(Node, self.current)

    def give_up(self, node: _Node, error: NodeFailed) -> None:
        assert node is self.current
        self.current = None
        self.failures += 1
        self.failed = True
        self.failed_at = -1 if self.watch.last is None else self.watch.last[0]
        self.given_up.append(error.reason)
        node.fail(error)

    def worked(self) -> None:
        self.useful += 1

    # --- what the watch tells -------------------------------------------------------------------------------------------

    def changed(self, number: int) -> None:
        """The twin is read again."""
        self.old.discard(number)
        self.heard.discard(number)

    def unknown(self) -> None:
        """Every twin is read again, which must not happen needlessly."""
        self.needless |= not (self.failed or self.missed)
        self.old.clear()
        self.heard.clear()

    # --- the chain -------------------------------------------------------------------------------------------------

    def append(self, twins: frozenset[int]) -> None:
        self.made += 1
        parent = self.chain[-1].name if self.chain else _hash(0)
        block = _Block(_hash(self.made), parent, len(self.chain), twins)
        self.chain.append(block)
        self.blocks[block.name] = block
        self.old |= twins
        self.missed |= len(twins) > _MAX_CHANGES

    def head(self) -> dict[str, Any]:
        """The header of the best block."""
        return _header(self.chain[-1])

    def grow(self, count: int) -> None:
        """New blocks; nodes announce each of them, or only the last."""
        each = self.choices.flag()
        for number in range(count):
            self.append(self._some())
            last = self.watch.last
            self.missed |= last is not None and self.chain[-1].number - last[0] > _CONFIG.catchup_threshold
            if each or number == count - 1:
                self.tell(self.head())

    def take_back(self) -> None:
        """Blocks are reverted and replaced by more, as many, or fewer."""
        back = 1 + self.choices.below(4)
        # The watch does not notice the revert of a change that it has not seen.
        if back >= len(self.chain) or any(one.twins and one.name not in self.seen for one in self.chain[-back:]):
            return
        for block in self.chain[-back:]:
            self.old |= block.twins
        self.missed = True
        del self.chain[-back:]
        for _ in range(1 + self.choices.below(back + 2)):
            self.append(self._some())
        self.tell(self.head())

    def _some(self) -> frozenset[int]:
        bits = self.choices.byte()
        return frozenset(twin for twin in _TWINS if bits >> twin & 1) if bits & 1 else frozenset()

    # --- what nodes do ---------------------------------------------------------------------------------------------

    def tell(self, head: Any) -> None:
        if self.current is not None and self.current.heads is not None:
            self.current.heads.tell(head)

    def answer(self, bad: bool) -> None:
        """Answer one of the questions. A bad answer ends the connection, and the changes of its blocks stay unknown."""
        node = self.current
        if node is None or not node.calls:
            return
        call = node.calls.pop(self.choices.below(len(node.calls)))
        answer = self._honest(call)
        if bad and call.method != "chain_subscribeNewHeads":
            answer = self.choices.pick(_BAD_ANSWERS)
            if answer in (None, "0x00") and call.method == "state_getStorage":
                answer = 7  # other events would be a lie that nobody can see
            self.failed = True
        if isinstance(answer, NodeFailed):
            call.answer.errback(answer)
        else:
            call.answer.callback(answer)
        is_seen = bad and call.method in ("chain_getBlockHash", "chain_getHeader", "state_call")
        assert not is_seen or self.current is None

    def _honest(self, call: _Call) -> Any:
        match call.method:
            case "state_call":
                return _METADATA
            case "chain_getBlockHash":
                if call.params[0] >= len(self.chain):
                    return None
                self.seen.add(self.chain[call.params[0]].name)
                return self.chain[call.params[0]].name
            case "chain_getHeader":
                return _header(self.blocks[call.params[0]])
            case "state_getStorage":
                assert call.params[0] == "0x" + EVENTS_KEY.hex()
                return self._events(call.params[1])
            case _:
                return "s"

    def _events(self, name: str) -> str | None:
        block = self.blocks[name]
        if not block.twins and block.number & 1:
            return None
        kinds: Sequence[bytes] = (_STORED, _UPDATED)
        events = b"".join(kinds[twin & 1] + twin.to_bytes(4, "little") + bytes(twin) for twin in block.twins)
        return "0x" + (b"\x19" * (block.number % 3) + events).hex()

    def lose(self) -> None:
        """The node goes away."""
        node = self.current
        if node is not None and node.heads is not None and node.heads.asked is not None:
            self.failed = True
            node.fail(NodeFailed("lost"))
            assert self.current is None

    def wait(self) -> None:
        """Time passes; a node without news for too long is given up."""
        node, before = self.current, len(self.given_up)
        step = self.choices.byte() / 16
        heads = node.heads if node is not None else None
        listens = heads is not None and heads.asked is not None and not heads.asked.called
        stalled = listens and heads is not None and self.clock.seconds() + step >= heads.asked_at + _CONFIG.stalled_s
        self.clock.advance(step)
        assert self.given_up[before:] == ["stalled"] * stalled

    # --- what must hold --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is in progress: the watch has read every announced block."""
        node = self.current
        return node is not None and not node.calls and node.heads is not None and not node.heads.waiting

    def check(self) -> None:
        """The watch keeps running; once it has done its work, no twin changed by a block is remembered in an old state."""
        watch, best = self.watch, self.chain[-1]
        running = watch._running
        assert running is not None and not running.called
        assert self.current is not None or self.clock.getDelayedCalls()
        assert watch.reconnects == self.failures and not self.needless
        if self.current is None:
            assert not self.heard
        elif self.idle:
            assert not self.old
            assert watch.last is not None and watch.listens
            if watch.last == (best.number, best.name):
                self.failed = self.missed = False
            else:
                assert watch.last == (best.number, "") and best.number == self.failed_at  # it could not be looked at

    def stop(self) -> None:
        """The watch ends, and leaves nothing behind."""
        ended: list[Any] = []
        running, node = self.watch._running, self.current
        assert running is not None
        running.addBoth(ended.append)
        self.watch.stop()
        assert len(ended) == 1 and not isinstance(ended[0], Failure)
        assert not self.clock.getDelayedCalls()
        assert node is None or node.heads is None or node.heads.closed


def one_input(data: bytes) -> None:
    """Operations: new and reverted blocks, answers, bad answers, lost nodes, time."""
    world = _World(Choices(data))
    choices = world.choices
    with mock.patch.object(blocks_module, "MAX_CHANGES", _MAX_CHANGES):
        world.watch.start()
        for _ in range(60):
            if not choices.left:
                break
            match choices.below(12):
                case 0:
                    world.wait()
                case 1:
                    world.grow(1 + choices.below(4))
                case 2:
                    world.grow(1)
                case 3:
                    world.take_back()
                case 4:
                    world.answer(bad=True)
                case 5:
                    world.lose()
                case 6:
                    world.refuses = not world.refuses
                case 7:
                    world.tell(choices.pick(_BAD_HEADS))
                case _:
                    world.answer(bad=False)
            world.check()
        world.stop()


def seeds() -> Iterator[bytes]:
    """A watched chain; blocks one by one, many at once, reverted; nodes that fail at each step."""
    begin = b"\x08" * 5  # metadata, subscription, hash, header and events of the first head
    block = b"\x02\x00\x07" + b"\x08" * 3
    yield begin + block * 3 + b"\x02\x00\xff" + b"\x08" * 3 + b"\x02\x00\x00" + b"\x08" * 3
    yield begin + block * 5 + b"\x03\x03\x00\x00" + b"\x08" * 3 + block
    yield begin + block * 3 + b"\x02\x00\x07\x03\x00\x00\x0f\x0f" + b"\x08" * 6 + block
    for count in (1, 2, 3):
        yield begin + block * 2 + bytes((1, count, 0)) + b"\x07" * 4 + b"\x08\x00" * 12 + block
    for back in range(4):
        for more in range(3):
            again = bytes((3, back, back + more)) + b"\x0f" * (back + 1 + more)
            yield begin + block * 5 + again + b"\x08\x00" * 12 + block
    for bad in range(8):
        fail = bytes((4, bad))
        yield fail + b"\x00\x10" + begin
        yield begin + b"\x02\x00\x07" + fail + b"\x00\x10" + begin + block
        yield begin + b"\x02\x00\x07\x08" + fail + b"\x00\x10" + begin + block
        yield begin + b"\x02\x00\x07\x08\x08" + fail + b"\x00\x10" + begin + block
    for bad in range(5):
        yield begin + bytes((7, bad)) + b"\x00\x10" + begin + block
    yield (
        begin
        + b"\x05"
        + b"\x01\x03\x01"
        + b"\x07" * 4
        + b"\x06\x00\x10\x00\x20\x06\x00\x40"
        + begin
        + b"\x08\x00" * 12
        + block
    )
    yield begin + b"\x01\x03\x00" + b"\x07" * 4 + b"\x01\x03\x00" + b"\x07" * 4 + b"\x08\x00" * 20
    yield begin + b"\x00\x70" + b"\x00\x10" + begin + b"\x00\x6f" + block
    yield b"\x08\x08\x08\x04\x00\x00\x10\x08\x08" + b"\x08\x08"
    yield bytes((number * 7919) % 251 for number in range(300))
