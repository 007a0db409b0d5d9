"""Parts of the documentation that are made from the code: each function gives reStructuredText.

No Sphinx here: the tests call these functions as they are. :mod:`dmsg_docs` puts what they give into pages.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_type_hints

from dmsg.ops.settings import Setting, describe_default, settings_of
from dmsg.ops.values import has_kind

ROOT: Final = Path(__file__).parents[2]
BENCHMARKS: Final = ROOT / "docs" / "benchmarks.txt"
SOAK: Final = ROOT / "docs" / "soak.txt"


# --- reStructuredText ------------------------------------------------------------------------------------------------


def list_table(header: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int] = ()) -> str:
    """A list-table; cells may have several lines."""
    lines = [".. list-table::", "   :header-rows: 1"]
    if widths:
        lines.append(f"   :widths: {' '.join(map(str, widths))}")
    lines.append("")
    for row in (header, *rows):
        for position, cell in enumerate(row):
            first, *rest = cell.splitlines() or [""]
            lines.append(f"   {'*' if position == 0 else ' '} - {first}".rstrip())
            lines += [f"       {line}".rstrip() for line in rest]
    return "\n".join([*lines, ""])


def literal(text: object) -> str:
    """``text`` as it is written in code."""
    return f"``{text}``"


def sentence(text: str) -> str:
    """``text`` as a sentence on one line."""
    text = " ".join(text.split())
    first = text.partition(" ")[0]
    if first.isalpha() and first.islower():
        text = text[0].upper() + text[1:]
    return text if not text or text[-1] in ".!?:" else f"{text}."


def summary(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return sentence(inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0])


def number(name: str, value: Any) -> str:
    """The default of a field as people read it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if "bytes" in name and isinstance(value, int):
        for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value and value % size == 0:
                return f"{value // size:,} {unit}"
    return f"{value:,.10g}"


# --- the wire --------------------------------------------------------------------------------------------------------

_SIZES: Final = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def frame_summary() -> str:
    """One row for each frame."""
    from dmsg.mux.core.wire import FRAMES

    rows = []
    for frame in FRAMES:
        names = " ‖ ".join(f"{name} ({size or 'rest'})" for name, size in frame.fields) or "empty"
        rows.append((literal(f"{frame.kind:#04x}"), f"**{frame.kind.name}**", names, frame.sender, frame.meaning))
    return list_table(("type", "name", "payload (bytes)", "sent by", "meaning"), rows, (8, 12, 36, 16, 38))


def frame_bytes() -> str:
    """The bytes of each frame, header and payload."""
    from dmsg.mux.core.wire import FRAMES, HEADER_BYTES

    parts = []
    for frame in FRAMES:
        size = sum(size for _, size in frame.fields)
        fixed = all(size for _, size in frame.fields)
        rows = [
            ("0", "1", "type", literal(f"{frame.kind:#04x}")),
            ("1", "2", "transport id", "0" if frame.kind.name == "OK" else "u16"),
            ("3", "2", "payload size", str(size) if fixed else "u16"),
        ]
        offset = HEADER_BYTES
        for name, width in frame.fields:
            kind = "to the end of the payload" if not width else _SIZES.get(width, f"{width} bytes")
            rows.append((str(offset), str(width or "…"), name, kind))
            offset += width
        title = f"**{frame.kind.name}**: {frame.meaning}. Sent by {frame.sender}."
        parts += [title, "", list_table(("offset", "bytes", "field", "value"), rows, (12, 12, 30, 46))]
    return "\n".join(parts)


def messaging_frames() -> str:
    """One row for each frame of messaging."""
    from dmsg.messaging.core.wire import FRAMES

    rows = []
    for frame in FRAMES:
        names = " ‖ ".join(f"{name} ({size or 'rest'})" for name, size in frame.fields) or "empty"
        rows.append((literal(f"{frame.kind:#04x}"), f"**{frame.kind.name}**", names, frame.meaning))
    return list_table(("type", "name", "payload (bytes)", "meaning"), rows, (8, 20, 36, 36))


def close_codes() -> str:
    """CLOSE codes and the exceptions they become."""
    from dmsg.mux.core.errors import CLOSE_ERRORS

    rows = [("0", literal("normal"), literal("ConnectionDone"), "An orderly end.")]
    for code, cls in sorted(CLOSE_ERRORS.items()):
        rows.append((str(code), literal(cls.name), literal(cls.__name__), summary(cls)))
    return list_table(("code", "name", "exception", "meaning"), rows, (8, 22, 22, 48))


def channel_ends() -> str:
    """Why channels of messaging end, and the exceptions that become of it."""
    from dmsg.messaging.core.errors import END_ERRORS

    rows = [("``normal``, ``closed by peer``", literal("ConnectionDone"), "An orderly end.")]
    rows += [(literal(reason.value), literal(cls.__name__), summary(cls)) for reason, cls in END_ERRORS.items()]
    return list_table(("reason", "exception", "meaning"), rows, (27, 25, 48))


def tlvs() -> str:
    """TLV types and their numbers."""
    from dmsg.mux.core.tlv import Tlv

    return list_table(("type", "name"), [(str(int(one)), literal(one.name.lower())) for one in Tlv])


# --- states ----------------------------------------------------------------------------------------------------------


def state_table(transitions: Mapping[Enum, Iterable[Enum]], meanings: Mapping[str, str]) -> str:
    """Each state, what it means, where it may go."""
    order = list(transitions)
    rows = []
    for state, targets in transitions.items():
        following = sorted(targets, key=order.index)
        names = ", ".join(literal(one.name) for one in following) or "nowhere: the end"
        rows.append((literal(state.name), meanings.get(state.name, ""), names))
    return list_table(("state", "meaning", "may go to"), rows, (20, 45, 35))


def state_diagram(transitions: Mapping[Enum, Iterable[Enum]]) -> str:
    """The same as a drawing: states from top to bottom, ways down on the right, ways up on the left."""
    order = list(transitions)
    width, height, gap, left = 130, 30, 52, 150
    right = 460
    ys = {state: 12 + position * gap for position, state in enumerate(order)}
    shapes = []
    for state, targets in transitions.items():
        for target in targets:
            down = order.index(target) > order.index(state)
            span = abs(order.index(target) - order.index(state))
            x = left + width if down else left
            bend = (18 + 30 * span) * (1 if down else -1)
            right = max(right, x + bend)
            start, end = ys[state] + height * (0.65 if down else 0.35), ys[target] + height * (0.35 if down else 0.65)
            way = f"M{x},{start:g} C{x + bend},{start:g} {x + bend},{end:g} {x + (4 if down else -4)},{end:g}"
            shapes.append(f'<path d="{way}" fill="none" stroke="#678" marker-end="url(#dmsg-arrow)"/>')
    for state, y in ys.items():
        shapes.append(f'<rect x="{left}" y="{y}" width="{width}" height="{height}" rx="6" fill="#eef" stroke="#446"/>')
        shapes.append(
            f'<text x="{left + width / 2:g}" y="{y + 20}" text-anchor="middle" '
            f'font-family="monospace" font-size="13">{state.name}</text>'
        )
    arrow = (
        '<defs><marker id="dmsg-arrow" markerWidth="9" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L9,4 L0,8 z" fill="#678"/></marker></defs>'
    )
    total = 24 + len(order) * gap
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {total}" width="{right}">{arrow}'
    body = "".join(shapes)
    return f".. raw:: html\n\n   {drawing}{body}</svg>\n"


def stream_states() -> str:
    """The states of a stream, drawn and listed."""
    from dmsg.mux.core import stream

    return _states(stream.StreamState, stream.TRANSITIONS)


def transport_states() -> str:
    """The states of a transport as the application sees it, drawn and listed."""
    from dmsg.glue import transport_state

    return _states(transport_state.TransportState, transport_state.TRANSITIONS)


def path_states() -> str:
    """The states of the path of a mux transport, drawn and listed."""
    from dmsg.mux.client import transport

    return _states(transport.PathState, transport.PATH_TRANSITIONS)


def leg_states() -> str:
    """The states of a transport as the relay keeps them, drawn and listed."""
    from dmsg.serving import member

    return _states(member.LegState, member.TRANSITIONS)


def channel_states() -> str:
    """The states of a channel of messaging at a client, drawn and listed."""
    from dmsg.messaging.core import channel

    return _states(channel.ChannelState, channel.TRANSITIONS)


def _states(cls: type, transitions: Mapping[Enum, Iterable[Enum]]) -> str:
    return f"{state_diagram(transitions)}\n{state_table(transitions, trailing_comments(cls))}"


def trailing_comments(cls: type) -> dict[str, str]:
    """Member -> the comment behind it in the source of an enumeration."""
    found = re.findall(r"^    ([A-Z_]+) = [^#\n]*(?:#\s*(.*))?$", inspect.getsource(cls), re.MULTILINE)
    return {name: sentence(comment) for name, comment in found}


# --- limits and settings ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FieldGroup:
    """Fields of a dataclass that one ``#:`` comment speaks of."""

    comment: str
    names: tuple[str, ...]


def field_groups(cls: type) -> tuple[FieldGroup, ...]:
    """The fields of a dataclass of limits, each with the comment above it (or above its neighbours before it).

    Those it inherits come first; one that it declares again has the later comment.
    """
    known = {each.name for each in dataclasses.fields(cls)}
    inherited = [group for base in cls.__bases__ if dataclasses.is_dataclass(base) for group in field_groups(base)]
    groups: list[tuple[list[str], list[str]]] = []
    comment: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            comment.append(text[2:].strip())
            continue
        match = re.match(r"([a-z_0-9]+)\s*:", text)
        if match and match[1] in known and line.startswith("    ") and not line.startswith("     "):
            if comment or not groups:
                groups.append((comment, []))
                comment = []
            groups[-1][1].append(match[1])
    own = {tuple(names): FieldGroup(sentence(" ".join(words)), tuple(names)) for words, names in groups}
    old = {name for group in inherited for name in group.names}
    again = [own.pop(group.names, group) for group in inherited]
    new = [FieldGroup(group.comment, tuple(name for name in group.names if name not in old)) for group in own.values()]
    result = (*again, *(group for group in new if group.names))
    if [name for group in result for name in group.names] != [each.name for each in dataclasses.fields(cls)]:
        raise ValueError(f"{cls.__name__}: the source does not show every field")
    return result


def defaults(cls: type) -> dict[str, Any]:
    """Field -> default."""
    return {
        each.name: each.default if each.default is not dataclasses.MISSING else each.default_factory()  # type: ignore[misc]
        for each in dataclasses.fields(cls)
    }


def limits_of(cls: type) -> str:
    """A table of the fields of a dataclass of limits; what is a dataclass itself is left out."""
    values = defaults(cls)
    rows = []
    for group in field_groups(cls):
        names = [name for name in group.names if not dataclasses.is_dataclass(values[name])]
        if names:
            lines = "\n".join(f"| {literal(name)}" for name in names)
            amounts = "\n".join(f"| {number(name, values[name])}" for name in names)
            rows.append((lines, amounts, group.comment or sentence(names[0].replace("_", " "))))
    return list_table(("field", "default", "what it bounds"), rows, (30, 25, 45))


def limits(name: str) -> str:
    """The limits called ``name``: one of :data:`LIMITS`."""
    return limits_of(LIMITS[name]())


def _client_part(field: str) -> Callable[[], type]:
    def find() -> type:
        from dmsg.mux.client.service import ClientConfig

        return get_type_hints(ClientConfig)[field]  # type: ignore[no-any-return]

    return find


def _caller_limits() -> type:
    from dmsg.discovery.lookups import CallerLimits

    return CallerLimits


def _relay_limits() -> type:
    from dmsg.mux.relay.limits import RelayLimits

    return RelayLimits


def _messaging_relay_limits() -> type:
    from dmsg.messaging.relay.limits import RelayLimits

    return RelayLimits


def _twin_cache_limits() -> type:
    from dmsg.rmb.twins.cache import CacheLimits

    return CacheLimits


def _block_config() -> type:
    from dmsg.rmb.twins.blocks import BlockConfig

    return BlockConfig


def _rmb_relay_limits() -> type:
    from dmsg.rmb.relay.limits import RelayLimits

    return RelayLimits


def _queue_limits() -> type:
    from dmsg.rmb.relay.stores.base import QueueLimits

    return QueueLimits


def _federation_limits() -> type:
    from dmsg.rmb.relay.federation import FederationLimits

    return FederationLimits


def _messaging_connection_config() -> type:
    from dmsg.messaging.core.limits import ConnectionConfig

    return ConnectionConfig


def _rmb_config() -> type:
    from dmsg.rmb.client.config import RmbConfig

    return RmbConfig


def _client_config() -> type:
    from dmsg.mux.client.service import ClientConfig

    return ClientConfig


def _discovery_limits() -> type:
    from dmsg.discovery.limits import DiscoveryLimits

    return DiscoveryLimits


def _proof_limits() -> type:
    from dmsg.discovery.proofs.limits import ProofLimits

    return ProofLimits


def _store_limits() -> type:
    from dmsg.discovery.stores.rules import StoreLimits

    return StoreLimits


def _race_config() -> type:
    from dmsg.relays.race import RaceConfig

    return RaceConfig


#: Name -> the class, found when it is asked for.
LIMITS: Final[dict[str, Callable[[], type]]] = {
    "RelayLimits": _relay_limits,
    "CacheLimits": _twin_cache_limits,
    "BlockConfig": _block_config,
    "MessagingRelayLimits": _messaging_relay_limits,
    "RmbRelayLimits": _rmb_relay_limits,
    "QueueLimits": _queue_limits,
    "FederationLimits": _federation_limits,
    "RmbConfig": _rmb_config,
    "ClientConfig": _client_config,
    "ConnectionConfig": _client_part("connection"),
    "MessagingConnectionConfig": _messaging_connection_config,
    "PoolConfig": _client_part("pool"),
    "RaceConfig": _race_config,
    "DialConfig": _client_part("dial"),
    "CallerLimits": _caller_limits,
    "ListenerLimits": _client_part("listener"),
    "ScoreConfig": _client_part("scores"),
    "DiscoveryLimits": _discovery_limits,
    "StoreLimits": _store_limits,
    "ProofLimits": _proof_limits,
}


def settings(role: str) -> str:
    """What can be set for a role: a key of ``SETTINGS``."""
    from dmsg.taps.tables import SETTINGS

    cls = SETTINGS[role]
    comments = dict(_comments(cls, ()))
    rows = [_setting(one, role, comments.get(one.path, "")) for one in settings_of(cls)]
    names = "option, variable, TOML" if role not in ("client", "messaging") else "option or argument, variable, TOML"
    return list_table((names, "default", "meaning"), rows, (45, 15, 40))


def _comments(cls: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The comment of each field of the groups in ``cls``, by the path of the field."""
    hints = get_type_hints(cls)
    if path:
        for group in field_groups(cls):
            for name in group.names:
                yield (*path, name), group.comment
    for each in dataclasses.fields(cls):
        if not has_kind(hints[each.name]):
            yield from _comments(hints[each.name], (*path, each.name))


def _setting(one: Setting, role: str, comment: str) -> tuple[str, str, str]:
    table = ".".join((role, *one.place[:-1]))
    names = f"| ``--{one.option}``\n| ``{one.variable}``\n| ``[{table}] {one.place[-1]}``"
    return names, one.marks.unset or literal(describe_default(one)), comment or sentence(one.marks.help)


# --- events, metrics, errors, exit codes -----------------------------------------------------------------------------


def events() -> str:
    """Every event of the log."""
    from dmsg.eventlog import schema as ev

    parts = ["Every line", "^^^^^^^^^^", "", _columns(ev.ENVELOPE)]
    for event in ev.describe():
        title = literal(event.name)
        parts += [
            "",
            title,
            "^" * len(title),
            "",
            f"{event.meaning} (version {event.version})",
            "",
            _columns(event.fields),
        ]
    return "\n".join(parts)


def reasons() -> str:
    """The texts that may stand under ``reason``."""
    from dmsg.eventlog.reasons import Reason

    return ", ".join(literal(reason.value) for reason in sorted(Reason) if reason) + ".\n"


def _columns(fields: Iterable[Any]) -> str:
    rows = [(literal(one.name), literal(one.type.__name__), sentence(one.meaning)) for one in fields]
    return list_table(("column", "type", "meaning"), rows, (25, 12, 63))


def metrics() -> str:
    """Every metric that is counted from events."""
    from dmsg.eventlog.log import NullEventLog
    from dmsg.ops.metrics import CollectorRegistry, MetricsEventLog

    registry = CollectorRegistry()
    MetricsEventLog(NullEventLog(), registry)
    found = sorted(registry.collect(), key=lambda metric: metric.name)
    rows = [
        (literal(one.name + ("_total" if one.type == "counter" else "")), one.type, sentence(one.documentation))
        for one in found
    ]
    return list_table(("metric", "type", "meaning"), rows, (45, 12, 43))


def discovery_errors() -> str:
    """What discovery answers, by text and status."""
    from dmsg.discovery.errors import DISCOVERY_ERRORS, StoreFull

    classes = {**DISCOVERY_ERRORS, StoreFull.text: StoreFull}
    rows = [
        (literal(cls.text), str(cls.status), str(cls.reference_status), literal(cls.__name__))
        for cls in classes.values()
    ]
    header = ("text", "``/discovery/…``", "the others", "exception")
    return list_table(header, rows, (50, 14, 12, 24))


def error_modules() -> list[ModuleType]:
    """The modules that hold exceptions: the base classes first, then by slice."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "dmsg").rglob("errors.py")}
    return [importlib.import_module(name) for name in sorted(names, key=lambda name: (name.count("."), name))]


def own_errors(module: ModuleType) -> dict[str, type[Exception]]:
    """The exceptions that ``module`` declares, in that order."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    }


def error_classes() -> str:
    """Every exception, module by module, but those of the CLOSE codes, which have a table of their own."""
    from dmsg.mux.core.errors import CLOSE_ERRORS

    parts = []
    for module in error_modules():
        parts += [f"{literal(module.__name__)}: {summary(module).removesuffix(' Pure.')}", ""]
        rows = [
            (literal(name), literal(cls.__bases__[0].__name__), summary(cls))
            for name, cls in own_errors(module).items()
            if cls not in CLOSE_ERRORS.values()
        ]
        parts += [list_table(("exception", "is a", "when"), rows, (27, 23, 50)), ""]
    return "\n".join(parts)


def exit_codes() -> str:
    """What the command exits with."""
    from dmsg.cli.exits import MEANINGS

    return list_table(("code", "meaning"), [(literal(int(one)), text) for one, text in MEANINGS.items()], (15, 85))


def interfaces() -> str:
    """The seams of :mod:`dmsg.interfaces`, and of the message bus."""
    from zope.interface.interface import InterfaceClass, Method

    from dmsg import interfaces as seams
    from dmsg.rmb import interfaces as rmb_seams

    parts = []
    for module in (seams, rmb_seams):
        for name, interface in vars(module).items():
            if not isinstance(interface, InterfaceClass) or interface.__module__ != module.__name__:
                continue
            docstring = _indent(inspect.cleandoc(interface.__doc__), 3)
            parts += [f".. py:class:: {module.__name__}.{name}", "", docstring, ""]
            for member, what in interface.namesAndDescriptions():
                if isinstance(what, Method):
                    head = f"   .. py:method:: {member}{what.getSignatureString()}"
                else:
                    head = f"   .. py:attribute:: {member}"
                parts += [head, "", _indent(inspect.cleandoc(what.__doc__), 6), ""]
    return "\n".join(parts)


def _indent(text: str, by: int) -> str:
    return "\n".join(" " * by + line if line else "" for line in text.splitlines())


# --- files -----------------------------------------------------------------------------------------------------------


def benchmarks() -> str:
    """The table that ``python -m benchmarks`` printed, as it was kept."""
    return _kept(BENCHMARKS, "bench")


def soak() -> str:
    """The table that ``python -m benchmarks.soak`` wrote, as it was kept."""
    return _kept(SOAK, "soak")


def _kept(path: Path, target: str) -> str:
    if not path.exists():
        return f".. note::\n\n   No figures are kept in ``docs/{path.name}`` yet: ``make {target}`` makes them.\n"
    return f"::\n\n{_indent(path.read_text(), 3)}\n"


#: Name in the documentation -> function; names after it are its arguments.
GENERATORS: Final[dict[str, Callable[..., str]]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        frame_summary,
        frame_bytes,
        messaging_frames,
        close_codes,
        channel_ends,
        tlvs,
        stream_states,
        transport_states,
        path_states,
        leg_states,
        channel_states,
        limits,
        settings,
        events,
        reasons,
        metrics,
        discovery_errors,
        error_classes,
        exit_codes,
        interfaces,
        benchmarks,
        soak,
    )
}


# --- names of tests --------------------------------------------------------------------------------------------------


def test_exists(name: str) -> bool:
    """Whether ``path::function``, below ``tests/``, is a test."""
    path, _, function = name.partition("::")
    file = ROOT / "tests" / path
    if not function or not file.is_file():
        return False
    return re.search(rf"^\s*(?:async )?def {re.escape(function)}\(", file.read_text(), re.MULTILINE) is not None
