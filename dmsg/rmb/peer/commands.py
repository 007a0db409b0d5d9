"""The names of a peer's lists, and which commands of other twins get a list. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from dmsg.rmb.core.limits import MAX_COMMAND_BYTES, MAX_TTL_S
from dmsg.rmb.peer.contents import Contents
from dmsg.sansio.tally import Tally

_PREFIX: Final = "msgbus."
#: The list to which local programs push requests to other twins.
LOCAL: Final = f"{_PREFIX}system.local"
#: The list to which services push answers.
REPLY: Final = f"{_PREFIX}system.reply"
#: The lists that hold messages of these two while the peer works on them.
LOCAL_TAKEN: Final = f"{LOCAL}.taken"
REPLY_TAKEN: Final = f"{REPLY}.taken"
#: Prefix of the key of a note about a request under way; the uid follows.
BACKLOG: Final = f"{_PREFIX}backlog."
#: Prefix of the key of a mark that an answer without a note has been pushed; a uid follows.
PUSHED: Final = f"{_PREFIX}system.pushed."
#: First words of commands that would name lists and notes of the peer itself.
_RESERVED: Final = frozenset({"system", "backlog"})
#: Prefix of commands that the peer answers itself.
OWN: Final = "rmb."

#: Limits of lists whose command no service has served yet: in all, and made by one twin. Without them they would fill Redis,
#: because the senders choose the names. At the limit, the twin that made the most loses a list to a twin that made fewer.
UNSERVED_COMMANDS: Final = 1_000
UNSERVED_COMMANDS_OF_A_TWIN: Final = 100
#: Bytes in these lists that one twin has sent; and in all of them. Above the second limit a twin may have only as many as the
#: third, so that the twins that fill the lists keep nobody else out. At twice the second limit nobody may add to them.
UNSERVED_BYTES_OF_A_TWIN: Final = 64 * 1024 * 1024
UNSERVED_BYTES: Final = 256 * 1024 * 1024
UNSERVED_BYTES_BEYOND: Final = 256 * 1024
#: Seconds for which a list is kept after the last push: no request in it is valid for longer.
KEEP_COMMAND_S: Final = MAX_TTL_S + 60


def list_of(command: str) -> str | None:
    """The list on which services wait for requests of ``command``; ``None`` for a command that no service can have."""
    usable = 0 < len(command.encode()) <= MAX_COMMAND_BYTES and command.isprintable()
    if not usable or command.startswith(OWN) or command.partition(".")[0] in _RESERVED:
        return None
    return _PREFIX + command


class _Unserved:
    __slots__ = ("bytes", "pushed", "twin", "until")

    def __init__(self, twin: int) -> None:
        self.twin = twin
        self.pushed = 0
        self.until = 0.0
        #: What is in the list, by the twins that have sent it.
        self.bytes: Counter[int] = Counter()


class Commands:
    """The commands of recent requests, and whether a service has taken any of these.

    Times are in seconds, on any clock.
    """

    def __init__(self) -> None:
        #: Served and unserved commands, each by their last request; the value of a served command is when it is forgotten.
        self._served: OrderedDict[str, float] = OrderedDict()
        self._unserved: OrderedDict[str, _Unserved] = OrderedDict()
        #: The unserved commands of each twin, and their number.
        self._of_twin: dict[int, OrderedDict[str, None]] = {}
        self._tally: Tally[int] = Tally()
        #: Bytes in all unserved lists, and those that each twin has sent.
        self._bytes = 0
        self._bytes_of: Counter[int] = Counter()
        #: What is in the lists of these commands.
        self._contents: dict[str, Contents] = {}
        #: Evicted commands. The caller removes their lists and empties this.
        self.gone: list[str] = []

    def admit(self, command: str, twin: int, size: int, now: float) -> bool:
        """Whether a request of ``twin``, of ``size`` bytes, may be pushed to the list of ``command``."""
        self._forget(now)
        if command in self._served:
            self._served[command] = now + KEEP_COMMAND_S
            self._served.move_to_end(command)
            return True
        if not self._has_room(twin, size):
            return False
        if command not in self._unserved:
            made = self._tally[twin]
            if made >= UNSERVED_COMMANDS_OF_A_TWIN:
                return False
            if len(self._unserved) >= UNSERVED_COMMANDS:
                if self._tally.most <= made + 1:
                    return False
                self.gone.append(next(iter(self._of_twin[self._tally.largest()])))
                self._drop(self.gone[-1])
                del self._contents[self.gone[-1]]
            self._unserved[command] = _Unserved(twin)
            self._contents[command] = Contents()
            self._of_twin.setdefault(twin, OrderedDict())[command] = None
            self._tally.add(twin)
        one = self._unserved[command]
        one.until = now + KEEP_COMMAND_S
        self._unserved.move_to_end(command)
        self._of_twin[one.twin].move_to_end(command)
        return True

    def contents(self, command: str) -> Contents:
        """What is in the list of ``command``, of which a request was just admitted."""
        return self._contents[command]

    def list_made(self, command: str) -> object:
        """Identifies the current list of ``command``, for :meth:`pushed`: after an eviction it is another one."""
        return self._unserved.get(command)

    def pushed(self, command: str, made: object, twin: int, size: int, length: int, now: float) -> None:
        """An admitted request was pushed to the list that :meth:`list_made` identified, which now has ``length`` requests.

        If that is fewer than were pushed, a service has taken one.
        """
        one = self._unserved.get(command)
        if one is not None and one is made:
            one.pushed += 1
            if length < one.pushed:
                self._drop(command)
                self._served[command] = now + KEEP_COMMAND_S
                return
            one.bytes[twin] += size
            self._bytes_of[twin] += size
            self._bytes += size

    def _has_room(self, twin: int, size: int) -> bool:
        """Whether ``twin`` may add ``size`` bytes to lists that no service has taken from."""
        of_twin, after = self._bytes_of[twin] + size, self._bytes + size
        if after <= UNSERVED_BYTES:
            return of_twin <= UNSERVED_BYTES_OF_A_TWIN
        return of_twin <= UNSERVED_BYTES_BEYOND and after <= 2 * UNSERVED_BYTES

    def _forget(self, now: float) -> None:
        while self._unserved and next(iter(self._unserved.values())).until <= now:
            command = next(iter(self._unserved))
            self._drop(command)
            del self._contents[command]
        while self._served and next(iter(self._served.values())) <= now:
            del self._contents[self._served.popitem(last=False)[0]]

    def _drop(self, command: str) -> None:
        one = self._unserved.pop(command)
        for sender, size in one.bytes.items():
            self._bytes -= size
            self._bytes_of[sender] -= size
            if not self._bytes_of[sender]:
                del self._bytes_of[sender]
        twin = one.twin
        del self._of_twin[twin][command]
        if not self._of_twin[twin]:
            del self._of_twin[twin]
        self._tally.remove(twin)
