"""A chain with twins, and nodes of it that speak JSON-RPC over WebSocket, honest unless they are told otherwise."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.glue.websocket import accept_websocket
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.rmb.core.errors import BadSignature
from dmsg.rmb.core.keys import verify
from dmsg.rmb.twins.extrinsic import ss58
from dmsg.rmb.twins.scale import EVENTS_KEY, Reader, account_key, twin_key
from dmsg.sansio.websocket import WebSocketConfig
from tests.rmb.twins import chain_bytes

SILENCE = object()


def block_hash(number: int, fork: str = "") -> str:
    return "0x" + hashlib.blake2b(f"{fork}{number}".encode(), digest_size=32).hexdigest()


class Chain:
    """What all honest nodes know. ``metadata`` are arguments of :func:`chain_bytes.metadata`."""

    def __init__(self, **metadata: Any) -> None:
        self.metadata = metadata
        self.blocks = [block_hash(0)]
        self.states: dict[str, dict[bytes, bytes]] = {self.blocks[0]: {}}
        self.parents = {self.blocks[0]: "0x" + "00" * 32}
        self.numbers = {self.blocks[0]: 0}
        self.nonces: Counter[bytes] = Counter()
        self.transactions = 0
        self.listeners: list[Callable[[], None]] = []

    @property
    def state(self) -> dict[bytes, bytes]:
        return self.states[self.blocks[-1]]

    def block(self, *changed: bytes, fork: str = "") -> str:
        """A new block in which twins get these bytes."""
        state = {**self.state, EVENTS_KEY: chain_bytes.events(*changed)}
        for twin in changed:
            state[twin_key(int.from_bytes(twin[:4], "little"))] = twin
            state[account_key(twin[4:36])] = twin[:4]
        parent = self.blocks[-1]
        self.blocks.append(block_hash(len(self.blocks), fork))
        self.parents[self.blocks[-1]] = parent
        self.numbers[self.blocks[-1]] = len(self.blocks) - 1
        self.states[self.blocks[-1]] = state
        return self.blocks[-1]

    def twin(self, number: int, account: bytes, relays: str | None = None, pk: bytes | None = None) -> None:
        """A new block with this twin, which nodes tell of."""
        self.block(chain_bytes.twin(number, account, relays, pk))
        self.tell()

    def tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def head(self) -> dict[str, Any]:
        return self.header(self.blocks[-1])

    def header(self, block: str) -> dict[str, Any]:
        digest = {"logs": ["0x0661757261208ab85a1000000000"]}
        number, parent = self.numbers[block], self.parents[block]
        return {"number": hex(number), "parentHash": parent, "stateRoot": block, "digest": digest}

    def apply(self, extrinsic: bytes) -> str:
        """Put a transaction into a block; raises ``ValueError`` with what a node says of one that is not valid."""
        reader = Reader(Reader(extrinsic).bytes(10_000))
        assert reader.take(2) == b"\x84\0"
        account, kind, signature = reader.take(32), reader.u8(), reader.take(64)
        extra_at = reader.at
        assert reader.take(1) == b"\0"
        nonce = reader.compact()
        assert reader.take(1) == b"\0"
        call_at = reader.at
        index = self.metadata.get("index", chain_bytes.PALLET)
        assert reader.take(2) == bytes([index, chain_bytes.UPDATE_TWIN])
        relays = reader.bytes(1024) if reader.option() else None
        pk = reader.bytes(128) if reader.option() else None
        call, extra = reader.data[call_at:], reader.data[extra_at:call_at]
        genesis = bytes.fromhex(self.blocks[0][2:])
        signed = call + extra + (149).to_bytes(4, "little") + (2).to_bytes(4, "little") + genesis * 2
        try:
            verify(account, signed, b"es"[kind : kind + 1] + signature)
        except BadSignature:
            raise ValueError("Transaction has a bad signature") from None
        if nonce != self.nonces[account]:
            raise ValueError("Transaction is outdated")
        self.nonces[account] += 1
        self.transactions += 1
        number = int.from_bytes(self.state[account_key(account)], "little")
        return self.block(chain_bytes.twin(number, account, None if relays is None else relays.decode(), pk))


class FakeNode(Resource):
    """A node at ``port`` of ``reactor``. ``lies[method]`` takes the place of the honest answer: ``lie(params)`` gives a result,
    ``SILENCE``, raises ``ValueError`` for an error, or gives bytes, which are sent instead of an answer."""

    isLeaf = True

    def __init__(self, reactor: Any, chain: Chain, port: int, interface: str = "") -> None:
        super().__init__()
        self.reactor, self.chain = reactor, chain
        self.asked: Counter[str] = Counter()
        self.lies: dict[str, Callable[[list[Any]], Any]] = {}
        self.shells: list[Any] = []
        self.connections = 0
        self.heads: dict[str, Any] = {}
        self.final = True
        chain.listeners.append(self.tell)
        self.site: Any = LimitedSite(self, reactor=reactor, limits=HttpLimits(body_bytes=100))
        self.port = reactor.listenTCP(port, self.site, interface=interface)

    def close(self) -> Any:
        self.cut()
        return self.port.stopListening()

    def cut(self) -> None:
        """End all connections."""
        for shell in self.shells:
            shell.cut()
        self.shells.clear()
        self.heads.clear()

    def hold(self, method: str, which: Callable[[list[Any]], bool]) -> Callable[[Any], None]:
        """Keep the next answer to a question of ``method`` back; the result is what gives one."""
        held: list[tuple[Any, int]] = []

        def lie(params: list[Any]) -> Any:
            shell, _ = self.question
            if held or not which(params):
                return getattr(self, method)(shell, *params)
            held.append(self.question)
            return SILENCE

        def give(result: Any) -> None:
            [(shell, number)] = held
            self.send(shell, {"jsonrpc": "2.0", "result": result, "id": number})

        self.lies[method] = lie
        return give

    def tell(self) -> None:
        for name, shell in list(self.heads.items()):
            self.notice(shell, "chain_newHead", name, self.chain.head())

    # --- the WebSocket ---------------------------------------------------------------------------------------------

    def render(self, request: Any) -> int:
        config = WebSocketConfig(text=True, max_message_bytes=100_000)
        self.shells.append(accept_websocket(request, self, self.reactor, config))
        self.connections += 1
        return NOT_DONE_YET

    def handle_events(self, shell: Any, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, str):
                self.answer(shell, json.loads(event))

    def after_read(self, shell: Any) -> None:
        shell.flush()

    def flushed(self, shell: Any) -> None:
        """No writer waits."""

    def connection_lost(self, shell: Any, error: Any, reason: Any) -> None:
        self.heads = {name: one for name, one in self.heads.items() if one is not shell}

    def send(self, shell: Any, message: Any) -> None:
        shell.send(message if isinstance(message, bytes | str) else json.dumps(message))
        shell.flush()

    def notice(self, shell: Any, method: str, name: str, result: Any) -> None:
        self.send(shell, {"jsonrpc": "2.0", "method": method, "params": {"subscription": name, "result": result}})

    def answer(self, shell: Any, question: dict[str, Any]) -> None:
        method, params, number = question["method"], question["params"], question["id"]
        self.asked[method] += 1
        self.question = shell, number
        try:
            lie = self.lies.get(method)
            result = lie(params) if lie is not None else getattr(self, method)(shell, *params)
        except ValueError as error:
            problem = {"code": 1010, "message": "Invalid Transaction", "data": str(error)}
            self.send(shell, {"jsonrpc": "2.0", "error": problem, "id": number})
            return
        if isinstance(result, bytes):
            self.send(shell, result if result.startswith(b"\xff") else result.decode())
        elif result is not SILENCE:
            self.send(shell, {"jsonrpc": "2.0", "result": result, "id": number})

    # --- the methods -----------------------------------------------------------------------------------------------

    def chain_getBlockHash(self, shell: Any, number: int | None = None) -> Any:
        blocks = self.chain.blocks
        return blocks[-1] if number is None else blocks[number] if number < len(blocks) else None

    def chain_getHeader(self, shell: Any, block: str) -> Any:
        return self.chain.header(block)

    def state_getStorage(self, shell: Any, key: str, block: str) -> Any:
        found = self.chain.states[block].get(bytes.fromhex(key[2:]))
        return None if found is None else "0x" + found.hex()

    def state_getRuntimeVersion(self, shell: Any, block: None) -> Any:
        return {"specName": "substrate-threefold", "specVersion": 149, "transactionVersion": 2, "apis": [["0xdf6a", 4]]}

    def state_call(self, shell: Any, name: str, data: str, block: None) -> Any:
        assert (name, data) == ("Metadata_metadata", "0x")
        return "0x" + chain_bytes.metadata(**self.chain.metadata).hex()

    def chain_subscribeNewHeads(self, shell: Any) -> Any:
        name = f"heads{self.asked['chain_subscribeNewHeads']}"
        self.heads[name] = shell
        self.reactor.callLater(0, self.tell)
        return name

    def chain_unsubscribeNewHeads(self, shell: Any, name: str) -> Any:
        return self.heads.pop(name, None) is not None

    def system_accountNextIndex(self, shell: Any, account: str) -> Any:
        return sum(count for known, count in self.chain.nonces.items() if ss58(known) == account)

    def author_submitAndWatchExtrinsic(self, shell: Any, extrinsic: str) -> Any:
        block = self.chain.apply(bytes.fromhex(extrinsic[2:]))
        name = f"transaction{self.chain.transactions}"
        for state in ("ready", {"broadcast": ["12D3KooW"]}, {"inBlock": block}, *([{"finalized": block}] * self.final)):
            self.reactor.callLater(0, self.notice, shell, "author_extrinsicUpdate", name, state)
        return name

    def author_unwatchExtrinsic(self, shell: Any, name: str) -> Any:
        return True
