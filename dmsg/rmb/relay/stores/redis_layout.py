"""What a relay keeps in Redis, in the public relay's layout, and the scripts that read and write it.

A session's queue is the stream ``stream:TWIN`` or ``stream:TWIN:CONNECTION``. An entry has one field ``_`` with the envelope,
and is deleted (XDEL) after the envelope was written to the socket. A stream expires an hour after the last push. The public
relay may share the database. Besides the streams there are these keys, all with an expiry:

======================================  ==============================================================================
``dmsg.rmb.at:SESSION``                 the process that the session is connected to
``dmsg.rmb.told:SESSION``               that process has been told of envelopes and has not read them yet
``dmsg.rmb.inbox:PROCESS``              list of what a process is told: ``p`` or ``r`` (put, replaced) and the session
``dmsg.rmb.queues:TWIN``                sorted set of a twin's queues, and of its sessions of late, by when they go
``dmsg.rmb.from:TWIN``                  bytes that a twin has sent to queues without a session, this hour
======================================  ==============================================================================

Each operation is one script. An answer with several parts is packed into one string, which is faster to read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from dmsg.rmb.core.address import SessionAddress

#: KEYS: stream, at, told, queues, from. ARGV: data, most envelopes, most bytes, kept s, source, source bytes, size, our inbox,
#: session, most queues, oldest s. Returns 0, or why there is no room.
PUSH: Final = """
local now = redis.call('TIME')
local now_s = tonumber(now[1])
local length = redis.call('XLEN', KEYS[1])
if length > 0 then
    redis.call('XTRIM', KEYS[1], 'MINID', '~', (now_s - tonumber(ARGV[11])) * 1000)
    if length >= tonumber(ARGV[2]) then
        redis.call('XTRIM', KEYS[1], 'MINID', (now_s - tonumber(ARGV[11])) * 1000)
        length = redis.call('XLEN', KEYS[1])
    end
    if length >= tonumber(ARGV[2]) then return 'queue' end
    if length >= 16 and redis.call('MEMORY', 'USAGE', KEYS[1]) >= tonumber(ARGV[3]) then return 'queue' end
end
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now_s)
local at = redis.call('GET', KEYS[2])
local known = at or not string.find(ARGV[9], ':', 1, true) or redis.call('ZSCORE', KEYS[4], ARGV[9])
if not known and redis.call('ZCARD', KEYS[4]) >= tonumber(ARGV[10]) then return 'twin' end
if not at and ARGV[5] ~= '0' then
    local sent = redis.call('INCRBY', KEYS[5], ARGV[7])
    if sent == tonumber(ARGV[7]) then redis.call('EXPIRE', KEYS[5], ARGV[4]) end
    if sent > tonumber(ARGV[6]) then
        redis.call('DECRBY', KEYS[5], ARGV[7])
        return 'source'
    end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', '_', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[4], now_s + tonumber(ARGV[4]), ARGV[9])
redis.call('EXPIRE', KEYS[4], ARGV[4])
if at and at ~= ARGV[8] and redis.call('SET', KEYS[3], '1', 'NX', 'EX', 5) then
    redis.call('LPUSH', at, 'p' .. ARGV[9])
    redis.call('EXPIRE', at, 60)
end
return 0
"""
#: KEYS: stream, told. ARGV: where to begin, most envelopes, most bytes.
READ: Final = """
redis.call('DEL', KEYS[2])
local start, left, room, pieces = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {}
while left > 0 do
    local some = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', math.min(left, 8))
    for _, entry in ipairs(some) do
        local id, fields = entry[1], entry[2]
        start = '(' .. id
        if #fields ~= 2 or fields[1] ~= '_' then
            redis.call('XDEL', KEYS[1], id)
        else
            room = room - #fields[2]
            if room < 0 and #pieces > 0 then return table.concat(pieces) end
            pieces[#pieces + 1] = struct.pack('>BI4', #id, #fields[2])
            pieces[#pieces + 1] = id
            pieces[#pieces + 1] = fields[2]
            left = left - 1
        end
    end
    if #some == 0 then break end
end
return table.concat(pieces)
"""
#: KEYS: at. ARGV: our inbox, session, present s. Also who had the session is told.
ATTACH: Final = """
local old = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
if old and old ~= ARGV[1] then
    redis.call('LPUSH', old, 'r' .. ARGV[2])
    redis.call('EXPIRE', old, 60)
end
return 0
"""
#: KEYS: at, queues. ARGV: our inbox, session, kept s, most sessions of late.
DETACH: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
local now_s = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_s)
if redis.call('ZCARD', KEYS[2]) < tonumber(ARGV[4]) then
    redis.call('ZADD', KEYS[2], now_s + tonumber(ARGV[3]), ARGV[2])
    redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return 0
"""
#: KEYS: at, stream, at, stream … ARGV: our inbox, present s. Returns a letter for each session: - (nothing), p or r.
SWEEP: Final = """
local found = {}
for one = 1, #KEYS, 2 do
    local at = redis.call('GET', KEYS[one])
    if at and at ~= ARGV[1] then
        found[#found + 1] = 'r'
    else
        redis.call('SET', KEYS[one], ARGV[1], 'EX', ARGV[2])
        found[#found + 1] = redis.call('XLEN', KEYS[one + 1]) > 0 and 'p' or '-'
    end
end
return table.concat(found)
"""
#: KEYS: inbox. What is there, each with its length before it; it is taken out.
NOTICES: Final = """
local pieces = {}
for _, text in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    pieces[#pieces + 1] = struct.pack('>I4', #text)
    pieces[#pieces + 1] = text
end
redis.call('DEL', KEYS[1])
return table.concat(pieces)
"""
#: Each connection loads these scripts first. A script that had to be sent again, with its text, would run after later ones: a
#: session would be present again after it left, and envelopes would change their order.
SCRIPTS: Final = (PUSH, READ, ATTACH, DETACH, SWEEP, NOTICES)
_ENTRY: Final = struct.Struct(">BI")
_LENGTH: Final = struct.Struct(">I")


def stream(session: SessionAddress) -> str:
    """The key of a session's queue."""
    return f"stream:{session}"


def at(session: SessionAddress) -> str:
    """The key that says to which process a session is connected."""
    return f"dmsg.rmb.at:{session}"


def told(session: SessionAddress) -> str:
    """The key that is there while that process has been told of envelopes, and has not read them yet."""
    return f"dmsg.rmb.told:{session}"


def queues(session: SessionAddress) -> str:
    """The key of the queues of a session's twin."""
    return f"dmsg.rmb.queues:{session.twin}"


def sent_by(twin: int) -> str:
    """The key of the bytes that ``twin`` has sent to queues without a session."""
    return f"dmsg.rmb.from:{twin}"


def inbox(process: str) -> str:
    """The key of what ``process`` is told."""
    return f"dmsg.rmb.inbox:{process}"


def entries(packed: bytes) -> Iterator[tuple[str, bytes]]:
    """The answer of :data:`READ`: each entry's id and its envelope."""
    position = 0
    while position < len(packed):
        id_bytes, size = _ENTRY.unpack_from(packed, position)
        middle = position + _ENTRY.size + id_bytes
        yield packed[position + _ENTRY.size : middle].decode("ascii"), packed[middle : middle + size]
        position = middle + size


def notices(packed: bytes) -> Iterator[bytes]:
    """The answer of :data:`NOTICES`: what a process is told, see :func:`notice`."""
    position = 0
    while position < len(packed):
        (size,) = _LENGTH.unpack_from(packed, position)
        position += _LENGTH.size + size
        yield packed[position - size : position]


def notice(text: str) -> tuple[str, SessionAddress]:
    """One thing that a process is told: ``p`` (put) or ``r`` (replaced), and the session."""
    twin, colon, connection = text[1:].partition(":")
    return text[:1], SessionAddress(int(twin), connection if colon else None)
