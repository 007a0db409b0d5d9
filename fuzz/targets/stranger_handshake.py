"""A stranger's link handshake at a messaging relay: its tokens, its timeouts, and its cost to the relay."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.messaging.core.events import LinkDone, LinkRequested
from dmsg.messaging.core.limits import FIRST_FRAME_PAUSE_S, HANDSHAKE_OBJECT_LIMIT_BYTES
from dmsg.messaging.core.link import LinkInitiator
from dmsg.messaging.relay.handshake import StrangerHandshake
from dmsg.messaging.relay.limits import RelayLimits
from fuzz.choices import Choices, repeatable
from fuzz.oracles import KEYS
from fuzz.words import members

DICTIONARY = members("version", "initiator", "responder", "nonce", "sig1", "sig2", "accepted")

_CLIENT, _RELAY = KEYS[:2]
_LIMITS = RelayLimits(first_byte_timeout_s=1.0, handshake_timeout_s=5.0)
_REFUSALS = ("", "", "", "handshakes", "handshakes_per_address")


def _transcript() -> tuple[bytes, bytes, bytes]:
    """The two objects that a client sends, and its first data on the link, to a relay with the same entropy each time."""
    client = LinkInitiator(_CLIENT, _RELAY.public_key, now=0.0, random=repeatable(b"nonce"))
    relay = StrangerHandshake(_RELAY, _LIMITS, lambda now: "", now=0.0, random=repeatable(b"entropy"))
    first = client.data_to_send()
    relay.receive_data(first, 0.0)
    client.receive_data(relay.data_to_send(), 0.0)
    return first, client.data_to_send(), b"frames of the client"


_TRANSCRIPT = _transcript()
_WHOLE = b"".join(_TRANSCRIPT)
_HANDSHAKE_BYTES = len(_TRANSCRIPT[0]) + len(_TRANSCRIPT[1])


class _World:
    """A stranger at a relay, and a record of what happened."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = choices.byte() / 8
        self.began = self.now
        self.refusal = choices.pick(_REFUSALS)
        random = repeatable(b"entropy")
        self.core = StrangerHandshake(_RELAY, _LIMITS, self.take, now=self.now, random=random)
        self.taken: list[float] = []
        #: Time of the first bytes, and all received bytes.
        self.first: float | None = None
        self.received = b""
        self.heard = self.asked = self.over = False
        self.accepted: float | None = None
        self.answers = b""

    def take(self, now: float) -> str:
        """The tokens of a handshake."""
        self.taken.append(now)
        return self.refusal

    # --- what happens ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Bytes of the stranger come."""
        if self.first is None:
            self.first = self.now
        self.heard = True
        self.received += data
        try:
            self.act(self.core.receive_data(data, self.now))
        except RemoteProtocolError as error:
            self.over = True
            if self.refusal:
                assert (error.stage, error.reason) == ("accept", self.refusal)
            else:
                assert error.stage == "handshake" and not self.is_honest()
        assert self.taken == [self.first] and (self.over or not self.refusal)

    def act(self, events: object) -> None:
        """Take the events of a relay."""
        assert isinstance(events, list) and len(events) <= 1
        for event in events:
            if isinstance(event, LinkRequested):
                assert not self.asked and self.core.messages == 2 and event.remote == _CLIENT.public_key
                self.asked = True
            else:
                assert isinstance(event, LinkDone) and event.remote == _CLIENT.public_key
                assert self.accepted is not None and self.received.endswith(event.leftover)
                assert not self.is_honest() or len(self.received) - len(event.leftover) == _HANDSHAKE_BYTES
                assert event.leftover or self.now >= self.accepted + FIRST_FRAME_PAUSE_S
                self.over = True

    def is_honest(self) -> bool:
        """Whether the handshake is as the client made it; bytes behind it do not matter."""
        size = min(len(self.received), _HANDSHAKE_BYTES)
        if self.received[:size] == _WHOLE[:size]:
            return len(self.received) <= _HANDSHAKE_BYTES + HANDSHAKE_OBJECT_LIMIT_BYTES
        return False

    def decide(self) -> None:
        """The relay lets the client in or not; it can do so only once, and only after the client asked."""
        accepts = self.choices.flag()
        try:
            if accepts:
                self.core.accept(self.now)
            else:
                self.core.refuse()
        except LocalProtocolError:
            assert not self.asked or self.accepted is not None
            return
        assert self.asked and self.accepted is None
        self.accepted = self.now
        self.over = not accepts
        assert (b'"accepted":true' in self.send()) is accepts

    def wait(self) -> None:
        """Time passes, and the relay acts at its timeout."""
        self.now += self.choices.byte() / 16
        due = self.core.next_timeout()
        try:
            self.act(self.core.handle_timeout(self.now))
        except RemoteProtocolError as error:
            assert due is not None and self.now >= due and error.stage == "handshake"
            self.over = True
            silent = not self.heard and self.now >= self.began + _LIMITS.first_byte_timeout_s
            assert error.reason == ("silent" if silent else "timeout")
            assert silent or self.now >= self.began + _LIMITS.handshake_timeout_s
        else:
            assert self.over or due is None or self.now < due

    def send(self) -> bytes:
        """Data for the stranger: at most one object, and nothing twice."""
        data = self.core.data_to_send()
        assert not self.core.data_to_send() and data.count(b"\n") <= 1
        self.answers += data
        return data

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """A stranger's cost is bounded, and it has a deadline."""
        core = self.core
        assert core.messages <= 2 and len(self.taken) <= 1 and not core.answer_due
        assert core.messages <= self.received.count(b"}") and (core.messages or not self.answers)
        assert self.answers.count(b"\n") <= 2
        if self.over:
            return
        assert len(core._reader.buffer) <= HANDSHAKE_OBJECT_LIMIT_BYTES
        due = core.next_timeout()
        assert due is not None
        if not self.heard:
            assert due == self.began + _LIMITS.first_byte_timeout_s
        elif self.accepted is None:
            assert due == self.began + _LIMITS.handshake_timeout_s
        else:
            assert due == self.accepted + FIRST_FRAME_PAUSE_S


def one_input(data: bytes) -> None:
    """The first bytes choose the time and whether there are tokens. Then bytes arrive, genuine or altered; and time passes.

    The relay decides about every unaltered handshake, in whatever pieces it arrives.
    """
    choices = Choices(data)
    world = _World(choices)
    at = 0
    for _ in range(48):
        if world.over or not choices.left:
            break
        match choices.below(8):
            case 0 | 1 | 2:
                size = choices.below(1 << 10) or (len(_TRANSCRIPT[0]) if not at else _HANDSHAKE_BYTES - at)
                piece, at = _WHOLE[at : at + max(0, size)], at + max(0, size)
                if piece and choices.flag():
                    where = choices.below(1 << 10) % len(piece)
                    piece = piece[:where] + bytes((piece[where] ^ choices.byte(),)) + piece[where + 1 :]
                for part in choices.pieces(piece):
                    if part and not world.over:
                        world.receive(part)
            case 3:
                garbage = choices.chunk() * (1 + choices.byte() % 16)
                if garbage:
                    world.receive(garbage)
            case 4:
                world.core.heard()
                world.heard = True
            case 5:
                world.decide()
            case 6:
                world.send()
            case _:
                world.wait()
        world.check()
    if not world.over and not world.refusal and world.is_honest():
        assert world.asked is (len(world.received) >= _HANDSHAKE_BYTES)


def seeds() -> Iterator[bytes]:
    """Handshakes in pieces, let in and refused; silent and slow strangers; altered ones; too much behind; no tokens."""
    go, whole, pieces = b"\x00\x00\x00\x00", b"\x00\x00\x00\x00\x00", b"\x00\x00\x00\x00\x05"
    send, accept, refuse, pause = b"\x06", b"\x05\x01", b"\x05\x00", b"\x07"
    for start in (b"\x00\x00", b"\x50\x01"):
        for one in (whole, pieces):
            done = start + one + send + one + send
            yield done + accept + pause + b"\x40"
            yield done + accept + go + b"\x01"
            yield done + accept + b"\x03\x02{}\x00" + pause + b"\x40"
            yield done + refuse + pause + b"\xff"
            yield done + b"\x03\x03abc\x0f" + accept + accept + pause + b"\x08"
            yield done + b"\x03\xff" + b"a" * 255 + b"\x0f" + b"\x03\xff" + b"a" * 255 + b"\x0f"
            yield start + accept + one + refuse + send + pause + b"\x50"
        yield start + pause + b"\x08" + pause + b"\x08"
        yield start + b"\x04" + pause + b"\x20" + whole + pause + b"\x40"
        yield start + b"\x00\x00\x40\x00\x03" + pause + b"\x10" + b"\x00\x00\x40\x00\x03" + pause + b"\xff"
        for where in range(0, 400, 23):
            altered = bytes((0, 0, 0, 1, where >> 8, where & 255, 1, 0))
            yield start + altered + send + whole
            yield start + whole + send + altered
        yield start + b'\x03\x0a{"x":"}"}\n\x00' + whole
        yield start + b"\x03\x05 [1] \x00"
    for refusal in (3, 4):
        yield bytes((8, refusal)) + pause + b"\x04" + pieces + whole
