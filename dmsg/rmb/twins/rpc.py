"""JSON-RPC 2.0 as a client of a Substrate node speaks it: requests, answers and notices; :ref:`spec-rmb-nodes`. Pure.

The node is not trusted. A message may be as long as the longest awaited answer, notices have a rate limit, and only strings
may be large: the number of values in a message is limited.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from dmsg.http.errors import MalformedJson
from dmsg.http.json_text import decode
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.sansio.rate import TokenBucket

#: Size of an answer or a notice by default: a header, a hash, a number.
SMALL_BYTES: Final = 32 * 1024
#: Commas in one message. A header with its digest has some ten; each value takes some hundred bytes of memory.
MAX_COMMAS: Final = 2_000
#: Notices per second, and at once: chains make a block every few seconds, and report each step of a transaction.
NOTICES_PER_S: Final = 20.0
NOTICE_BURST: Final = 200
_ERROR_CHARS: Final = 200
_HEX_NUMBER: Final = re.compile("0x[0-9a-fA-F]{1,16}")
_SUBSCRIPTION_CHARS: Final = 64

SubscriptionId = str | int


@dataclass(frozen=True, slots=True)
class Answer:
    """The ``result`` of the request ``number``."""

    number: int
    result: Any


@dataclass(frozen=True, slots=True)
class Refusal:
    """The node's error for the request ``number``: its ``code``, and up to 200 characters of ``text``."""

    number: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice of ``subscription``."""

    subscription: SubscriptionId
    result: Any


def subscription_id(value: Any) -> SubscriptionId:
    """The node's id of a subscription; raises ``MalformedAnswer``."""
    if isinstance(value, str) and len(value) <= _SUBSCRIPTION_CHARS:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise MalformedAnswer("no name of a subscription")


class Rpc:
    """The requests and answers of one connection; ``now`` is in seconds on any clock."""

    def __init__(self, now: float) -> None:
        self._number = 0
        self._limits: dict[int, int] = {}
        self._notices = TokenBucket(NOTICES_PER_S, NOTICE_BURST, now)

    def ask(self, method: str, params: tuple[Any, ...], limit_bytes: int = SMALL_BYTES) -> tuple[int, str]:
        """The number and the text of a request; ``limit_bytes`` is the limit of the whole answer."""
        self._number += 1
        self._limits[self._number] = limit_bytes
        question = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        return self._number, json.dumps(question, separators=(",", ":"))

    def receive(self, text: str, now: float) -> Answer | Refusal | Notice:
        """Parse a message of the node; raises :class:`~dmsg.rmb.twins.errors.MalformedAnswer` for an unexpected one."""
        if text.count(",") > MAX_COMMAS:
            raise MalformedAnswer("more values than anything has")
        try:
            message = decode(text.encode("utf-8", "replace"), max(self._limits.values(), default=SMALL_BYTES))
        except MalformedJson as error:
            raise MalformedAnswer(str(error)) from None
        if not isinstance(message, dict):
            raise MalformedAnswer("no message of JSON-RPC")
        if "method" in message:
            return self._notice(message, now)
        number = message.get("id")
        if not isinstance(number, int) or isinstance(number, bool) or number not in self._limits:
            raise MalformedAnswer("an answer to nothing")
        if len(text) > self._limits.pop(number):
            raise MalformedAnswer("an answer longer than it may be")
        problem = message.get("error")
        if problem is not None:
            code, words = (problem.get("code"), problem.get("message")) if isinstance(problem, dict) else (None, None)
            return Refusal(number, code if isinstance(code, int) else 0, str(words)[:_ERROR_CHARS])
        if "result" not in message:
            raise MalformedAnswer("an answer without a result")
        return Answer(number, message["result"])

    def _notice(self, message: dict[str, Any], now: float) -> Notice:
        params = message.get("params")
        if not self._notices.take(now):
            raise MalformedAnswer("endless notices")
        if not isinstance(params, dict) or "result" not in params:
            raise MalformedAnswer("no notice of a subscription")
        return Notice(subscription_id(params.get("subscription")), params["result"])


def read_hex(value: Any, limit_bytes: int) -> bytes:
    """Bytes as nodes write them, ``0x…``; raises ``MalformedAnswer``, also for more than ``limit_bytes``."""
    if not isinstance(value, str) or not value.startswith("0x") or len(value) > 2 + 2 * limit_bytes:
        raise MalformedAnswer("no bytes")
    try:
        data = bytes.fromhex(value[2:])
    except ValueError:
        raise MalformedAnswer("no bytes") from None
    if 2 + 2 * len(data) != len(value):
        raise MalformedAnswer("no bytes")
    return data


def read_hash(value: Any) -> str:
    """The hash of a block, as it was written; raises ``MalformedAnswer``."""
    if len(read_hex(value, 32)) != 32:
        raise MalformedAnswer("no hash")
    text: str = value
    return text


def read_number(value: Any, most: int) -> int:
    """A number from 0 to ``most``, or the hex text of one; raises ``MalformedAnswer``."""
    if isinstance(value, str) and _HEX_NUMBER.fullmatch(value):
        value = int(value, 16)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise MalformedAnswer("no number")
    return value


def member(value: Any, name: str) -> Any:
    """A member of an object; raises ``MalformedAnswer``."""
    if not isinstance(value, dict) or name not in value:
        raise MalformedAnswer("a member that is missing")
    return value[name]
