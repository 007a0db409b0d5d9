"""The errors of a registry of twins. Pure."""

from __future__ import annotations

from dmsg.errors import DmsgError, RemoteProtocolError


class RegistryError(DmsgError):
    """The registry did not answer, or its answer cannot be trusted; a later attempt may succeed.

    ``reason`` is a short fixed text for logs: ``unavailable``, ``altered`` (a row that its twin has not signed, or that is
    older than what this process has seen), ``malformed`` (a twin on the chain), ``overloaded``, ``full``, ``closed``.
    ``detail`` is for people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"the registry of twins: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail

    @property
    def own_text(self) -> str:
        """The message without the detail, which others may have written."""
        return f"the registry of twins: {self.reason}"


class NoSuchAccount(DmsgError):
    """There is no twin with this account (32 bytes): it has to be created first."""

    def __init__(self, account: bytes) -> None:
        super().__init__(f"no twin has the account {account.hex()}")
        self.account = account


class MalformedAnswer(RemoteProtocolError):
    """A node's answer is invalid: broken SCALE or JSON, or longer than any valid answer."""

    def __init__(self, problem: str) -> None:
        super().__init__("chain", "malformed answer")
        self.problem = problem


class NodeFailed(DmsgError):
    """A node was lost, did not answer in time, or cannot be trusted: another node may work.

    ``reason`` is a short fixed text: ``connect``, ``lost``, ``timeout``, ``malformed``, ``lies``, ``stalled``, ``rejected``
    (a transaction), ``refused``, ``closed``. Only ``lost`` does not count against the node.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"the node failed: {reason}" + (f" ({detail})" if detail else ""))
        self.reason = reason
        self.detail = detail


class NodeRefused(NodeFailed):
    """A node answered with an error: its ``code``, and the beginning of its text in ``detail``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__("refused", f"{code}: {text}")
        self.code = code
