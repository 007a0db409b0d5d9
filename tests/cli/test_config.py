"""``dmsg config show``, and commands that read their settings from a file."""

from __future__ import annotations

import json

import pytest
import pytest_twisted
from click.testing import CliRunner

from dmsg.cli.commands import group
from dmsg.cli.exits import Exit
from dmsg.cli.ping import run_echo, run_ping
from dmsg.cli.settings import client_settings
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.ops.config import HIDDEN
from dmsg.ops.settings import settings_of
from dmsg.taps.tables import SETTINGS

KEY = SecretKey.generate().public_key


def dmsg(*arguments, **environ):
    return CliRunner().invoke(group, list(map(str, arguments)), env=environ)


def shown(*arguments, **environ):
    """What ``dmsg config show`` tells, by the name of the setting."""
    result = dmsg("config", "show", *arguments, "--json", **environ)
    assert result.exit_code == 0, result.stderr
    return {one["setting"]: one for one in json.loads(result.stdout)["settings"]}


@pytest.fixture
def file(tmp_path):
    """Write a settings file; its path."""

    def write(text):
        path = tmp_path / "dmsg.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("role", "needed"),
    [
        ("client", ()),
        ("messaging", ()),
        ("server", ("--key", "k")),
        ("discovery", ()),
        ("shipper", ("--from", "/a", "--to", "/b")),
    ],
)
def test_every_setting_of_every_role_is_shown(role, needed):
    found = shown(role, *needed)
    assert list(found) == [one.name for one in settings_of(SETTINGS[role])]
    given = {name.removeprefix("--") for name in needed}
    assert all(one["origin"] == ("option" if name in given else "default") for name, one in found.items())


def test_each_value_is_shown_with_where_it_comes_from(file):
    config = file(
        '# settings\n[client]\ndiscovery = "http://one:1"\nsecurity = "hop"\nstate_dir = "none"\n'
        "resume_grace_s = 7\n\n[client.pool.race]\nwidth = 5\n"
    )
    found = shown(
        "--config", config, "--discovery", "http://three:3", DMSG_DISCOVERY="http://two:2", DMSG_SECURITY="e2e"
    )
    told = {name: (one["value"], one["origin"], one["where"]) for name, one in found.items()}
    assert told["discovery"] == ("http://three:3", "option", "--discovery")
    assert told["security"] == ("e2e", "environment", "DMSG_SECURITY")
    assert told["state_dir"] == ("none", "file", f"{config}:5")
    assert told["resume_grace_s"] == (7.0, "file", f"{config}:6")
    assert told["pool_race_width"] == (5, "file", f"{config}:9")
    assert told["key"] == (None, "default", "")
    assert found["pool_race_width"]["table"] == "client.pool.race"


def test_people_get_lines():
    lines = dmsg("config", "show", "--server", f"{KEY}@192.0.2.1:80").stdout.splitlines()
    assert f"server\t{KEY}@192.0.2.1:80\t--server" in lines
    assert "dial_timeout_s\t10\tdefault" in lines
    assert "security\t(prefer; e2e with a list of who may come in)\tdefault" in lines


def test_secrets_are_not_shown():
    for value, told in (
        ("redis://me:hunter2@store/0", "redis://…@store/0"),
        ("redis:me:hunter2@store", HIDDEN),
        ("sqlite:/var/entries.db", "sqlite:/var/entries.db"),
    ):
        result = dmsg("config", "show", "discovery", "--store", value)
        assert f"store\t{told}\t--store" in result.stdout.splitlines()
        assert "hunter2" not in result.stdout
    found = shown("--relays", "https://host/list?signature=hunter2", "--relays-key", KEY)
    assert found["relays"]["value"] == "https://host/list?…"


@pytest.mark.parametrize("name", ["mnemonic", "mnemonics", "seed"])
@pytest.mark.parametrize(
    "secret", ["0x" + "ab" * 32, "legal winner thank year wave sausage worth useful legal winner thank yellow"]
)
def test_a_secret_that_is_a_setting_itself_is_not_shown(file, name, secret):
    config = file(f'[rmb-peer]\n{name} = "{secret}"\n')
    for given in (("--config", config), (f"--{name}", secret)):
        for form in ((), ("--json",)):
            result = dmsg("config", "show", "rmb-peer", *given, *form)
            assert HIDDEN in result.stdout and secret not in result.output


def test_what_a_role_needs_and_has_not_is_said_after_the_rest():
    result = dmsg("config", "show", "server")
    assert result.exit_code == Exit.USAGE
    assert "key\t(required)\tdefault" in result.stdout
    assert result.stderr == "dmsg: key: must be given (--key, DMSG_KEY, or [server] in --config)\n"


@pytest.mark.parametrize(
    ("text", "environ", "arguments", "line"),
    [
        ("[client]\nsecurty = 'e2e'", {}, (), "securty: is no setting; did you mean security? (in [client] of {}:2)"),
        ("[client.dail]\n", {}, (), "dail: is no setting; did you mean dial? (in [client] of {}:1)"),
        (
            "[cleint]\n",
            {},
            (),
            "cleint: is no table; there are [client], [discovery], [messaging], [messaging-server]"
            ", [rmb-peer], [rmb-relay], [server], "
            "[shipper] (in {})",
        ),
        (
            "[client]\n\nkey = '" + "ab" * 32 + "'",
            {},
            (),
            "key: a key is given as the path of a key file, never inline",
        ),
        ("[client]\nmin_servers = 1000", {}, (), "min_servers: must be at most 999, not 1000 (in [client] of {}:2)"),
        (
            "",
            {"DMSG_SECURTY": "e2e"},
            (),
            "DMSG_SECURTY: is no setting; did you mean DMSG_SECURITY? (in the environment)",
        ),
        (
            "",
            {"DMSG_DISCOVERY": "nowhere"},
            (),
            "discovery: must be http://host:port, not 'nowhere' (in variable DMSG_DI",
        ),
        (
            "",
            {},
            ("--resume-grace-s", "soon"),
            "resume_grace_s: must be a duration such as 2.5, 500ms, 10s or 5m, not 's",
        ),
        (
            "",
            {},
            ("--server", "127.0.0.1:1"),
            "server: a pinned server is written pk@host:port, not '127.0.0.1:1' (in option --server)",
        ),
        ("[client]\nrelays_mode = 'only'\n", {}, (), "relays_mode: there is no list of relays it could be about"),
    ],
)
@pytest.mark.parametrize("command", [("config", "show"), ("servers",)])
def test_what_is_wrong_is_one_line_that_names_the_place(file, command, text, environ, arguments, line):
    path = file(text)
    result = dmsg(*command, "--config", path, *arguments, **environ)
    assert result.exit_code == Exit.USAGE
    assert result.stderr.startswith("dmsg: " + line.format(path)) and len(result.stderr.splitlines()) == 1
    told = json.loads(dmsg(*command, "--json", "--config", path, *arguments, **environ).stderr)
    assert told["error"] == "ConfigError" and told["exit_code"] == 2


def test_an_empty_variable_counts_as_not_set(file):
    path = file("[client]\ndiscovery = 'http://one:1'\n")
    found = shown(DMSG_CONFIG=str(path), DMSG_DISCOVERY="", DMSG_KEY="")
    assert found["discovery"]["value"] == "http://one:1" and found["key"]["value"] is None


@pytest.mark.parametrize("bench", ["http"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_commands_connect_as_a_file_says(bench, file):
    """Who they are, where the network is, and how long a dial may take."""
    key, _ = bench.key("echo")
    path = file(
        f'[client]\ndiscovery = "{bench.network.discovery_url}"\nsecurity = "e2e"\nstate_dir = "state"\nevents = "events"\n'
        '[client.dial]\ntimeout_s = "3s"\n'
    )
    echoing = client_settings({"config": str(path), "key": str(bench.directory / "echo.key")})
    bench.settings = lambda *options: echoing
    echo = bench.start(run_echo)
    assert PublicKey.parse((await echo.ready())["public_key"]) == key.public_key
    pinging = client_settings({"config": str(path)})
    assert pinging.config.dial.timeout_s == 3.0
    bench.settings = lambda *options: pinging
    (result,) = await bench.run(run_ping, key.public_key, count=1, size=64, interval_s=0)
    assert result["security"] == "e2e"
    await echo.stop()
    assert len(list((path.parent / "state").iterdir())) == 1
    assert (path.parent / "events").is_dir()
