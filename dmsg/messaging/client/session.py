"""A client's link to one relay: from the TCP connection to the last channel on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from dmsg.clients.dial import OpenedStream
from dmsg.clients.pending import PendingStream
from dmsg.clients.sessions import RelaySession
from dmsg.clients.sessions import SessionUser as RelaySessionUser
from dmsg.crypto.keys import PublicKey, Random, SecretKey
from dmsg.discovery.entry import MESSAGING
from dmsg.errors import DmsgError, StageError
from dmsg.glue.shell import Shell
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.client.transport import ChannelTransport
from dmsg.messaging.core.channel import Channel, ChannelOwner
from dmsg.messaging.core.connection import Connection
from dmsg.messaging.core.errors import ChannelEndReason, NoFreeChannel, NoServices, end_error
from dmsg.messaging.core.events import ChannelEnded, ChannelOffered, ChannelOpened, DataReceived, LinkDone
from dmsg.messaging.core.link import LinkInitiator
from dmsg.relays.errors import ServerLost

#: The beginning of the protocol's addresses and endpoint strings, and its name in entries.
SCHEME: Final = MESSAGING
#: Flush after so many channels that opened or were offered in one read, so that the relay and the peers go on while the rest is
#: handled. Otherwise each of many dials would wait for all others.
_FLUSH_ANSWERS: Final = 8


class SessionUser(RelaySessionUser, TypingProtocol):
    """The client that a session works for."""

    def offered(self, session: LinkSession, channel: Channel) -> None:
        """A peer asks for a channel."""


class LinkSession(RelaySession[SessionUser, ChannelTransport]):
    """One link to one relay. ``ready`` fires once the relay has accepted it, or fails with a ``StageError``."""

    connection: Connection

    def __init__(
        self,
        server: PublicKey,
        key: SecretKey,
        user: SessionUser,
        clock: IReactorTime,
        *,
        config: MessagingConfig,
        random: Random = os.urandom,
    ) -> None:
        self._config = config
        self._random = random
        now, timeout_s = clock.seconds(), config.handshake_timeout_s
        core = LinkInitiator(key, server, now=now, timeout_s=timeout_s, random=random)
        super().__init__(server, key, user, clock, core, ChannelTransport)

    def request(self, target: PublicKey, service: str = "") -> Deferred[OpenedStream[LinkSession]]:
        """Ask ``target`` for a channel; cancelling closes it. Raises ``StageError``, also for any ``service`` other than ""."""
        if service:
            raise StageError("request", "unsupported", NoServices("the messaging system has no services"))
        if not self.is_ready:
            raise StageError("request", "server connection lost")
        try:
            channel = self.connection.open(target)
        except NoFreeChannel as error:
            raise StageError("request", "busy", error) from None
        self.flush_soon()
        channel.owner = pending = PendingChannel(self, channel)
        return pending.done

    @property
    def idle(self) -> bool:
        """See :class:`~dmsg.relays.session.Session`."""
        return not self.connection.channels

    # --- from the shell --------------------------------------------------------------------------------------------

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        """Pass on the events of the core. With many answers, flush in between."""
        answers = 0
        for event in events:
            match event:
                case DataReceived():
                    event.channel.owner.deliver(event.data)
                case ChannelEnded():
                    event.channel.owner.ended(event.reason, local=event.local)
                case ChannelOpened():
                    event.channel.owner.opened(event.channel)
                    answers += 1
                case ChannelOffered():
                    self._user.offered(self, event.channel)
                    answers += 1
                case LinkDone():
                    config = self._config
                    self.connection = Connection(
                        self.key,
                        now=self.clock.seconds(),
                        dialect=config.dialect,
                        layout=config.layout,
                        config=config.connection,
                        random=self._random,
                    )
                    self.admitted()
                    shell.become(self.connection, event.leftover)
                case _:
                    raise AssertionError(f"unexpected event {event!r}")
            if answers == _FLUSH_ANSWERS:
                answers = 0
                shell.flush_between()

    def end_streams(self, loss: ServerLost) -> None:
        """See :class:`~dmsg.clients.sessions.RelaySession`."""
        if isinstance(self.shell.core, Connection):
            for channel in list(self.connection.channels.values()):
                self.connection.abort(channel)
                channel.owner.lost(loss)


class PendingChannel(ChannelOwner, PendingStream[LinkSession, OpenedStream[LinkSession]]):
    """The owner of a channel until the peer has answered."""

    def opened(self, channel: Channel) -> None:
        """The peer accepted, and has proved its key."""
        self.settle(channel, OpenedStream)

    def ended(self, reason: ChannelEndReason, *, local: bool) -> None:
        """The peer or the relay said no; which of them is not told."""
        refused = reason is ChannelEndReason.REFUSED
        text = "request rejected" if refused else "accept check failed" if local else reason.value
        self.fail("accept", text, end_error(reason))

    def lost(self, error: DmsgError) -> None:
        """The link was lost before an answer came."""
        self.lose(error)
