"""Who may come in: access policies, and how they are asked."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred, maybeDeferred
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy, IKeyPolicy


@implementer(IKeyPolicy)
class AllowKeys:
    """An access policy that admits the keys it is given and no other."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self.keys = frozenset(keys)

    def admits_key(self, remote: PublicKey) -> bool:
        """Whether ``remote`` is on the list."""
        return remote in self.keys

    def allow(self, remote: PublicKey, service: str) -> bool:
        """Whether ``remote`` is on the list."""
        return remote in self.keys


def ask(policy: IAccessPolicy, remote: PublicKey, service: str) -> Deferred[object]:
    """What ``policy`` says to ``remote``; fails with what it fails with."""

    def allow() -> Any:
        answer = policy.allow(remote, service)
        return ensureDeferred(answer) if isinstance(answer, Coroutine) else answer

    return maybeDeferred(allow)
