"""Lists in a Redis: programs push at the head and take at the tail, so the oldest message comes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dmsg.address import RedisAddress
from dmsg.glue.redis import REPLY_TIMEOUT_S, RedisConnection

# KEYS: list. ARGV: message, most messages, most bytes, seconds the list is kept, messages and bytes of the sender in it. The
# bytes, estimated from five messages, are checked only from 16 messages on: a shorter list has room for messages of the largest
# size.
_PUSH_IF_ROOM: Final = """
local function full(has, most, own) return has >= most and has + own >= 2 * most end
local length = redis.call('LLEN', KEYS[1])
if full(length, tonumber(ARGV[2]), tonumber(ARGV[5])) then return -length end
if length >= 16 then
    local bytes = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 5)
    if full(bytes, tonumber(ARGV[3]), tonumber(ARGV[6])) then return -length end
end
length = redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[4])
return length
"""
# KEYS: note, list, and perhaps a mark. ARGV: message, most messages, seconds the list is kept, "1" if a missing note tells that
# it has been pushed already, seconds the mark is kept, which tells so if it is there; for 0 it is not made.
_PUSH_ONCE: Final = """
local there = redis.call('DEL', KEYS[1])
if ARGV[4] == '1' and there == 0 then return 0 end
if KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
if KEYS[3] and ARGV[5] ~= '0' then redis.call('SET', KEYS[3], '', 'EX', ARGV[5]) end
redis.call('LPUSH', KEYS[2], ARGV[1])
redis.call('LTRIM', KEYS[2], 0, ARGV[2] - 1)
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""


# KEYS: taken, note, note … ARGV: message, seconds and value of each note. A Redis that is full takes what a script writes behind
# something that needs no memory, and the notes have less than the message.
_DONE: Final = """
local found = redis.call('LREM', KEYS[1], -1, ARGV[1])
for one = 2, #KEYS do redis.call('SETEX', KEYS[one], ARGV[2 * one - 2], ARGV[2 * one - 1]) end
return found
"""
# KEYS: note, list. ARGV: message.
_PUT_BACK: Final = """
if redis.call('DEL', KEYS[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[1])
return 1
"""
# KEYS: taken, list.
_GIVE_BACK: Final = """
local data = redis.call('LPOP', KEYS[1])
while data do
    redis.call('RPUSH', KEYS[2], data)
    data = redis.call('LPOP', KEYS[1])
end
return 1
"""


class RedisLists:
    """Pushes messages and keeps notes (keys that expire), all over one connection.

    Methods with ``wait_s`` wait that long for a connection; all raise as :meth:`~dmsg.glue.redis.RedisConnection.call` does.
    """

    def __init__(self, address: RedisAddress, reactor: Any) -> None:
        self.redis = RedisConnection(address, reactor)

    async def push(self, key: str, data: bytes, wait_s: float = REPLY_TIMEOUT_S) -> None:
        """Append to a list whose length others have to bound."""
        await self.redis.call("LPUSH", key, data, wait_s=wait_s)

    async def put_back(self, key: str, data: bytes) -> None:
        """Make ``data`` the next message to be taken from a list."""
        await self.redis.call("RPUSH", key, data)

    async def put_back_noted(self, note: str, key: str, data: bytes) -> bool:
        """The same, but replace the message's note; does nothing and returns ``False`` if there is none."""
        return bool(await self.redis.call("EVAL", _PUT_BACK, 2, note, key, data))

    async def done(self, taken: str, data: bytes, notes: Sequence[tuple[str, int, bytes]] = ()) -> None:
        """In one step, forget a message that was taken, and write notes, each with the seconds for which it is kept."""
        values = [word for _, keep_s, value in notes for word in (keep_s, value)]
        await self.redis.call("EVAL", _DONE, 1 + len(notes), taken, *(name for name, _, _ in notes), data, *values)

    async def give_back(self, taken: str, key: str) -> None:
        """Put messages that were taken but not done back, as the next messages of their list."""
        await self.redis.call("EVAL", _GIVE_BACK, 2, taken, key)

    async def push_if_room(
        self,
        key: str,
        data: bytes,
        *,
        most: int,
        most_bytes: int,
        own: tuple[int, int],
        keep_s: int,
        wait_s: float,
    ) -> int:
        """Append, and keep the list for ``keep_s`` from now. Returns its length, negative if there is no room: if the list has
        ``most`` messages, or has at least 16 and takes ``most_bytes``.

        Such a list has room up to twice as much for senders that have less in it than is left until then: ``own`` is how many
        messages this one has, and their bytes.
        """
        words = ("EVAL", _PUSH_IF_ROOM, 1, key, data, most, most_bytes, keep_s, *own)
        return int(await self.redis.call(*words, wait_s=wait_s))

    async def push_once(
        self,
        note: str,
        key: str,
        data: bytes,
        *,
        most: int,
        keep_s: int,
        note_tells: bool = False,
        mark: str = "",
        mark_s: int = 1,
        wait_s: float,
    ) -> bool:
        """In one step, append, drop all but the newest ``most``, keep the list for ``keep_s`` and remove a note.

        If the message has been pushed before, this only returns ``False``. With ``note_tells``, a missing note shows that;
        it must have been written for certain. Otherwise ``mark`` shows it, a key that is written with the message and kept for
        ``mark_s``; with 0 it is only checked.
        """
        keys = (note, key, mark) if mark else (note, key)
        words = ("EVAL", _PUSH_ONCE, len(keys), *keys, data, most, keep_s, int(note_tells), mark_s)
        return bool(await self.redis.call(*words, wait_s=wait_s))

    async def forget(self, notes: Sequence[str]) -> None:
        """Remove notes."""
        if notes:
            await self.redis.call("DEL", *notes)

    async def notes(self, prefix: str, most: int) -> list[tuple[str, bytes]]:
        """Up to ``most`` notes whose names begin with ``prefix``, in no order."""
        found: list[tuple[str, bytes]] = []
        cursor: Any = 0
        while len(found) < most:
            cursor, names = await self.redis.call("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000)
            if names:
                values = await self.redis.call("MGET", *names)
                pairs = zip(names, values, strict=True)
                found += [(name.decode("utf-8", "replace"), value) for name, value in pairs if value is not None]
            if not int(cursor):
                break
        return found[:most]

    async def ping(self) -> None:
        """Ask for a sign of life."""
        await self.redis.call("PING")

    async def close(self) -> None:
        """Close the connection at once. Calls under way fail."""
        await self.redis.close()
