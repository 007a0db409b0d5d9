"""The commands that other twins request of a peer of the Reliable Message Bus, and the lists they get in Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from unittest import mock

from dmsg.rmb.core.limits import MAX_COMMAND_BYTES
from dmsg.rmb.peer import commands
from dmsg.rmb.peer.commands import BACKLOG, KEEP_COMMAND_S, LOCAL, LOCAL_TAKEN, REPLY, REPLY_TAKEN, Commands, list_of
from fuzz.choices import Choices
from fuzz.oracles import as_text

DICTIONARY = (
    b"system",
    b"backlog",
    b"system.local",
    b"rmb.version",
    b"msgbus.",
    b".",
    b"\xe2\x80\xa8",
    b"\xed\xa0\x80",
)
_LISTS, _LISTS_OF_A_TWIN = 7, 3
_BYTES, _BYTES_OF_A_TWIN, _BYTES_BEYOND = 40, 15, 4


def one_input(data: bytes) -> None:
    """An odd first byte: the rest is the name of a command. Otherwise operations, with little room."""
    choices = Choices(data)
    if choices.flag():
        _name(as_text(choices.rest()))
        return
    with mock.patch.multiple(
        commands,
        UNSERVED_COMMANDS=_LISTS,
        UNSERVED_COMMANDS_OF_A_TWIN=_LISTS_OF_A_TWIN,
        UNSERVED_BYTES=_BYTES,
        UNSERVED_BYTES_OF_A_TWIN=_BYTES_OF_A_TWIN,
        UNSERVED_BYTES_BEYOND=_BYTES_BEYOND,
    ):
        _operations(choices)


def _name(command: str) -> None:
    """No command reaches the lists and notes of the peer itself, and no two commands share a list."""
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        return  # no text of an envelope
    key = list_of(command)
    if key is not None:
        assert 0 < size <= MAX_COMMAND_BYTES and key == f"msgbus.{command}" and key.isprintable()
        assert key not in (LOCAL, LOCAL_TAKEN, REPLY, REPLY_TAKEN) and not key.startswith((BACKLOG, "msgbus.system."))
    elif 0 < size <= MAX_COMMAND_BYTES and command.isprintable():
        assert command.partition(".")[0] in ("system", "backlog") or command.startswith("rmb.")


class _List:
    """A list: its owner, unless a service has taken from it; its requests; how long it is kept."""

    def __init__(self, twin: int | None, until: float, at: int) -> None:
        self.twin = twin
        self.pushed = 0
        self.until = until
        #: Bytes in it, by the twin that sent them.
        self.bytes: Counter[int] = Counter()
        #: Number of the operation that last pushed a request.
        self.at = at


class _Model:
    """All lists by their names."""

    def __init__(self) -> None:
        self.lists: dict[str, _List] = {}

    def admit(self, command: str, twin: int, size: int, now: float, at: int) -> tuple[bool, set[str]]:
        """Whether the request may be pushed, and the commands one of which must give way for it, if any."""
        self.lists = {name: one for name, one in self.lists.items() if one.until > now}
        one = self.lists.get(command)
        gone: set[str] = set()
        if (one is None or one.twin is not None) and not self._takes(twin, size):
            return False, gone
        if one is None:
            counts = self.counts()
            if counts[twin] >= _LISTS_OF_A_TWIN:
                return False, gone
            if counts.total() >= _LISTS:
                most = max(counts.values())
                if most <= counts[twin] + 1:
                    return False, gone
                # Any of the twins with the most lists; of that twin the least recently requested command.
                for other in (twin for twin, made in counts.items() if made == most):
                    gone.add(min((each.at, name) for name, each in self.lists.items() if each.twin == other)[1])
            one = self.lists[command] = _List(twin, 0.0, at)
        one.until = now + KEEP_COMMAND_S
        one.at = at
        return True, gone

    def _takes(self, twin: int, size: int) -> bool:
        """Whether lists that no service has taken from have room for ``size`` bytes more of ``twin``."""
        has = self.bytes()
        own, after = has[twin] + size, has.total() + size
        if after > _BYTES:
            return own <= _BYTES_BEYOND and after <= 2 * _BYTES
        return own <= _BYTES_OF_A_TWIN

    def bytes(self) -> Counter[int]:
        """What each twin has in lists that no service has taken from."""
        return sum((one.bytes for one in self.lists.values() if one.twin is not None), Counter())

    def counts(self) -> Counter[int]:
        """For each twin, the number of its lists from which no service has taken."""
        return Counter(one.twin for one in self.lists.values() if one.twin is not None)


def _operations(choices: Choices) -> None:
    """Requests of a few twins for a few commands, services that take them, and time.

    Admissions and evictions are those of the model, and the sums are correct.
    """
    commands, model = Commands(), _Model()
    now = 0.0
    for at in range(120):
        if not choices.left:
            break
        command = str(choices.byte() % 12)
        match choices.below(8):
            case 0:
                now += choices.byte() * 16
                continue
            case 1 | 2:
                length, twin, size = choices.byte() % 8, choices.byte() % 6, choices.below(8)
                one = model.lists.get(command)
                commands.pushed(command, commands.list_made(command), twin, size, length, now)
                if one is not None and one.twin is not None:
                    one.pushed += 1
                    if length < one.pushed:
                        one.twin, one.until = None, now + KEEP_COMMAND_S
                    elif size:
                        one.bytes[twin] += size
            case _:
                twin, size = choices.byte() % 6, choices.below(8)
                admitted, gone = model.admit(command, twin, size, now, at)
                assert commands.admit(command, twin, size, now) is admitted
                assert len(commands.gone) == bool(gone) and set(commands.gone) <= gone
                for name in commands.gone:
                    del model.lists[name]
                commands.gone.clear()
                _check(commands, model)


def _check(commands: Commands, model: _Model) -> None:
    """All counters are correct and within their limits."""
    counts = model.counts()
    assert counts.total() <= _LISTS and max(counts.values(), default=0) <= _LISTS_OF_A_TWIN
    assert set(commands._served) == {name for name, one in model.lists.items() if one.twin is None}
    assert set(commands._contents) == set(model.lists)
    assert {name: one.twin for name, one in commands._unserved.items()} == {
        name: one.twin for name, one in model.lists.items() if one.twin is not None
    }
    assert {twin: len(names) for twin, names in commands._of_twin.items()} == dict(counts)
    has = model.bytes()
    assert (commands._bytes, commands._bytes_of) == (has.total(), has)
    assert commands._tally.most == max(counts.values(), default=0) and len(commands._tally) == len(counts)


def seeds() -> Iterator[bytes]:
    """Names of all kinds; twins at and over their share; lists that are served, end and give way."""
    for name in (
        "calculator.add",
        "",
        "system.local",
        "backlog.1",
        "system",
        "systems.x",
        "a\n",
        "\u00fc" * 128,
        "\ud800",
    ):
        yield b"\x01" + name.encode("utf-8", "surrogatepass")
    ask = b"".join(bytes((number, 3, number // 3, 1)) for number in range(7))
    yield b"\x00" + ask + b"\x07\x03\x05\x01" + b"\x08\x03\x05\x01"
    yield b"\x00" + ask[:12] + b"\x03\x03\x00\x01"
    yield b"\x00" + ask + b"\x00\x03\x00\x01" + b"\x07\x03\x04\x01\x08\x03\x04\x01"
    taken = b"\x00\x01\x01\x05\x01" * 2
    yield b"\x00" + ask + taken + b"\x00\x03\x05\x07" + b"\x00\x00\x74" + b"\x01\x03\x01\x01" + b"\x00\x00\xff" + ask
    again = b"\x0b\x03\x05\x01" * 2 + b"\x0b\x01\x00\x05\x01"
    yield b"\x00" + ask + b"\x00\x00\x40" + ask[:8] + b"\x00\x00\x40" + again
    even = b"".join(bytes((number, 3, twin, 1)) for number, twin in enumerate((0, 0, 0, 1, 1, 2, 2)))
    yield b"\x00" + even + b"\x09\x03\x01\x01" + b"\x09\x03\x05\x01"
    # Six twins fill what they have together, each in a list of its own; one has a little more, and time frees all of it.
    full = b"".join(bytes((twin, 3, twin, 7)) + bytes((twin, 1, 7, twin, 7)) * 2 for twin in range(6))
    yield (
        b"\x00"
        + full
        + b"".join(bytes((6, 3, twin, size)) for twin in (0, 5) for size in (7, 1))
        + b"\x00\x00\xff"
        + full
    )
    yield b"\x00" + bytes((number * 37) % 256 for number in range(360))
