"""``--protocol``: whose settings a command takes, what it refuses, and what it speaks."""

from __future__ import annotations

import json

import pytest
import pytest_twisted
from click.testing import CliRunner

from dmsg.cli.commands import group
from dmsg.cli.exits import CommandError, Exit, describe, exit_code
from dmsg.cli.lookup import list_servers
from dmsg.cli.ping import run_echo, run_ping
from dmsg.cli.protocols import PROTOCOLS
from dmsg.cli.settings import client_settings
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import ConfigError, DialError
from dmsg.messaging.client.config import MessagingConfig
from dmsg.messaging.client.settings import MessagingSettings
from dmsg.mux.client.settings import ClientSettings
from dmsg.ops.settings import settings_of

PEER = str(SecretKey.generate().public_key)
COMMANDS = {
    "echo": ("echo",),
    "ping": ("ping", PEER),
    "send": ("send", PEER, "file"),
    "receive": ("receive", "."),
    "expose": ("expose", "tcp:127.0.0.1:1"),
    "forward": ("forward", PEER, "tcp:0"),
    "servers": ("servers",),
    "entry": ("entry", PEER),
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("protocol", "option", "value"),
    [
        ("messaging", "--security", "e2e"),
        ("messaging", "--resume-grace-s", "5"),
        ("dmsg", "--dialect", "v5"),
        ("dmsg", "--layout", "seed"),
    ],
)
def test_an_option_of_another_protocol_is_a_usage_error(arguments, protocol, option, value):
    result = CliRunner().invoke(group, [*arguments, "--protocol", protocol, option, value, "--json"])
    assert result.exit_code == Exit.USAGE
    told = json.loads(result.stderr)
    name = option.removeprefix("--")
    assert told["error"] == "ConfigError"
    assert told["message"] == f"{name}: is no setting of the {protocol} protocol (in option {option})"


@pytest.mark.parametrize("command", ["echo", "ping", "send", "receive", "expose", "forward"])
def test_a_service_is_a_usage_error_where_a_key_listens_for_one_thing(command):
    arguments = [*COMMANDS[command], "--protocol", "messaging", "--service", "web", "--json"]
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == Exit.USAGE
    assert "a key listens for one thing" in json.loads(result.stderr)["message"]


def test_settings_come_from_the_table_the_variables_and_the_options_of_the_protocol(tmp_path, monkeypatch):
    file = tmp_path / "dmsg.toml"
    file.write_text(
        '[client]\ndiscovery = "http://one:1"\nsecurity = "hop"\n\n[messaging]\ndiscovery = "http://two:2"\n'
        'dialect = "v3"\nlayout = "seed"\n[messaging.dial]\ntimeout_s = 3\n'
    )
    monkeypatch.setenv("DMSG_SECURITY", "e2e")
    monkeypatch.setenv("DMSG_LAYOUT", "go")
    given = {"config": str(file)}
    messaging = client_settings({**given, "dialect": "v5"}, "messaging")
    assert isinstance(messaging, MessagingSettings)
    assert (messaging.discovery, messaging.config.dial.timeout_s) == ("http://two:2", 3.0)
    assert (messaging.config.dialect.name, messaging.config.layout.name) == ("v5", "go")
    client = client_settings(given)
    assert isinstance(client, ClientSettings)
    assert (client.discovery, client.security.value) == ("http://one:1", "e2e")


@pytest.mark.parametrize(("name", "value"), [("dialect", "v1"), ("layout", "rust")])
def test_what_the_protocol_does_not_know_is_a_usage_error(name, value):
    with pytest.raises(ConfigError, match="must be one of"):
        client_settings({name: value}, "messaging")


@pytest.mark.parametrize(("bench", "table"), [(None, "client"), ("messaging", "messaging")], indirect=["bench"])
@pytest.mark.parametrize(
    ("run", "needs"),
    [
        (run_echo, "--discovery URL or --server PK@HOST:PORT (or DMSG_DISCOVERY, DMSG_SERVER, or [{}] in --config)"),
        (list_servers, "--discovery URL (or DMSG_DISCOVERY, or [{}] in --config)"),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_command_without_a_network_says_where_it_may_be_named(bench, table, run, needs):
    await bench.network.stop_relay(bench.relays[0])  # so that the bench pins none
    with pytest.raises(CommandError) as caught:
        await bench.run(run)
    assert str(caught.value) == f"give {needs.format(table)}"
    assert caught.value.exit is Exit.USAGE


def test_options_that_several_protocols_have_are_written_alike():
    known = [{one.option: one for one in settings_of(each.settings)} for each in PROTOCOLS.values()]
    for name in known[0].keys() & known[1].keys():
        one, other = known[0][name], known[1][name]
        assert (one.kind.metavar, one.kind.many, one.marks.flag) == (
            other.kind.metavar,
            other.kind.many,
            other.marks.flag,
        )


def test_the_help_says_which_options_one_protocol_alone_has():
    told = " ".join(CliRunner().invoke(group, ["echo", "--help"]).stdout.split())
    for option, protocol in (("--security", "dmsg"), ("--dialect", "messaging"), ("--layout", "messaging")):
        about = told[told.index(f"{option} ") :].partition(" --")[0]
        assert f"({protocol} only)" in about
    assert "only)" not in told[told.index("--key ") :].partition(" --")[0]


def config(dialect, layout="go"):
    return MessagingConfig(dialect_name=dialect, layout_name=layout)


@pytest.mark.parametrize("bench", ["messaging"], indirect=True)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (config("v2"), config("v2")),
        (config("v5", "seed"), config("v5")),
        (config("v5"), config("v5", "seed")),
        (config("seed", "seed"), config("seed")),
    ],
)
@pytest_twisted.ensureDeferred
async def test_both_ends_of_one_dialect_talk_whatever_their_layouts(bench, ours, theirs):
    echo = bench.start(run_echo, config=theirs)
    peer = PublicKey.parse((await echo.ready())["public_key"])
    (result,) = await bench.run(run_ping, peer, count=3, size=3000, interval_s=0, config=ours)
    assert result["security"] == "e2e"


@pytest.mark.parametrize("bench", ["messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_a_peer_with_ids_of_its_own_cannot_be_dialled_by_one_without(bench):
    echo = bench.start(run_echo, config=config("v5"))
    peer = PublicKey.parse((await echo.ready())["public_key"])
    with pytest.raises(DialError) as caught:
        await bench.run(run_ping, peer, count=1, size=64, interval_s=0, config=config("v0"))
    assert exit_code(caught.value) is Exit.UNREACHABLE
    assert "another dialect" in describe(caught.value)
