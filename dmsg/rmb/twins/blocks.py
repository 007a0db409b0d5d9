"""Listens for new blocks, and reports which twins they change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from twisted.internet.defer import CancelledError, Deferred, FirstError, gatherResults
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.rmb.twins.errors import MalformedAnswer, NodeFailed, RegistryError
from dmsg.rmb.twins.metadata import MAX_METADATA_BYTES, Metadata, read_metadata
from dmsg.rmb.twins.node import Node
from dmsg.rmb.twins.rpc import SMALL_BYTES, member, read_hash, read_hex, read_number
from dmsg.rmb.twins.scale import EVENTS_KEY
from dmsg.rmb.twins.substrate import Substrate
from dmsg.sansio.backoff import Backoff

#: Size of the events of a block: usually some KiB.
MAX_EVENTS_BYTES: Final = 1024 * 1024
#: Places in one block that may change a twin; above that, the whole cache is cleared.
MAX_CHANGES: Final = 10_000
_LAST_BLOCK: Final = 2**48
_log = Logger()


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """How to listen for blocks. Times are in seconds."""

    #: The chain makes a block every six seconds; a node that has none for this long has stalled.
    stalled_s: float = 7.0
    #: Missed blocks that are fetched afterwards; if more were missed, the whole cache is cleared.
    catchup_threshold: int = 600
    #: Missed blocks fetched at the same time.
    catchup_at_once: int = 20
    #: The longest pause before listening again; the first is one second, and it doubles each time.
    pause_s: float = 6.0


class _Head(NamedTuple):
    """The parts of a block's header that identify it: its number, its parent, and the state after it."""

    number: int
    parent: str
    state: Any


def changed_twins(events: bytes, starts: Sequence[bytes]) -> set[int] | None:
    """The numbers of the twins that ``events`` may change; ``starts`` are the first two bytes of events that change one.

    Events of other pallets are not decoded, so this takes every place that looks like such an event: the two bytes and then the
    number. A false match costs one look-up, and no change can be missed. Returns ``None`` for more than :data:`MAX_CHANGES`
    places: a node could fill a block with matches of one number, which would take 300 ms to read.
    """
    places = re.finditer(b"(?=" + b"|".join(b"(?:%s)" % re.escape(start) for start in starts) + b")", events)
    some = [place.start() + 2 for place in islice(places, MAX_CHANGES + 1)]
    if len(some) > MAX_CHANGES:
        return None
    return {int.from_bytes(events[at : at + 4], "little") for at in some}


async def ask_metadata(node: Node) -> Metadata:
    """What the node's metadata says about twins."""
    limit = 2 * MAX_METADATA_BYTES + SMALL_BYTES
    found = await node.call("state_call", "Metadata_metadata", "0x", None, limit_bytes=limit)
    return read_metadata(read_hex(found, MAX_METADATA_BYTES + 8))


class BlockWatch:
    """Calls ``changed(number)`` for each twin that a new block changes, and ``unknown()`` when blocks were missed.

    It runs until it is stopped, with pauses after failures in which it hears nothing.
    """

    def __init__(
        self,
        clock: IReactorTime,
        substrate: Substrate,
        changed: Callable[[int], None],
        unknown: Callable[[], None],
        config: BlockConfig | None = None,
    ) -> None:
        self._clock = clock
        self._substrate = substrate
        self._changed = changed
        self._unknown = unknown
        self._config = config or BlockConfig()
        #: The number of the last block that was read, and its hash, which is "" if reading it failed.
        self.last: tuple[int, str] | None = None
        #: How often it had to start listening again.
        self.reconnects = 0
        self._failures = 0
        self._running: Deferred[None] | None = None

    @property
    def listens(self) -> bool:
        """Whether the last thing heard was a block, and not that a node failed."""
        return self.last is not None and not self._failures

    def start(self) -> None:
        """Begin to listen."""
        self._running = Deferred.fromCoroutine(self._run())
        self._running.addErrback(lambda why: why.trap(CancelledError) and None)

    def stop(self) -> None:
        """Stop listening."""
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._listen(await self._substrate.node())
            except (NodeFailed, RegistryError) as error:
                _log.debug("blocks are not heard of: {error}", error=error)
            pause_s = Backoff(limit_s=self._config.pause_s).longest_s(self._failures + 1)
            self._failures += 1
            self.reconnects += 1
            await deferLater(self._clock, pause_s)

    async def _listen(self, node: Node) -> None:
        """Listen until the node fails; raises that failure."""
        try:
            starts = (await ask_metadata(node)).changes
            heads = await node.subscribe("chain_subscribeNewHeads", "chain_unsubscribeNewHeads")
            try:
                while True:
                    try:
                        head = await heads.newest(self._config.stalled_s)
                    except NodeFailed as error:
                        raise NodeFailed("stalled") if error.reason == "timeout" else error from None
                    await self._take(node, starts, head)
                    self._failures = 0
                    self._substrate.worked()
            finally:
                heads.close()
        except MalformedAnswer as error:
            failed = NodeFailed("malformed", error.problem)
            self._substrate.give_up(node, failed)
            raise failed from None
        except NodeFailed as error:
            self._substrate.give_up(node, error)
            raise

    async def _take(self, node: Node, starts: Sequence[bytes], head: Any) -> None:
        number = read_number(member(head, "number"), _LAST_BLOCK)
        parent = read_hash(member(head, "parentHash"))
        last, last_hash = self.last or (number, "")
        if number == last and self.last and not last_hash:
            self._unknown()  # reading this block failed before, and would fail again
            return
        first = last  # read it again, to see whether it is still the same block
        if number == last + 1 and parent == last_hash:
            first = number
        elif not last_hash or number == last + 1 or not 0 <= number - last <= self._config.catchup_threshold:
            self._unknown()  # the first block, one after a failed or reverted block, or one too far away
            first = number
        self.last = number, ""
        try:
            await self._look(
                node,
                starts,
                first,
                _Head(number, parent, head.get("stateRoot")),
                {last: last_hash} if last_hash else {},
            )
        except (NodeFailed, MalformedAnswer):
            self._unknown()
            raise

    async def _look(self, node: Node, starts: Sequence[bytes], first: int, head: _Head, known: dict[int, str]) -> None:
        """Read the blocks from ``first`` to ``head``. ``known`` are hashes of some; another hash means a reverted block.

        So does a block that is not the child of the one before it, or differs from the announced head: a node may switch to
        another fork between two answers.
        """
        step = self._config.catchup_at_once
        for start in range(first, head.number + 1, step):
            numbers = range(start, min(start + step, head.number + 1))
            asked = [Deferred.fromCoroutine(self._changes(node, starts, number)) for number in numbers]
            try:
                found = await gatherResults(asked, consumeErrors=True)
            except FirstError as error:
                raise error.subFailure.value from None  # type: ignore[misc]
            for block_hash, block, changes in found:
                is_other = (
                    known.get(block.number, block_hash) != block_hash
                    or known.get(block.number - 1, block.parent) != block.parent
                    or (block.number == head.number and block != head)
                )
                if is_other:
                    self._unknown()
                elif known.get(block.number) != block_hash:  # otherwise it was read before
                    self._tell(changes)
                known[block.number] = block_hash
                self.last = block.number, block_hash

    def _tell(self, changes: set[int] | None) -> None:
        """Report the twins that a new block changes; ``None`` means that they are not known."""
        if changes is None:
            self._unknown()
            return
        for twin in changes:
            self._changed(twin)

    async def _changes(self, node: Node, starts: Sequence[bytes], number: int) -> tuple[str, _Head, set[int] | None]:
        """The hash of a block, its header, and the twins it changes."""
        block_hash = read_hash(await node.call("chain_getBlockHash", number))
        header = await node.call("chain_getHeader", block_hash)
        block = _Head(number, read_hash(member(header, "parentHash")), header.get("stateRoot"))
        limit = 2 * MAX_EVENTS_BYTES + SMALL_BYTES
        found = await node.call("state_getStorage", "0x" + EVENTS_KEY.hex(), block_hash, limit_bytes=limit)
        events = b"" if found is None else read_hex(found, MAX_EVENTS_BYTES)
        return block_hash, block, changed_twins(events, starts)
