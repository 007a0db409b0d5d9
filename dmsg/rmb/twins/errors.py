"""What a registry of twins fails for."""

from __future__ import annotations

from dmsg.errors import DmsgError, RemoteProtocolError


class RegistryError(DmsgError):
    """The registry did not answer, or with something that cannot be believed; later it may.

    ``reason`` is a short fixed text for logs: ``unavailable``, ``altered`` (a row its twin has not signed, or that goes
    back behind what this process has seen), ``full``, ``closed``. ``detail`` is for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"the registry of twins: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail

    @property
    def own_text(self) -> str:
        """Without the detail, which others may have written."""
        return f"the registry of twins: {self.reason}"


class NoSuchAccount(DmsgError):
    """There is no twin with this account (32 bytes): it has to be created first."""

    def __init__(self, account: bytes) -> None:
        super().__init__(f"no twin has the account {account.hex()}")
        self.account = account


class MalformedAnswer(RemoteProtocolError):
    """A node said what cannot be: broken SCALE or JSON, another twin than was asked for, more than anything of use."""

    def __init__(self, problem: str) -> None:
        super().__init__("chain", "malformed answer")
        self.problem = problem
