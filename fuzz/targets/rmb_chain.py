"""Data from nodes of tfchain: stored twins, metadata, events, and messages of JSON-RPC."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.rmb.core.limits import MAX_RELAYS
from dmsg.rmb.twins.blocks import MAX_CHANGES, changed_twins
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.metadata import read_metadata
from dmsg.rmb.twins.rpc import Answer, Notice, Refusal, Rpc, read_hash, read_hex, read_number
from dmsg.rmb.twins.scale import compact, decode_twin, optional, with_length
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import as_text, check_memory, outcome

DICTIONARY = (
    *words.members("id", "result", "error", "method", "params", "subscription", "code", "message"),
    b"TfgridModule",
    b"update_twin",
    b"TwinStored",
    b"TwinUpdated",
    b"meta\x0e",
)
_STARTS = (b"\x19\x0b", b"\x19\x0c")


def one_input(data: bytes) -> None:
    """The first byte says what the rest is."""
    kind, rest = data[:1], data[1:]
    match kind[0] % 4 if kind else 0:
        case 0:
            _twin(rest)
        case 1:
            found, metadata = outcome(lambda: read_metadata(with_length(rest)), MalformedAnswer)
            if found == "value":
                assert len(metadata.update_twin) == 2 and all(len(one) == 2 for one in metadata.changes)
                check_memory(metadata, len(rest))
        case 2:
            changed = changed_twins(rest, _STARTS)
            if changed is None:
                assert sum(rest[at : at + 2] in _STARTS for at in range(len(rest))) > MAX_CHANGES
                return
            assert len(changed) <= min(MAX_CHANGES, len(rest))
            at = rest.find(_STARTS[1])
            assert at < 0 or int.from_bytes(rest[at + 2 : at + 6], "little") in changed
        case _:
            _messages(rest)


def _twin(data: bytes) -> None:
    found, twin = outcome(lambda: decode_twin(data), MalformedAnswer)
    if found == "error":
        return
    assert twin.id == int.from_bytes(data[:4], "little") > 0 and twin.account == data[4:36]
    assert len(twin.relays) <= MAX_RELAYS and list(twin.relays) == sorted(set(twin.relays))
    again = data[:36] + optional("_".join(twin.relays).encode() or None) + b"\0" + optional(twin.pk)
    assert decode_twin(again) == twin


def _messages(data: bytes) -> None:
    """A few questions, then the node's messages: each question is answered at most once."""
    choices = Choices(data)
    rpc = Rpc(0.0)
    open_questions = {rpc.ask("m", (), 1 << choices.below(16))[0] for _ in range(choices.below(4))}
    while choices.left:
        text = as_text(choices.chunk())
        found, message = outcome(lambda text=text: rpc.receive(text, 0.0), MalformedAnswer)  # type: ignore[misc]
        if found == "error":
            return
        check_memory(message, len(text))
        if isinstance(message, Answer | Refusal):
            open_questions.remove(message.number)
        if isinstance(message, Answer | Notice):
            for read in (read_hash, lambda value: read_hex(value, 64), lambda value: read_number(value, 2**64)):
                outcome(lambda read=read, value=message.result: read(value), MalformedAnswer)  # type: ignore[misc]


def seeds() -> Iterator[bytes]:
    """One of each kind, and one with a wrong length."""
    twin = (
        b"\7\0\0\0"
        + bytes(32)
        + optional(b"a.example_b.example")
        + b"\4"
        + bytes(4)
        + with_length(b"ab")
        + optional(b"k" * 33)
    )
    yield b"\0" + twin
    yield b"\0" + twin.replace(b"\1", b"\2")
    yield b"\1" + _metadata()
    yield b"\2" + b"\x19\x0b\x07\0\0\0" + bytes(9) + b"\x19\x0c\x08\0\0\0\x19\x0c"
    for message in (
        b'{"jsonrpc":"2.0","id":1,"result":"0x00"}',
        b'{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"no"}}',
        b'{"jsonrpc":"2.0","method":"m","params":{"subscription":"s","result":{"number":"0x1"}}}',
    ):
        yield b"\3\x03\x0f\x0f\x0f" + bytes((len(message),)) + message


def _metadata() -> bytes:
    def listed(*items: bytes) -> bytes:
        return compact(len(items)) + b"".join(items)

    def variant(name: bytes, number: int) -> bytes:
        return with_length(name) + listed() + bytes((number,)) + listed()

    def enumeration(number: int, *variants: bytes) -> bytes:
        return compact(number) + listed() + listed() + b"\1" + listed(*variants) + listed()

    types = listed(
        compact(2) + listed(with_length(b"p")) + listed(with_length(b"T") + b"\0") + b"\5\5" + listed(),
        compact(3) + listed() + listed() + b"\0" + listed(b"\0\x08\0" + listed(with_length(b"doc"))) + listed(),
        enumeration(0, variant(b"update_twin", 18)),
        enumeration(1, variant(b"TwinStored", 11), variant(b"TwinUpdated", 12)),
    )
    storage = b"\1" + with_length(b"p") + listed(with_length(b"Twins") + b"\0\1\4\2\x08\x0c" + listed() + listed())
    pallet = with_length(b"TfgridModule") + storage + b"\1\0\1\4" + listed() + b"\0\x19"
    return b"meta\x0e" + types + listed(pallet) + b"\x08\4" + listed(with_length(b"CheckNonce") + b"\x08\x08") + b"\x08"
