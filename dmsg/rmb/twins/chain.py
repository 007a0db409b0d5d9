"""The registry on tfchain: it reads twins from nodes and caches them, and updates our own twin by a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from zope.interface import implementer

from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.core.limits import MAX_TWIN
from dmsg.rmb.core.twin import Twin, format_relays, parse_relays
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.twins.blocks import BlockConfig, BlockWatch, ask_metadata
from dmsg.rmb.twins.cache import CacheLimits, TwinCache
from dmsg.rmb.twins.errors import MalformedAnswer, NodeFailed, NoSuchAccount, RegistryError
from dmsg.rmb.twins.extrinsic import Runtime, sign_extrinsic, ss58, update_call
from dmsg.rmb.twins.node import Node
from dmsg.rmb.twins.rpc import SMALL_BYTES, member, read_hash, read_hex, read_number
from dmsg.rmb.twins.scale import MAX_TWIN_BYTES, account_key, decode_number, decode_twin, twin_key
from dmsg.rmb.twins.substrate import Substrate
from dmsg.sansio.backoff import Backoff

#: Timeout for a transaction to become final. That usually takes some 20 seconds, but the chain may have stopped finalizing.
FINAL_S: Final = 90.0
#: Seconds after which no further attempt of an update begins; and the pauses between two attempts.
UPDATE_S: Final = 60.0
UPDATE_PAUSES: Final = Backoff(first_s=2.0, limit_s=30.0)
#: A node's words for a transaction that will not become final.
_FAILED: Final = {"invalid", "dropped", "usurped", "finalityTimeout"}
_MAX_U32: Final = 2**32 - 1


@implementer(ITwinRegistry)
class ChainRegistry:
    """The twins on the nodes of ``substrate``. ``uniform()`` is in [0, 1), for pauses.

    With ``blocks``, it listens for new blocks after :meth:`start`, and forgets a cached twin as soon as it changes; otherwise
    cached twins only expire. ``genesis`` is the hash of the first block of the chain: if it is given, nothing is signed for
    another chain.
    """

    def __init__(
        self,
        clock: IReactorTime,
        substrate: Substrate,
        uniform: Callable[[], float],
        *,
        cache: CacheLimits | None = None,
        blocks: BlockConfig | None = None,
        genesis: bytes | None = None,
    ) -> None:
        self._clock = clock
        self._substrate = substrate
        self._uniform = uniform
        self._genesis = genesis
        self._cache = TwinCache(clock, self._look_up, cache)
        self._watch: BlockWatch | None = None
        if blocks is not None:
            self._watch = BlockWatch(clock, substrate, self._cache.forget, self._cache.clear, blocks)

    def start(self) -> None:
        """Begin to listen for blocks, if ``blocks`` was given."""
        if self._watch is not None:
            self._watch.start()

    def public_stats(self) -> dict[str, float]:
        """The counters of the public relay about twins, under its names."""
        cache, watch = self._cache, self._watch
        found: dict[str, float] = {
            "rmb_cache_entries": len(cache),
            "rmb_cache_hits_total": cache.hits,
            "rmb_cache_misses_total": cache.misses,
            "rmb_cache_flushes_total": cache.flushes,
        }
        if watch is not None:
            found |= {
                "events_listener_reconnecting": int(not watch.listens),
                "events_listener_reconnect_cycles_total": watch.reconnects,
                "events_listener_last_processed_block_number": 0 if watch.last is None else watch.last[0],
            }
        return found

    async def get(self, twin: int) -> Twin | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        return await self._cache.get(twin) if 0 < twin <= MAX_TWIN else None

    async def find(self, account: bytes) -> int | None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`. The result is not cached."""
        return await self._substrate.ask(lambda node: _find(node, account))

    async def update(self, key: TwinKey, relays: Iterable[str], pk: bytes | None) -> None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`. The chain keeps no ports, so they are left out.

        Returns when the change is final. It retries for :data:`UPDATE_S`, and the last attempt may take :data:`FINAL_S`, or a
        little more when nodes do not answer.
        """
        text = format_relays(relay.partition(":")[0] for relay in relays)
        number = await self.find(key.account)
        if number is None:
            raise NoSuchAccount(key.account)
        wanted = Twin(number, key.account, parse_relays(text), pk)
        end, failures = self._clock.seconds() + UPDATE_S, 0
        while True:
            try:
                await self._substrate.ask(lambda node: self._update(node, key, wanted, text), 1, None)
            except RegistryError as error:
                failures += 1
                pause_s = UPDATE_PAUSES.pause_s(failures, self._uniform)
                if error.reason == "closed" or self._clock.seconds() + pause_s > end:
                    raise
            else:
                self._cache.forget(number)
                return
            await deferLater(self._clock, pause_s)

    async def close(self) -> None:
        """See :class:`~dmsg.rmb.interfaces.ITwinRegistry`."""
        if self._watch is not None:
            self._watch.stop()
        self._cache.close()
        await self._substrate.close()

    async def _look_up(self, number: int) -> Twin | None:
        return await self._substrate.ask(lambda node: _read_twin(node, number))

    async def _update(self, node: Node, key: TwinKey, wanted: Twin, text: str) -> None:
        if await _read_twin(node, wanted.id) == wanted:
            return
        runtime = await self._runtime(node)
        nonce = read_number(await node.call("system_accountNextIndex", ss58(key.account)), _MAX_U32)
        call = update_call(runtime.metadata, text.encode() or None, wanted.pk)
        block = await _submit(node, sign_extrinsic(call, key, nonce, runtime), self._clock)
        if await _read_twin(node, wanted.id, block) != wanted:
            raise NodeFailed("rejected", "the transaction is final, and the twin is as before")

    async def _runtime(self, node: Node) -> Runtime:
        genesis = read_hex(await node.call("chain_getBlockHash", 0), 32)
        if self._genesis is not None and genesis != self._genesis:
            raise NodeFailed("lies", "a node of another chain")
        version = await node.call("state_getRuntimeVersion", None)
        return Runtime(
            genesis,
            read_number(member(version, "specVersion"), _MAX_U32),
            read_number(member(version, "transactionVersion"), _MAX_U32),
            await ask_metadata(node),
        )


async def _read(node: Node, key: bytes, block: str | None, limit_bytes: int) -> bytes | None:
    """The value stored under ``key`` at ``block``, by default the best block."""
    if block is None:
        block = read_hash(await node.call("chain_getBlockHash", None))
    found = await node.call("state_getStorage", "0x" + key.hex(), block, limit_bytes=2 * limit_bytes + SMALL_BYTES)
    return None if found is None else read_hex(found, limit_bytes)


async def _read_twin(node: Node, number: int, block: str | None = None) -> Twin | None:
    data = await _read(node, twin_key(number), block, MAX_TWIN_BYTES)
    try:
        twin = None if data is None else decode_twin(data)
    except MalformedAnswer as error:
        # The chain may have a twin that we cannot decode. Its owner must not be able to make us leave node after node.
        raise RegistryError("malformed", error.problem) from None
    if twin is not None and twin.id != number:
        raise NodeFailed("lies", "another twin than was asked for")
    return twin


async def _find(node: Node, account: bytes) -> int | None:
    data = await _read(node, account_key(account), None, 4)
    if data is None:
        return None
    twin = await _read_twin(node, decode_number(data))
    if twin is None or twin.account != account:
        raise NodeFailed("lies", "a twin of another account")
    return twin.id


async def _submit(node: Node, extrinsic: bytes, clock: IReactorTime) -> str:
    """Send a transaction and wait until it is final; returns the hash of its block."""
    end = clock.seconds() + FINAL_S
    watch = await node.subscribe("author_submitAndWatchExtrinsic", "author_unwatchExtrinsic", "0x" + extrinsic.hex())
    try:
        while True:
            state: Any = await watch.next(max(0.0, end - clock.seconds()))
            if isinstance(state, dict) and "finalized" in state:
                return read_hash(state["finalized"])
            name = state if isinstance(state, str) else next(iter(state), None) if isinstance(state, dict) else None
            if name in _FAILED:
                raise NodeFailed("rejected", f"the transaction is {name}")
    finally:
        watch.close()
