"""Answers of Redis, or of an impostor, to commands: any bytes, in any pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from dmsg.sansio.errors import RedisViolation
from dmsg.sansio.resp import ARRAY_LIMIT, BULK_LIMIT_BYTES, DEPTH_LIMIT, LINE_LIMIT_BYTES, ReplyError, RespClient
from fuzz.choices import Choices
from fuzz.oracles import check_memory, outcome

DICTIONARY = (
    *(b"\r\n", b"+OK\r\n", b"-ERR \xff\r\n", b":-1\r\n", b":18446744073709551615\r\n", b"$-1\r\n", b"$0\r\n\r\n"),
    *(b"$3\r\nabc\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n", b"*2\r\n", b"*1000000\r\n", b"*1000001\r\n"),
    *(b"$536870912\r\n", b"$536870913\r\n", b":\xc2\xb2\r\n"),
)
_END = b"\r\n"


def one_input(data: bytes) -> None:
    """The first byte says what the rest is: bytes of anyone, replies that are written first, or commands and time."""
    choices = Choices(data)
    (_bytes, _replies, _commands)[choices.byte() % 3](choices)


# --- bytes ---------------------------------------------------------------------------------------------------------


def _bytes(choices: Choices) -> None:
    """In any pieces, the bytes mean what a stateless reader finds in them."""
    core = _asking(choices.byte() % 8)
    asked, cut = core.waiting, choices.byte()
    data = choices.rest()
    if data and cut & 128:  # lines that are too long are out of a search's reach
        data = data[:-1] + data[-1:] * (LINE_LIMIT_BYTES - len(data) + cut % 4) + _END * (cut >> 2 & 1)
    expected, broken = _read_all(data, asked)
    size = cut & 127 or len(data) or 1
    if cut & 128:
        size = (len(data) or 1) if cut & 8 else 8_192
    found: list[Any] = []
    failed = False
    for at in range(0, len(data), size):
        waiting, before = core.waiting, len(found)
        try:
            found += core.receive_data(data[at : at + size], 1.0)
        except RedisViolation as error:
            found += error.events  # what came before the fault is handed on
            failed = True
        assert len(found) - before == waiting - core.waiting
        if failed:
            break
    assert failed == broken
    _check_same(found, expected)
    assert len(core._stack) <= DEPTH_LIMIT and all(len(items) < length for length, items in core._stack)
    check_memory([core._data, core._stack], len(data), times=128)


def _read_all(data: bytes, asked: int) -> tuple[list[Any], bool]:
    """The complete replies in ``data``, and whether an invalid or unrequested reply follows."""
    replies: list[Any] = []
    at = 0
    try:
        while True:
            value, at = _read(data, at, 0)
            if len(replies) == asked:
                return replies, True
            replies.append(value)
    except EOFError:
        return replies, False
    except ValueError:
        return replies, True


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """One reply and where it ends; ``EOFError`` if it is not complete, ``ValueError`` if it is none."""
    end = data.find(_END, at, at + LINE_LIMIT_BYTES)
    if end < 0:
        raise ValueError if len(data) - at >= LINE_LIMIT_BYTES else EOFError
    kind, line, at = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"+":
        return line, at
    if kind == b"-":
        return ReplyError(line.decode("utf-8", "replace")), at
    digits = line[1:] if line[:1] == b"-" else line
    if kind not in (b":", b"$", b"*") or not 0 < len(digits) <= 20 or set(digits) - set(b"0123456789"):
        raise ValueError
    number = int(line)
    if kind == b":":
        return number, at
    if number < -1 or number > (BULK_LIMIT_BYTES if kind == b"$" else ARRAY_LIMIT):
        raise ValueError
    if kind == b"*" and depth == DEPTH_LIMIT:
        raise ValueError
    if number < 0:
        return None, at
    if kind == b"$":
        end = at + number
        if len(data) < end + 2:
            raise EOFError
        if data[end : end + 2] != _END:
            raise ValueError
        return data[at:end], end + 2
    items = []
    for _ in range(number):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    return items, at


# --- replies -------------------------------------------------------------------------------------------------------


def _replies(choices: Choices) -> None:
    """Replies that Redis writes are read the same."""
    count = choices.byte() % 8
    core = _asking(count)
    replies = [_reply(choices, 0) for _ in range(count)]
    data = b"".join(map(_written, replies))
    found = [one for piece in choices.pieces(data) for one in core.receive_data(piece, 1.0)]
    _check_same(found, replies)
    assert core.waiting == 0 and not core._data and not core._stack


def _reply(choices: Choices, depth: int) -> Any:
    match choices.below(6):
        case 0:
            return choices.below(1 << 64) - (1 << 63)
        case 1:
            return choices.chunk()
        case 2:
            return ReplyError(choices.chunk().decode("latin-1").replace("\r", ""))
        case 3 if depth < DEPTH_LIMIT:
            return [_reply(choices, depth + 1) for _ in range(min(choices.byte(), choices.left))]
        case _:
            return None


def _written(reply: Any) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, ReplyError):
        return b"-%b\r\n" % reply.text.encode()
    return b"*%d\r\n%b" % (len(reply), b"".join(map(_written, reply)))


def _check_same(found: Any, expected: Any) -> None:
    """Errors are equal by their texts."""
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _check_same(one, other)
    elif isinstance(expected, ReplyError):
        assert found.text == expected.text
    else:
        assert found == expected


# --- commands ------------------------------------------------------------------------------------------------------


def _commands(choices: Choices) -> None:
    """Commands wait, each with a timeout from when it is the first; what is sent can be read as an array."""
    core, now, since = RespClient(), 0.0, 0.0
    patience: deque[float] = deque()
    unsent = b""
    for _ in range(200):
        if not choices.left:
            break
        now += choices.byte() / 4
        match choices.below(4):
            case 0:
                words = (choices.chunk(16), "\u00fc", choices.byte())
                if not patience:
                    since = now
                patience.append(float(choices.byte()))
                core.send(words, patience[-1], now)
                unsent += _written([words[0], b"\xc3\xbc", str(words[2]).encode()])
            case 1:
                assert core.data_to_send() == unsent
                unsent = b""
            case 2:
                kind, replies = outcome(lambda now=now: core.receive_data(b":7\r\n", now), RedisViolation)  # type: ignore[misc]
                assert (kind == "value") == bool(patience)
                if kind == "error":
                    return
                assert replies == [7]
                patience.popleft()
                since = now
            case _:
                late = bool(patience) and now >= since + patience[0]
                assert outcome(lambda now=now: core.handle_timeout(now), RedisViolation)[0] == (  # type: ignore[misc]
                    "error" if late else "value"
                )
        assert core.waiting == len(patience)
        assert core.next_timeout() == (since + patience[0] if patience else None)


def _asking(count: int) -> RespClient:
    core = RespClient()
    for _ in range(count):
        core.send(("PING",), 5.0, 0.0)
    return core


def seeds() -> Iterator[bytes]:
    """Every kind of reply and of fault, whole and in pieces; replies of each type; commands that are answered or too late."""
    good = b"+OK\r\n:12\r\n$3\r\nabc\r\n*3\r\n:-1\r\n*2\r\n$-1\r\n$0\r\n\r\n*0\r\n-ERR \xff\r\n*-1\r\n"
    for cut in (0, 1, 3):
        yield bytes((0, 7, cut)) + good
        yield bytes((0, 3, cut)) + good
    for bad in (
        *(
            b"hello\r\n",
            b":\r\n",
            b":1x\r\n",
            b":" + b"1" * 21 + b"\r\n",
            b"$-2\r\n",
            b"$536870913\r\n",
            b"*1000001\r\n",
        ),
        *(b"*2\r\n:1\r\n$1\r\nabc\r\n", b"*1\r\n" * 9, b"*1\r\n" * 8 + b":1\r\n", b"*1000000\r\n:1\r\n", b"$4\r\nab"),
    ):
        yield b"\x00\x01\x00" + b"+OK\r\n"[: len(bad) % 2 * 5] + bad
        yield b"\x00\x02\x02+OK\r\n" + bad
    yield from (b"\x00\x01" + bytes((cut,)) + b"+a" for cut in range(128, 144))
    yield b"\x01\x04" + b"\x03\x05" + b"\x00\x80" + bytes(7) + b"\x01\x03abc" + b"\x02\x02\xfcx" + b"\x03\x00\x05" * 3
    yield b"\x01\x01" + b"\x03\x01" * 10 + b"\x05\x03"
    yield b"\x02" + b"\x00\x00\x02ab\x07\x08" * 2 + b"\x00\x01\x04\x02\x04\x01\x04\x03\x1f\x03\x01\x03"
    yield b"\x02" + b"\x00\x00\x02ab\x07\x08" + b"\x00\x02\x00\x02"
