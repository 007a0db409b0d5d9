"""What pages name is there: options, variables, settings in TOML, metrics, and the columns of the line that is shown."""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import tables
from twisted.python import usage
from twisted.scripts.twistd import ServerOptions

from dmsg.cli.commands import group as dmsg
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.proofs.prover import RESULTS
from dmsg.eventlog import schema as ev
from dmsg.eventlog.names import LogFileName
from dmsg.ops.config import trace
from dmsg.taps import discovery, messaging_server, rmb_peer, rmb_relay, server, shipper
from dmsg.taps.tables import SETTINGS, known_variables

from .conftest import DOCS, ROOT

FILES = (*sorted(DOCS.rglob("*.rst")), ROOT / "README.rst")
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in FILES if "_build" not in page.parts}
ROLES: dict[str, type[usage.Options]] = {
    one.Options.tap_name: one.Options for one in (discovery, messaging_server, rmb_peer, rmb_relay, server, shipper)
}
KEY = str(SecretKey(b"\x11" * 32).public_key)
#: Options of programs that are not ours.
FOREIGN = {"--py-files", "--checkpoint-action"}
#: Those of the log pipeline, which need not be installed.
DMSG_LOGS = set(re.findall(r'"(--[a-z-]+)"', (ROOT / "spark" / "dmsg_logs" / "__main__.py").read_text()))

# --- options ---------------------------------------------------------------------------------------------------------


@functools.cache
def options_of(command: click.Command) -> set[str]:
    """All names of the options of ``command``."""
    return {name for one in command.params if isinstance(one, click.Option) for name in one.opts} | {"--help"}


def commands(command: click.Command) -> Iterator[click.Command]:
    """``command`` and all below it."""
    yield command
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from commands(found)


@functools.cache
def options_of_role(options: type[usage.Options]) -> set[str]:
    """The names of the options of a program that Twisted parses."""
    made = options()  # type: ignore[no-untyped-call]
    return {f"--{name.rstrip('=')}" for name in made.longOpt} | {f"-{name}" for name in made.shortOpt.replace(":", "")}


TWISTD = options_of_role(ServerOptions)
EVERY = TWISTD | DMSG_LOGS | FOREIGN
EVERY |= {name for one in ROLES.values() for name in options_of_role(one)}
EVERY |= {name for one in commands(dmsg) for name in options_of(one)}


_LINE = re.compile(
    r"\s+(?:ExecStart=|\w*[$#] )?(?:[A-Z_]+=\S+ )*(?:/opt/dmsg/bin/|python -m )?((?:dmsg|twistd|dmsg_logs) .*)"
)


def lines_of(text: str) -> Iterator[str]:
    """The lines of code in a page that call one of our programs, continued lines joined, from its name on."""
    for line in re.sub(r"\\\n\s+", "", text).splitlines():
        match = _LINE.match(line)
        if match:
            yield match[1]


#: Programs of Twisted, whose options are its own affair.
_OF_TWISTED = ("mail", "manhole", "web", "words")


def unknown_options(line: str) -> set[str]:
    """The options in ``line`` that its program does not have."""
    program, *words = [word.partition("=")[0] for word in re.sub(r"\s#\s.*", "", line).split()]
    given = {word for word in words if re.match(r"--?[a-z]", word)}
    if program == "twistd":
        at = next((at for at, word in enumerate(words) if word in ROLES or word in _OF_TWISTED), len(words))
        before = given.intersection(words[:at])
        behind = given.intersection(words[at:] if words[at:] and words[at] in ROLES else ())
        return before - TWISTD | behind - (options_of_role(ROLES[words[at]]) if behind else set())
    if program == "dmsg_logs":
        return given - DMSG_LOGS
    command: click.Command = dmsg
    while isinstance(command, click.Group):
        with click.Context(command) as context:
            # "config show" shows the settings of clients unless a role is named
            found = command.get_command(context, words.pop(0)) if words else None
            found = found or (command.get_command(context, "client") if command.name == "show" else None)
        if found is None:
            return given - {"--help"}
        command = found
    return given - options_of(command)


def test_commands_that_are_shown_have_the_options() -> None:
    lines = [(page, line) for page, text in PAGES.items() for line in lines_of(text)]
    assert len(lines) > 70
    assert [(page, line, unknown) for page, line in lines if (unknown := unknown_options(line))] == []


def test_wrong_options_are_noticed() -> None:
    assert unknown_options("dmsg ping 02ab… --count 3 --cuont 3") == {"--cuont"}
    assert unknown_options("dmsg rmb call 7 add --data x --exec y") == {"--exec"}
    assert unknown_options("twistd -n --pidfile= dmsg-server --key k --pidfile=") == {"--pidfile"}
    assert unknown_options("dmsg_logs run --landing x --tabels y") == {"--tabels"}


def test_options_in_sentences_exist() -> None:
    named = {(page, one) for page, text in PAGES.items() for one in re.findall(r"``(--[a-z][a-z0-9-]*)", text)}
    assert len(named) > 100
    # "--ranker_period" is what a description says
    assert {one for one in named if one[1] not in EVERY} == {("docs/explanation/rmb-differences.rst", "--ranker")}


# --- variables and settings ------------------------------------------------------------------------------------------


def test_variables_exist() -> None:
    named = {(page, one) for page, text in PAGES.items() for one in re.findall(r"\bDMSG_[A-Z][A-Z_0-9]+", text)}
    assert len(named) > 20
    assert {one for one in named if one[1] not in known_variables()} == set()


def toml_blocks(text: str) -> list[str]:
    """The blocks of TOML in a page, with keys that can be read."""
    found = re.findall(r"^\.\. code-block:: toml\n(?:   :.*\n)*\n((?:(?:   .*)?\n)+)", text, re.MULTILINE)
    return [re.sub(r'"0[23][0-9a-f]{2}…', f'"{KEY}', textwrap.dedent(body)) for body in found]


def test_settings_in_toml_are_settings(tmp_path: Path) -> None:
    blocks = [block for text in PAGES.values() for block in toml_blocks(text)]
    assert len(blocks) > 8
    file = tmp_path / "dmsg.toml"
    for block in blocks:
        file.write_text(block)
        tables_of_block = set(re.findall(r"^\[([a-z-]+)", block, re.MULTILINE))
        assert tables_of_block <= set(SETTINGS)
        for role in tables_of_block:
            values = trace(SETTINGS[role], role, {"config": str(file)}, {}, roles=SETTINGS)
            assert any(one.origin.kind == "file" for one in values)


# --- metrics and events ----------------------------------------------------------------------------------------------

#: Functions that give levels, and what their names begin with as metrics.
LEVELS = {
    ("serving/service.py", "stats"): "dmsg_server_",
    ("rmb/relay/service.py", "stats"): "dmsg_server_",
    ("taps/rmb_relay.py", "gauges"): "dmsg_server_",
    ("rmb/relay/service.py", "public_stats"): "",
    ("rmb/twins/chain.py", "public_stats"): "",
    ("rmb/peer/gateway.py", "stats"): "dmsg_client_",
    ("taps/discovery.py", "gauges"): "dmsg_discovery_",
    ("discovery/proofs/prover.py", "stats"): "dmsg_discovery_",
    ("shipping/shipper.py", "gauges"): "dmsg_shipper_",
}


def levels() -> set[str]:
    """The names of all levels, from the functions that give them."""
    names = {f"dmsg_discovery_proofs_{result}" for result in RESULTS}
    used = set()
    for path in sorted((ROOT / "dmsg").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name not in ("stats", "gauges", "public_stats"):
                continue
            keys = [key for one in ast.walk(node) if isinstance(one, ast.Dict) for key in one.keys]
            keys += [one.slice for one in ast.walk(node) if isinstance(one, ast.Subscript)]
            found = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if found:
                where = str(path.relative_to(ROOT / "dmsg")), node.name
                used.add(where)
                names |= {LEVELS[where] + name for name in found}
    assert used == set(LEVELS)
    return names


def counted() -> set[str]:
    """The names of all metrics that the reference has a generated row for."""
    return set(re.findall(r"``(dmsg_\w+)``", tables.metrics()))


def test_the_reference_has_every_level() -> None:
    page = PAGES["docs/reference/events.rst"]
    assert {name for name in levels() if f"``{name}``" not in page} == set()


def test_metrics_exist() -> None:
    found = [(page, one) for page, text in PAGES.items() for one in re.findall(r"\bdmsg_(?:[a-z]+_)+[a-z]+\b", text)]
    known = levels() | counted()
    assert len(found) > 40
    assert {one for one in found if one[1] not in known and not one[1].startswith("dmsg_logs")} == set()


def test_the_line_of_a_log_that_is_shown_has_the_columns() -> None:
    page = PAGES["docs/howto/observe.rst"]
    line = json.loads(re.sub(r"\n\s+", "", page[page.index('{"event":"transport_closed"') :].partition("\n\n")[0]))
    (event,) = [one for one in ev.describe() if one.name == line["event"]]
    assert list(line) == [one.name for one in (*ev.ENVELOPE, *event.fields)]
    assert line["v"] == event.version
    (name,) = re.findall(r"hour=\d\d/(\S+)", page)
    assert LogFileName.parse(name) is not None


def test_events_and_reasons_in_questions_exist() -> None:
    page = PAGES["docs/howto/observe.rst"]
    names = {one.name: {column.name for column in one.fields} for one in ev.describe()}
    asked = re.findall(r'select\(\.event == "(\w+)"[^)]*\)(.*)', page)
    assert len(asked) >= 5
    for event, rest in asked:
        assert set(re.findall(r"\.([a-z_]+)\b", rest)) <= names[event], event
