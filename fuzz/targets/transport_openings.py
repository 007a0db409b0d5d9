"""The openings of transports between two clients: requests, answers and handshakes, through a relay that may lie."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

from dmsg.errors import LocalProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, EndToEnd
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.events import Confirmed, DataReceived, StreamClosed, StreamOffered, StreamOpened, UpgradeReceived
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import (
    CLOSE,
    HEADER,
    OK,
    REQUEST,
    REQUEST_BYTES,
    CloseReason,
    encode_close,
    encode_frame,
    split_frames,
)
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS, PlainRecords

_CONFIG = ConnectionConfig(offered_limit=2)
_SERVICES = ("", "files", "s" * 255)
_RESUMES = (None, Resume(b"t" * 16, 70_000))
#: Handshakes of an input: each takes both ends some 500 microseconds.
_HANDSHAKES = 6
_FROM_ASKER, _FROM_ASKED = b"from the one that asked", b"and back"


class _Wish:
    """A client's request, and its events."""

    def __init__(self, stream: Stream, carrier: Carrier, service: str, resume: Resume | None) -> None:
        self.stream = stream
        self.carrier = carrier
        self.service = service
        self.resume = resume
        self.got = b""
        self.opened = self.over = False


class _Offer:
    """An offer to a client, and what the client did."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        #: The service and the transport that the other side wants, once they could be read.
        self.wanted: tuple[str, Resume | None] | None = None
        self.got = b""
        self.decided = self.confirmed = self.over = False


class _End:
    """A client: its connection, its requests and offers, and its frames in flight."""

    def __init__(self, number: int) -> None:
        records: Any = PlainRecords()
        key = KEYS[number]
        end_to_end = EndToEnd(key, KEYS[2].public_key, aes=bool(number), random=repeatable(b"e%d" % number))
        self.core = Connection(
            key.public_key,
            records,
            now=0.0,
            config=_CONFIG,
            random=repeatable(b"%d" % number),
            extended=True,
            end_to_end=end_to_end,
        )
        self.core.receive_data(encode_frame(OK, 0), 0.0)
        self.remote = KEYS[1 - number].public_key
        self.wishes: list[_Wish] = []
        self.offers: list[_Offer] = []
        self.way: deque[tuple[int, int, bytes]] = deque()

    def _wish(self, stream: Stream) -> _Wish | None:
        return next((one for one in self.wishes if one.stream is stream), None)

    def _offer(self, stream: Stream) -> _Offer:
        return next(one for one in self.offers if one.stream is stream)

    def ask(self, choices: Choices) -> None:
        """Ask for a transport."""
        carrier, service = choices.pick(tuple(Carrier)), choices.pick(_SERVICES)
        resume = choices.pick(_RESUMES)
        stream = self.core.open(self.remote, carrier, service=service, resume=resume)
        self.wishes.append(_Wish(stream, carrier, service, resume))

    def decide(self, offer: _Offer, how: int) -> None:
        """Accept an offer, refuse it, or accept it for an upgrade."""
        core, stream = self.core, cast(PlainStream, offer.stream)  # until it is decided
        if offer.over or offer.decided or stream.state not in (StreamState.OFFERED, StreamState.UPGRADING):
            return
        if how == 0:
            offer.over = offer.decided = True
            core.abort(stream, CloseReason.REFUSED)
        elif stream.state is StreamState.UPGRADING:
            if offer.wanted is not None:
                offer.stream, offer.decided = core.accept(stream), True
        elif how == 1 and stream.wants_seal:
            self._read(offer)
            if offer.wanted is not None:
                offer.stream, offer.decided = core.accept(stream), True
        elif how == 2 and not stream.wants_seal:
            core.accept_for_upgrade(stream)
        elif not stream.wants_seal:
            opened = core.accept(stream)
            assert opened is stream and opened.state is StreamState.OPEN
            offer.decided = offer.confirmed = True
            self._say(stream, _FROM_ASKED)

    def _say(self, stream: Stream, data: bytes) -> None:
        if stream.state is StreamState.OPEN:  # its end may have come in the same read
            self.core.send_data(stream, data)

    def _read(self, offer: _Offer) -> None:
        """The other side's handshake says what it wants, or was not made by it."""
        try:
            offer.wanted = self.core.read_offer(cast(PlainStream, offer.stream))
        except IntegrityError:
            offer.over = offer.decided = True
            self.core.abort(offer.stream, CloseReason.INTEGRITY)

    def take(self, events: Any) -> None:
        """Handle a core's events as a client does."""
        for event in events:
            wish = self._wish(event.stream)
            match event:
                case StreamOffered():
                    stream = event.stream
                    assert stream.remote == self.remote and not stream.initiator
                    self.offers.append(_Offer(stream))
                case StreamOpened():
                    wish = next(one for one in self.wishes if one.stream.id == event.stream.id and not one.over)
                    self._opened(wish, event.stream)
                case UpgradeReceived():
                    self._read(self._offer(event.stream))
                case Confirmed():
                    offer = self._offer(event.stream)
                    assert offer.decided and not offer.confirmed and event.stream.security == "e2e"
                    offer.confirmed = True
                    self._say(event.stream, _FROM_ASKED)
                case DataReceived() if wish is not None:
                    assert wish.opened
                    wish.got += event.data
                case DataReceived():
                    offer = self._offer(event.stream)
                    assert offer.confirmed
                    offer.got += event.data
                case StreamClosed():
                    one = wish or self._offer(event.stream)
                    assert not one.over, "closed twice"
                    one.over = True

    def _opened(self, wish: _Wish, stream: Stream) -> None:
        """The transport is the requested one: sealed if requested so, and reported once."""
        assert not wish.opened and not wish.over
        assert (stream.security == "e2e") is (wish.carrier is not Carrier.NONE)
        assert stream is wish.stream or (wish.stream.state is StreamState.CLOSED and stream.id == wish.stream.id)
        wish.opened, wish.stream = True, stream
        self._say(stream, _FROM_ASKER)

    def flush(self) -> None:
        """Send everything that may be sent now; handshakes advance between two writes."""
        core = self.core
        while core.wants_write or core.answers:
            self.take(core.open_more())
            data = core.data_to_send()
            frames, used = split_frames(data)
            assert used == len(data)
            self.way += [(kind, stream_id, data[start:end]) for kind, stream_id, start, end in frames]

    def check(self) -> None:
        """All counters are correct; nobody was given data that nobody sent."""
        core = self.core
        offered = sum(one.state is StreamState.OFFERED for one in core.streams.values())
        assert core._openings.offered == offered <= _CONFIG.offered_limit
        for wish in self.wishes:
            assert (core.streams.get(wish.stream.id) is wish.stream) == (wish.stream.state is not StreamState.CLOSED)
            assert wish.over == (wish.stream.state is StreamState.CLOSED)
        for offer in self.offers:
            assert (core.streams.get(offer.stream.id) is offer.stream) == (offer.stream.state is not StreamState.CLOSED)
            assert offer.over == (offer.stream.state is StreamState.CLOSED)


class _World:
    """Two clients, and the relay's table of ids: those of one client by those of the other."""

    def __init__(self) -> None:
        self.ends = _End(0), _End(1)
        self.ids: tuple[dict[int, int], dict[int, int]] = {}, {}
        self.next_id = 1
        #: Whether the relay has altered or made up anything.
        self.lied = False

    def deliver(self, number: int, count: int, flip: int = 0) -> None:
        """The next frames of a client reach the other in one read; one bit of the last may be flipped."""
        end, other = self.ends[number], self.ends[1 - number]
        read: list[bytes] = []
        for at in range(min(count, len(end.way))):
            kind, stream_id, payload = end.way.popleft()
            if kind == REQUEST:
                self.ids[number][stream_id] = self.next_id
                self.ids[1 - number][self.next_id] = stream_id
                self.next_id += 2
                self.check_request(end, stream_id, payload)
            there = self.ids[number].get(stream_id)
            if there is None:
                continue  # late
            if kind == CLOSE:
                self.forget(number, stream_id)
            if flip and at == count - 1 and kind != CLOSE and len(payload) > REQUEST_BYTES:
                # The relay may change keys and plain data; that is refused or harmless.
                changed = bytearray(payload)
                where = REQUEST_BYTES if kind == REQUEST else min(REQUEST_BYTES, len(payload) - 1)
                changed[where + flip % (len(payload) - where)] ^= 1 << flip % 8
                payload, self.lied = bytes(changed), True
            read.append(HEADER.pack(kind, there, len(payload)) + payload)
        other.take(other.core.receive_data(b"".join(read), 0.0))

    def check_request(self, end: _End, stream_id: int, payload: bytes) -> None:
        """A request names both ends, and carries a handshake if it should, of one length for all services."""
        wish = next(one for one in end.wishes if one.stream.id == stream_id)
        assert payload[:REQUEST_BYTES] == end.core._openings._identity.raw + end.remote.raw
        assert (len(payload) > REQUEST_BYTES) == (wish.carrier is Carrier.REQUEST)

    def forget(self, number: int, stream_id: int) -> None:
        """The relay forgets a transport."""
        there = self.ids[number].pop(stream_id)
        del self.ids[1 - number][there]

    def close(self, number: int, at: int) -> None:
        """The relay tells both that a transport has ended."""
        ids = list(self.ids[number])
        if ids:
            stream_id = ids[at % len(ids)]
            there = self.ids[number][stream_id]
            self.forget(number, stream_id)
            self.lied = True
            for end, one in ((self.ends[number], stream_id), (self.ends[1 - number], there)):
                end.take(end.core.receive_data(encode_close(one, CloseReason.PEER_GONE), 0.0))

    def finish(self) -> None:
        """Decide and deliver everything: each request has opened or ended, and both sides agree on its content."""
        for _ in range(20):
            for end in self.ends:
                for offer in end.offers:
                    end.decide(offer, 1 if len(offer.stream.request) > REQUEST_BYTES else 2)
                end.flush()
            for number, end in enumerate(self.ends):
                self.deliver(number, len(end.way))
            for end in self.ends:
                end.check()
        for number, end in enumerate(self.ends):
            for wish in end.wishes:
                self.check_wish(number, wish)

    def check_wish(self, number: int, wish: _Wish) -> None:
        """Whatever the relay did, both ends of an open transport mean the same; an honest relay loses nothing."""
        other = self.ends[1 - number]
        there = self.ids[number].get(wish.stream.id)
        offer = next((one for one in other.offers if one.stream.id == there), None) if there is not None else None
        if wish.opened and not wish.over and offer is not None and not offer.over:
            if wish.carrier is not Carrier.NONE:
                assert offer.wanted == (wish.service, wish.resume) and offer.stream.security == "e2e"
            if not self.lied:
                assert offer.got == _FROM_ASKER and wish.got == _FROM_ASKED
        if wish.carrier is not Carrier.NONE:
            assert wish.got in (b"", _FROM_ASKED)
        elif not self.lied:
            # A request in the clear does not fit an offer that waits for an upgrade.
            assert wish.opened or wish.over
        if not self.lied and wish.carrier is not Carrier.NONE:
            assert wish.opened or wish.over, "it never ends"


def one_input(data: bytes) -> None:
    """Clients ask, take, refuse; the relay delivers, alters what is sealed, and ends transports.

    Whoever is told of a sealed transport has one, with the requested peer, service and transport; each side is told once of
    its opening and once of its end.
    """
    choices, world = Choices(data), _World()
    for _ in range(60):
        if not choices.left:
            break
        operation = choices.byte()
        number = operation >> 7
        end = world.ends[number]
        match operation & 15:
            case 0 | 1 if sum(len(one.wishes) for one in world.ends) < _HANDSHAKES:
                end.ask(choices)
            case 2 | 3 | 4 if end.offers:
                end.decide(end.offers[choices.byte() % len(end.offers)], (operation >> 4) % 4)
            case 5 | 6:
                end.flush()
            case 7 | 8:
                world.deliver(number, 1 + (operation >> 4 & 7))
            case 9:
                world.deliver(number, 1, 1 + choices.below(0x10000))
            case 10:
                world.close(number, choices.byte())
            case 11 if end.wishes:
                wish = end.wishes[choices.byte() % len(end.wishes)]
                if not wish.over:
                    wish.over = True
                    end.core.abort(wish.stream, CloseReason.NORMAL)
            case 12:
                _misuse(end, choices)
            case _:
                for each in world.ends:
                    each.flush()
                for at in (0, 1):
                    world.deliver(at, len(world.ends[at].way))
        for each in world.ends:
            each.check()
    world.finish()


def _misuse(end: _End, choices: Choices) -> None:
    """A stream that waits for no decision accepts none."""
    streams = [one.stream for one in end.wishes]
    if streams:
        stream: Any = choices.pick(streams)
        try:
            end.core.accept(stream)
        except LocalProtocolError:
            return
        raise AssertionError("what was asked for was accepted here")


def seeds() -> Iterator[bytes]:
    """Each carrier, taken, refused, upgraded, answered in the clear; offers over the limit; altered and ended handshakes."""
    go = b"\x0d"
    for carrier in range(3):
        for service in range(3):
            for resume in range(2):
                ask = bytes((0, carrier, service, resume)) + go
                yield ask
                for how in range(4):
                    yield ask + bytes((0x82 | how << 4, 0)) + go + bytes((0x92, 0)) + go * 2
        ask = bytes((0, carrier, 1, 1))
        yield ask * 4 + go * 3
        yield ask + ask.replace(b"\0", b"\x80", 1) + go + b"\x92\x00\x12\x00" + go * 3
        for flip in (0, 1, 40, 300, 600):
            altered = b"\x09" + flip.to_bytes(2, "big")
            yield ask + b"\x05" + altered + b"\x92\x00" + go * 2
            yield ask + go + b"\x92\x00\xa2\x00\x85" + altered.replace(b"\x09", b"\x89") + go * 2
            yield ask + go + b"\xa2\x00" + go + b"\x05" + altered + b"\x92\x00" + go * 2
        for when in range(5):
            yield ask + (go + b"\x92\x00\xa2\x00" + go * 2)[:when] + b"\x0a\x00" + go
            yield ask + (go + b"\x92\x00\xa2\x00" + go * 2)[:when] + b"\x0b\x00" + go * 2
        yield ask + go + b"\x0c\x00"
    yield b"\x00\x00\x00\x00" + go + b"\xb2\x00" + go
