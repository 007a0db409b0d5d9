"""The reasons of events are a closed list: what is raised stands in it, and nothing else is written."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmsg.clients.dialer import attempts_json
from dmsg.discovery.errors import DISCOVERY_ERRORS, DiscoveryError, EntryRolledBack
from dmsg.errors import Attempt
from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import EVENTS, Event, describe_event
from dmsg.mux.core.errors import REFUSED_BY_SERVER, SERVER_REFUSALS
from dmsg.mux.core.wire import CloseReason, reason_name
from dmsg.rmb.core.errors import RelayProblem

PACKAGE = Path(__file__).parents[2] / "dmsg"
#: Callable -> the position of the reason among its arguments.
TOLD = {
    "Attempt": 3,
    "MemberDropped": 1,
    "PortDropped": 1,
    "RanksError": 0,
    "RelayListError": 0,
    "RemoteProtocolError": 1,
    "ServerLost": 1,
    "ShippingError": 0,
    "StageError": 1,
    "EnvelopeRefused": 0,
    "TokenRefused": 2,
    "WebSocketViolation": 0,
    "_malformed": 0,
    "note": 2,
    "self._kind.error": 0,
    "self.error": 0,
}
#: Names that a reason is given.
NAMED = {"CLOSED", "_NO_SERVER", "reason", "refusal", "short", "victim"}
#: Functions that return a reason, alone or in a tuple.
RETURNED = {"_connect_reason", "_why", "connects", "handshake", "reason_of", "refusal", "refusal_reason"}


def literals(node: ast.AST) -> Iterator[str]:
    """The texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from literals(one)
            yield from literals(other)
        case ast.Tuple(elts=elements):
            for element in elements:
                yield from literals(element)


def told(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines and reasons of what a module raises, notes, names and returns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            position = TOLD.get(name, TOLD.get(name.rpartition(".")[2]))
            if position is not None and len(node.args) > position:
                yield from ((node.lineno, text) for text in literals(node.args[position]))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id in NAMED for one in targets):
                yield from ((node.lineno, text) for text in literals(node.value))
        elif isinstance(node, ast.FunctionDef) and node.name in RETURNED:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from ((inner.lineno, text) for text in literals(inner.value))


def test_what_is_raised_is_listed() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), line, text)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ("cli", "testing")
        for line, text in told(ast.parse(path.read_text("utf-8")))
    }
    texts = {text for _, _, text in found}
    assert {"does not open", "half_open", "replaced", "no entry", "damaged", "untrusted", "no_space"} <= texts
    assert len(texts) > 50
    assert sorted(one for one in found if Reason.of(one[2]) is Reason.OTHER) == []


def test_reasons_that_go_over_the_wire_are_listed() -> None:
    texts = {reason_name(code) for code in CloseReason} | {reason_name(255)}
    texts |= {error.text for error in (*DISCOVERY_ERRORS.values(), DiscoveryError, EntryRolledBack)}
    texts |= {*SERVER_REFUSALS, REFUSED_BY_SERVER}
    texts |= {f"message {number} does not open" for number in (1, 2, 3)}
    texts |= {problem.text for problem in RelayProblem}
    assert {text for text in texts if Reason.of(text) is Reason.OTHER} == set()


def test_a_reason_is_its_text() -> None:
    for reason in Reason:
        assert reason == reason.value and f"{reason}" == str(reason) == reason.value
        assert json.loads(json.dumps({"reason": reason})) == {"reason": reason.value}
        assert Reason.of(reason.value) is Reason.of(reason) is reason
    assert Reason.of("the disk is on fire") is Reason.OTHER


def made_with(cls: type[Event], reason: object) -> Event:
    return cls(*[reason if column.is_reason else column.type() for column in describe_event(cls).fields])


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_no_other_reason_is_written(name: str) -> None:
    """Types forbid it where events are made; an event that has another reason all the same is written with "other"."""
    cls = EVENTS[name]
    columns = [column.name for column in describe_event(cls).fields]
    assert [column.name for column in describe_event(cls).fields if column.is_reason] == ["reason"] * (
        "reason" in columns
    )
    for reason, written in (
        (Reason.BUSY, "busy"),
        ("busy", "busy"),
        ("\x1b]0;owned", "other"),
        (7, "other"),
        (None, "other"),
    ):
        line = json.loads(Encoder("client", "n", "b").encode(made_with(cls, reason), 0.0))
        assert line.get("reason", written) == written


def test_steps_of_a_dial_have_no_other_reason_in_the_log() -> None:
    steps = [Attempt("connect", "02", 1.0, "timeout"), Attempt("connect", "02", 2.0, "ValueError")]
    assert [step["reason"] for step in json.loads(attempts_json(steps))] == ["timeout", "other"]
