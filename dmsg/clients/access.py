"""Access policies, which decide who may come in, and how they are asked."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred, maybeDeferred
from zope.interface import implementer

from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy, IKeyPolicy


@implementer(IKeyPolicy)
class AllowKeys:
    """An access policy that admits only the given keys. Raises ``TypeError`` for a key that is not a ``PublicKey``."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        self.keys = frozenset(keys)
        for key in self.keys:
            if not isinstance(key, PublicKey):  # a key given as text equals no PublicKey, and would never be admitted
                raise TypeError(f"a key is a PublicKey, as PublicKey.parse gives it, not {key!r}")

    def admits_key(self, remote: PublicKey) -> bool:
        """Whether ``remote`` is on the list."""
        return remote in self.keys

    def allow(self, remote: PublicKey, service: str) -> bool:
        """Whether ``remote`` is on the list."""
        return remote in self.keys


def ask(policy: IAccessPolicy, remote: PublicKey, service: str) -> Deferred[object]:
    """The answer of ``policy`` to ``remote``; fails with the same error as the policy."""

    def allow() -> Any:
        answer = policy.allow(remote, service)
        return ensureDeferred(answer) if isinstance(answer, Coroutine) else answer

    return maybeDeferred(allow)
