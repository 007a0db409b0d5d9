"""``dmsg rmb twin``."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import pytest_twisted
from click.testing import CliRunner

from dmsg.cli.commands import group
from dmsg.cli.exits import Exit
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.key_file import read_twin_key
from dmsg.rmb.twins.table import TwinTable
from dmsg.testing.process import Process
from tests.rmb.twins.fake_node import Chain, FakeNode


def dmsg(*arguments):
    return CliRunner().invoke(group, list(map(str, arguments)))


@pytest.fixture
def create(tmp_path):
    def create(key, relays, *more):
        files = "--registry", tmp_path / "twins", "--key", tmp_path / key
        return dmsg("rmb", "twin", "create", *files, "--relay", relays, *more)

    return create


def test_create_makes_a_key_and_a_twin_and_prints_its_number(tmp_path, create):
    first, second = create("a", "localhost"), create("b", "r2.example,r1.example", "--json")
    assert (first.exit_code, first.stdout) == (0, "1\n")
    key = read_twin_key(tmp_path / "b")
    pk = EncryptionKey(key.secret).public_key
    relays = ["r1.example", "r2.example"]
    assert json.loads(second.stdout) == {"twin": 2, "account": key.account.hex(), "relays": relays, "pk": pk.hex()}
    with closing(TwinTable(str(tmp_path / "twins"))) as table:
        assert table.get(2) == Twin(2, key.account, tuple(relays), pk)
    assert key.secret.hex() not in second.output


def test_a_key_that_is_there_is_used(tmp_path, create):
    create("a", "localhost", "--key-type", "sr25519")
    before = (tmp_path / "a").read_bytes()
    assert before.startswith(b"sr25519 0x")
    again = create("a", "other.example")
    assert (again.exit_code, again.stdout) == (0, "1\n")
    assert (tmp_path / "a").read_bytes() == before
    with closing(TwinTable(str(tmp_path / "twins"))) as table:
        assert table.get(1).relays == ("other.example",)


@pytest.mark.parametrize(
    ("relays", "problem"),
    [
        *((relays, "a relay is a host name") for relays in ("", "a_b", "a.example,", "http://a.example", "a:70000")),
        (",".join(f"r{number}.example" for number in range(17)), "at most 16 relays"),
    ],
)
def test_a_relay_that_no_registry_may_hold_is_wrong_usage_and_makes_nothing(tmp_path, create, relays, problem):
    result = create("a", relays)
    assert result.exit_code == Exit.USAGE and not result.stdout
    assert len(result.stderr.splitlines()) == 1 and problem in result.stderr and "--relay" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_key_file_of_something_else_is_one_line_of_error(tmp_path, create):
    dmsg("keygen", tmp_path / "key")
    result = create("key", "localhost")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "is not the key of a twin" in result.stderr


def test_show_prints_one_or_all(tmp_path, create):
    create("a", "localhost:8080")
    create("b", "r2.example,r1.example")
    both = dmsg("rmb", "twin", "show", "--registry", tmp_path / "twins").stdout.splitlines()
    account = read_twin_key(tmp_path / "b").account.hex()
    assert [line.split("\t")[0] for line in both] == ["1", "2"]
    assert both[1].split("\t")[1:3] == [account, "r1.example,r2.example"]
    [one] = dmsg("rmb", "twin", "show", "1", "--registry", tmp_path / "twins", "--json").stdout.splitlines()
    assert json.loads(one)["relays"] == ["localhost:8080"]


@pytest.mark.parametrize("as_json", [False, True])
def test_show_prints_the_twins_beside_an_altered_row_and_names_that_one(tmp_path, create, as_json):
    for name in ("a", "b", "c"):
        create(name, "localhost")
    with closing(sqlite3.connect(tmp_path / "twins", isolation_level=None)) as table:
        table.execute("UPDATE twins SET relays = 'evil.example' WHERE id = 2")
    result = dmsg("rmb", "twin", "show", "--registry", tmp_path / "twins", *["--json"][: int(as_json)])
    altered = "the registry of twins: altered (twin 2 has not signed its row)"
    assert result.exit_code == Exit.UNVERIFIED
    if as_json:
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        assert [line.get("twin", line.get("message")) for line in lines] == [altered, 1, 3]
        assert json.loads(result.stderr)["message"] == "1 of 3 rows of the registry are altered"
    else:
        assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["1", "3"]
        assert result.stderr.splitlines() == [altered, "dmsg: 1 of 3 rows of the registry are altered"]


def test_a_twin_that_is_missing_is_not_found(tmp_path):
    TwinTable(str(tmp_path / "twins")).close()
    result = dmsg("rmb", "twin", "show", "7", "--registry", tmp_path / "twins", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stderr)["twin"] == 7


@pytest.mark.parametrize("number", [0, 2**32, 10**20])
def test_a_number_that_no_twin_can_have_is_refused(tmp_path, number):
    TwinTable(str(tmp_path / "twins")).close()
    result = dmsg("rmb", "twin", "show", number, "--registry", tmp_path / "twins")
    assert result.exit_code == Exit.USAGE
    assert "is not in the range" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("twin", "show"),
        ("call", "1", "shout", "--relay", "ws://127.0.0.1:9"),
        ("serve", "a", "--exec", "cat", "--relay", "ws://a"),
    ],
)
def test_a_registry_that_is_missing_is_not_made(tmp_path, command):
    """A path that was mistyped is told as such, not as a twin that does not exist."""
    dmsg("rmb", "twin", "create", "--registry", tmp_path / "twins", "--key", tmp_path / "key", "--relay", "localhost")
    key = () if command[0] == "twin" else ("--key", tmp_path / "key")
    result = dmsg("rmb", *command, *key, "--registry", tmp_path / "twin")
    assert result.exit_code == 2
    assert (
        result.stderr == f"dmsg: registry: {tmp_path / 'twin'}: there is no such file; dmsg rmb twin create makes one\n"
    )
    assert not (tmp_path / "twin").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "registry: must be given, or substrate"),
        (("--registry", "r", "--substrate", "ws://a"), "registry: cannot be given together with substrate"),
        (("--substrate", "http://a"), "substrate: must be ws://"),
        (("--substrate", "ws://a"), "substrate: a chain has too many twins"),
    ],
)
def test_show_needs_one_registry(arguments, problem):
    result = dmsg("rmb", "twin", "show", *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr and len(result.stderr.splitlines()) == 1


@pytest_twisted.ensureDeferred
async def test_show_prints_a_twin_of_the_chain(reactor):
    chain = Chain()
    chain.twin(7, bytes(32), "r.example")
    node = FakeNode(reactor, chain, 0, "127.0.0.1")
    url = f"ws://127.0.0.1:{node.port.getHost().port}"
    show = [sys.executable, "-m", "dmsg.cli.main", "rmb", "twin", "show", "--substrate", url, "--json"]
    async with Process(reactor, [*show, "7"]) as found:
        line = await found.line("{")
        assert await found.ended() == 0
    assert json.loads(line.string) == {"twin": 7, "account": "00" * 32, "relays": ["r.example"], "pk": None}
    async with Process(reactor, [*show, "8"]) as missing:
        assert await missing.ended() == 3
    assert json.loads(missing.output)["twin"] == 8
    await node.close()
    async with Process(reactor, [*show, "7"]) as unreachable:
        assert await unreachable.ended() == 6
    assert json.loads(unreachable.output)["error"] == "RegistryError"


def test_missing_packages_are_named_in_one_line(tmp_path):
    missing = "import sys; sys.modules['mnemonic'] = None; from dmsg.cli.main import main; main()"
    command = [sys.executable, "-c", missing, "rmb", "twin", "show", "--registry", str(tmp_path / "twins")]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "Error: mnemonic is missing: install dmsg[rmb] to use dmsg rmb\n"
