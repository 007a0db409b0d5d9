"""Options, variables, TOML and endpoint strings are views of the same settings: each gives the same object."""

from __future__ import annotations

import json
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.endpoints import clientFromString, quoteStringArgument
from twisted.internet.task import Clock

from dmsg.address import HostPort, PinnedServer
from dmsg.cli.commands import group
from dmsg.crypto.keys import SecretKey
from dmsg.errors import ConfigError
from dmsg.mux.client.settings import ClientSettings
from dmsg.ops.config import assemble, resolve, trace
from dmsg.ops.settings import Setting, settings_of
from dmsg.ops.values import ADDRESS, COUNT, DURATION, FLAG, KEY, KEYS, NUMBER, RELAYS, SIZE, URL, Kind
from dmsg.taps import discovery, server, shipper
from dmsg.taps.tables import SETTINGS


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DMSG_")]:
        monkeypatch.delenv(name)


PEERS = [SecretKey(bytes([number]) * 32).public_key for number in range(1, 5)]
NAMES = st.text("abcxyz0189", min_size=1, max_size=8)
PATHS = NAMES.map(lambda name: Path("/", name, "file"))
ADDRESSES = st.builds(HostPort, NAMES.map(lambda name: f"{name}.example"), st.integers(1, 65535)) | st.just(
    HostPort("2001:db8::1", 80)
)
BY_KIND: dict[str, st.SearchStrategy[Any]] = {
    FLAG.metavar: st.booleans(),
    SIZE.metavar: st.integers(0, 2**40) | st.integers(0, 9).map(lambda count: count << 20),
    DURATION.metavar: st.floats(0.001, 1e9),
    ADDRESS.metavar: ADDRESSES,
    URL.metavar: ADDRESSES.map(lambda address: f"http://{address}"),
    KEY.metavar: st.sampled_from(PEERS),
    KEYS.metavar: st.lists(st.sampled_from(PEERS), unique=True).map(tuple),
    RELAYS.metavar: st.lists(st.builds(PinnedServer, st.sampled_from(PEERS), ADDRESSES), unique=True).map(tuple),
    "FILE": PATHS,
    "DIR": PATHS,
}
TEXTS = {
    "option": st.just("region=eu endpoint_url=http://127.0.0.1:9000"),
    "listen": NAMES.map("tcp:{}".format),
}


def values_of(one: Setting) -> st.SearchStrategy[Any]:
    """Values that the setting may have, in the form that it has in the object."""
    kind: Kind[Any] = one.kind
    if one.name in TEXTS:
        return TEXTS[one.name]
    if kind.metavar == NUMBER.metavar:
        whole = type(one.default) is int or kind.parse is COUNT.parse or one.name == "min_servers"
        return st.integers(1, 900) if whole else st.floats(0.001, 1e6)
    if kind.metavar in BY_KIND:
        return BY_KIND[kind.metavar]
    if "|" in kind.metavar and not kind.metavar.isupper() and "DIR" not in kind.metavar and "FILE" not in kind.metavar:
        return st.sampled_from(kind.metavar.split("|")).map(kind.parse)
    if one.marks.may_be_path:
        return PATHS.map(str)
    return NAMES.filter(lambda text: text != "none")


def some_values(role: str) -> st.SearchStrategy[dict[str, Any]]:
    """Values of some of the settings of a role, by name."""
    known = settings_of(SETTINGS[role])
    required = {one.name: values_of(one) for one in known if one.required}
    optional = {one.name: values_of(one) for one in known if not one.required}
    few = st.lists(st.sampled_from(sorted(optional)), max_size=12, unique=True)
    return few.flatmap(lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in names}))


def texts(role: str, values: dict[str, Any]) -> dict[str, str]:
    return {one.name: one.kind.text(values[one.name]) for one in settings_of(SETTINGS[role]) if one.name in values}


def by_options(role: str, values: dict[str, Any]) -> Any:
    module = {"server": server, "discovery": discovery, "shipper": shipper}[role]
    options = module.Options({})
    arguments = []
    for one in settings_of(SETTINGS[role]):
        if one.name in values and one.marks.flag:
            arguments += [f"--{one.option}"] if values[one.name] else []
        elif one.name in values:
            arguments += [f"--{one.option}", one.kind.text(values[one.name])]
    try:
        options.parseOptions(arguments)
    except SystemExit as refused:
        raise ConfigError("", str(refused)) from None
    return options.settings


def by_environment(role: str, values: dict[str, Any]) -> Any:
    environ = {one.variable: texts(role, values)[one.name] for one in settings_of(SETTINGS[role]) if one.name in values}
    return resolve(SETTINGS[role], role, {}, environ)


def by_file(role: str, values: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "dmsg.toml")
        path.write_text(as_toml(role, values))
        return resolve(SETTINGS[role], role, {"config": str(path)}, {})


def as_toml(role: str, values: dict[str, Any]) -> str:
    lines = []
    for one in settings_of(SETTINGS[role]):
        if one.name in values:
            key = ".".join((role, *one.place))
            lines.append(f"{key} = {native(values[one.name])}\n")
    return "".join(lines)


def native(value: Any) -> str:
    """``value`` as TOML has it."""
    if isinstance(value, tuple):
        return json.dumps([str(one) for one in value]) if value else '"none"'
    return json.dumps(value if isinstance(value, bool | int | float) else getattr(value, "value", str(value)))


def outcome(view: Any, role: str, values: dict[str, Any]) -> Any:
    """The object, or that it is refused: groups and contradictions are judged alike in each view."""
    try:
        return view(role, values)
    except ConfigError:
        return ConfigError


@pytest.mark.parametrize("role", ["server", "discovery", "shipper"])
@settings(max_examples=60)
@given(data=st.data())
def test_each_view_of_a_role_gives_the_same_object(role: str, data: st.DataObject) -> None:
    values = data.draw(some_values(role))
    made = outcome(by_options, role, values)
    assert outcome(by_environment, role, values) == made
    assert outcome(by_file, role, values) == made
    if made is not ConfigError:
        for one in settings_of(SETTINGS[role]):
            if one.name in values:
                found = made
                for name in one.path:
                    found = getattr(found, name)
                assert found == values[one.name]


def by_string(role: str, values: dict[str, Any]) -> Any:
    arguments = [
        f"{one.option}={quoteStringArgument(one.kind.text(values[one.name]))}"
        for one in settings_of(SETTINGS[role])
        if one.name in values
    ]
    endpoint: Any = clientFromString(Clock(), ":".join(["dmsg", str(PEERS[0]), *arguments]))
    return endpoint._source.settings.client


def by_command(role: str, values: dict[str, Any]) -> Any:
    arguments = [
        part
        for one in settings_of(SETTINGS[role])
        if one.name in values
        for part in (f"--{one.option}", one.kind.text(values[one.name]))
    ]
    result = CliRunner().invoke(group, ["config", "show", "--json", *arguments])
    if result.exit_code:
        raise ConfigError("", result.stderr)
    told = {one["setting"]: one["value"] for one in json.loads(result.stdout)["settings"]}
    # what it shows, given again, is what it was given
    given = {one.option: shown(told[one.name]) for one in settings_of(SETTINGS[role]) if one.name in values}
    return resolve(SETTINGS[role], role, given, {})


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


@settings(max_examples=40, deadline=None)
@given(some_values("client"), ADDRESSES)
def test_each_view_of_a_client_gives_the_same_object(values: dict[str, Any], address: HostPort) -> None:
    values = {name: value for name, value in values.items() if name != "key"} | {"discovery": f"http://{address}"}
    made = outcome(by_environment, "client", values)
    for view in (by_file, by_string, by_command):
        assert outcome(view, "client", values) == made
    assert made is ConfigError or isinstance(made, ClientSettings)


@settings(max_examples=40)
@given(some_values("client"), some_values("client"), some_values("client"))
def test_an_option_wins_over_a_variable_and_that_over_the_file(
    options: dict[str, Any], variables: dict[str, Any], file: dict[str, Any]
) -> None:
    cls, known = ClientSettings, {one.name: one for one in settings_of(ClientSettings)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "dmsg.toml")
        path.write_text(as_toml("client", file))
        given_options = {known[name].option: text for name, text in texts("client", options).items()}
        environ = {known[name].variable: text for name, text in texts("client", variables).items()}
        values = trace(cls, "client", {"config": str(path), **given_options}, environ)
    for one in values:
        name = one.setting.name
        kinds = [("option", options), ("environment", variables), ("file", file)]
        origin, source = next(((kind, found) for kind, found in kinds if name in found), ("default", None))
        assert one.origin.kind == origin
        assert one.value == (one.setting.default if source is None else source[name])
    try:
        assert isinstance(assemble(cls, "client", values), cls)
    except ConfigError as error:
        groups = {one.place[0] for one in known.values()}
        assert error.option in {"client", *known} or error.option.split(".")[0] in groups


def test_every_kind_of_value_is_read_again_as_it_was_written() -> None:
    """The defaults are values, too."""
    for cls in SETTINGS.values():
        for one in settings_of(cls):
            if not one.required and one.default not in ("", None):
                default = one.default.value if isinstance(one.default, Enum) else one.default
                read = one.kind.parse(one.kind.text(one.default))
                assert (read.value if isinstance(read, Enum) else read) == default
