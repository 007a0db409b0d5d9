"""Our reactor, asleep whenever there is nothing to do: for machines where an idle core matters more than some microseconds."""

from __future__ import annotations

from twisted.internet.main import installReactor

from dmsg.glue.lean_epoll import LeanEpollReactor


def install() -> None:
    """Make such a :class:`LeanEpollReactor` the reactor of this process, as ``twistd --reactor=dmsg-epoll-sleep`` does."""
    installReactor(LeanEpollReactor(sleeps=True))
