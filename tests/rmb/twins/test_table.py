"""The registry in a file: what it keeps, who may change it, and how processes share it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent

from dmsg.errors import ConfigError
from dmsg.rmb.core.errors import InvalidTwin
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.twins.errors import NoSuchAccount, RegistryError
from dmsg.rmb.twins.table import FRESH_S, SqliteRegistry, TwinTable

ALICE = TwinKey(bytes(31) + b"\1", KeyType.ED25519)
BOB = TwinKey(bytes(31) + b"\2", KeyType.SR25519)
PK = b"\2" + bytes(32)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "twins")


@pytest.fixture
def table(path):
    table = TwinTable(path)
    yield table
    table.close()


def alter(path, statement, *values):
    """What a writer of the file can do without a key."""
    with sqlite3.connect(path) as connection:
        connection.execute(statement, values)
    connection.close()


def rows(path, columns="*"):
    """What is in the file."""
    connection = sqlite3.connect(path)
    found = connection.execute(f"SELECT {columns} FROM twins").fetchall()
    connection.close()
    return found


def test_twins_are_numbered_from_one_and_kept(path, table):
    assert table.create(ALICE, ["r2.example", "r1.example"], PK) == 1
    assert table.create(BOB, ["localhost:8080"], None) == 2
    table.close()
    again = TwinTable(path)
    assert again.get(1) == Twin(1, ALICE.account, ("r1.example", "r2.example"), PK)
    assert again.get(2) == Twin(2, BOB.account, ("localhost:8080",), None)
    assert again.get(3) is None
    assert again.numbers() == [1, 2]
    assert (again.find(ALICE.account), again.find(BOB.account), again.find(bytes(32))) == (1, 2, None)
    again.close()


def test_an_account_has_one_twin(table):
    assert table.create(ALICE, ["a.example"], None) == 1
    assert table.create(ALICE, ["b.example"], PK) == 1
    assert table.get(1) == Twin(1, ALICE.account, ("b.example",), PK)


def test_only_what_exists_is_updated(table):
    with pytest.raises(NoSuchAccount) as error:
        table.update(ALICE, ["a.example"], None)
    assert error.value.account == ALICE.account
    assert table.numbers() == []


@pytest.mark.parametrize(("relays", "pk"), [(["no_underscore"], None), (["a b"], None), (["a.example"], bytes(129))])
def test_what_no_twin_can_have_is_not_written(table, relays, pk):
    with pytest.raises(InvalidTwin):
        table.create(ALICE, relays, pk)
    assert table.numbers() == []


def test_an_unchanged_twin_is_not_written_again(path, table):
    table.create(ALICE, ["a.example"], PK)
    before = rows(path, "version, signature")
    table.update(ALICE, ["a.example"], PK)
    assert rows(path, "version, signature") == before


def test_what_another_connection_writes_is_seen_at_once(path, table):
    other = TwinTable(path)
    assert table.get(1) is None
    assert table.find(ALICE.account) is None
    other.create(ALICE, ["a.example"], None)
    assert table.get(1).relays == ("a.example",)
    assert table.find(ALICE.account) == 1
    other.update(ALICE, ["b.example"], None)
    assert table.get(1).relays == ("b.example",)
    other.close()


def test_with_a_clock_it_is_seen_a_little_later(path):
    clock = Clock()
    table, other = TwinTable(path, clock), TwinTable(path)
    assert table.get(1) is None
    other.create(ALICE, ["a.example"], None)
    clock.advance(FRESH_S * 0.9)
    assert table.get(1) is None
    clock.advance(FRESH_S * 0.2)
    assert table.get(1).relays == ("a.example",)
    other.update(ALICE, ["b.example"], None)
    table.look_again()
    assert table.get(1).relays == ("b.example",)
    table.update(ALICE, ["c.example"], None)
    assert table.get(1).relays == ("c.example",)
    table.close()
    other.close()


def test_no_more_is_kept_than_there_is_room_for(table, monkeypatch):
    monkeypatch.setattr("dmsg.rmb.twins.table.CACHED_TWINS", 1)
    assert table.create(ALICE, ["a.example"], None) == 1
    assert table.create(BOB, ["b.example"], None) == 2
    for _ in range(2):
        assert [table.get(number).id for number in (1, 2, 1)] == [1, 2, 1]


READ_ONLY = """
import os, sys
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.errors import RegistryError
from dmsg.rmb.twins.table import TwinTable

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
table = TwinTable(sys.argv[1])
print(table.get(1).relays, flush=True)
sys.stdin.readline()
table.look_again()
print(table.get(1).relays)
try:
    table.create(TwinKey(bytes(32), KeyType.ED25519), ["a.example"], None)
except RegistryError as error:
    print(error.reason)
"""


def test_who_may_only_read_the_file_reads_it():
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/twins"
        table = TwinTable(path)
        table.create(ALICE, ["a.example"], None)
        os.chmod(path, 0o444)
        os.chmod(directory, 0o555)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", READ_ONLY, path], **pipes) as reader:
            assert reader.stdout.readline() == "('a.example',)\n"
            os.chmod(directory, 0o755)
            os.chmod(path, 0o644)
            table.update(ALICE, ["b.example"], None)
            os.chmod(directory, 0o555)
            os.chmod(path, 0o444)
            assert reader.communicate("go on\n")[0] == "('b.example',)\nunavailable\n"
        table.close()
        os.chmod(directory, 0o755)


CREATE = """
import sys
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.table import TwinTable

first = int(sys.argv[2])
table = TwinTable(sys.argv[1])
for number in range(first, first + 20):
    table.create(TwinKey(number.to_bytes(32, "big"), KeyType.ED25519), ["a.example"], None)
"""


def test_processes_that_create_at_the_same_time_get_different_numbers(path, table):
    children = [subprocess.Popen([sys.executable, "-c", CREATE, path, str(1 + 20 * n)]) for n in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert table.numbers() == list(range(1, 61))
    assert len({table.get(number).account for number in range(1, 61)}) == 60


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("relays", "evil.example"),
        ("pk", b"\3" + bytes(32)),
        ("pk", "text"),
        ("version", 7),
        ("id", 9),
        ("signature", bytes(65)),
        ("signature", "e"),
        ("account", bytes(32)),
        ("account", b"short"),
        ("relays", b"\xff"),
        ("relays", "x" * 70_000),
    ],
)
def test_a_row_that_others_changed_is_not_believed(path, table, column, value):
    table.create(ALICE, ["a.example"], PK)
    alter(path, f"UPDATE twins SET {column} = ?", value)
    with pytest.raises(RegistryError) as error:
        table.get(9 if column == "id" else 1)
    assert error.value.reason == "altered"


def test_its_twin_writes_an_altered_row_anew(path, table):
    table.create(ALICE, ["a.example"], PK)
    alter(path, "UPDATE twins SET relays = 'evil.example', version = 'x'")
    assert table.create(ALICE, ["a.example"], PK) == 1
    again = TwinTable(path)
    assert again.get(1) == Twin(1, ALICE.account, ("a.example",), PK)
    again.close()


def test_an_older_row_is_noticed_by_who_read_the_newer(path, table):
    table.create(ALICE, ["old.example"], None)
    [old] = rows(path)
    table.update(ALICE, ["new.example"], None)
    assert table.get(1).relays == ("new.example",)
    alter(path, "INSERT OR REPLACE INTO twins VALUES (?, ?, ?, ?, ?, ?)", *old)
    with pytest.raises(RegistryError, match="altered"):
        table.get(1)


def test_a_number_that_changes_hands_is_noticed_by_who_read_it_before(path, tmp_path, table):
    table.create(ALICE, ["a.example"], None)
    assert table.get(1).account == ALICE.account
    other = TwinTable(str(tmp_path / "other"))
    other.create(BOB, ["b.example"], None)
    [row] = rows(tmp_path / "other")
    alter(path, "INSERT OR REPLACE INTO twins VALUES (?, ?, ?, ?, ?, ?)", *row)
    with pytest.raises(RegistryError, match="altered"):
        table.get(1)
    other.close()


def test_numbers_end_where_they_end(path, table):
    alter(path, "INSERT INTO twins VALUES (4294967295, x'00', 1, '', NULL, x'')")
    with pytest.raises(RegistryError, match="full"):
        table.create(ALICE, ["a.example"], None)
    assert table.numbers() == [4294967295]


FULL = """
import resource, sys
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.errors import RegistryError
from dmsg.rmb.twins.table import TwinTable
alice, bob = (TwinKey(bytes(31) + bytes([last]), KeyType.ED25519) for last in (1, 2))
table = TwinTable(sys.argv[1])
table.create(alice, ["a.example"], None)
allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, allowed[1]))
try:
    table.create(bob, ["b.example"], None)
except RegistryError as error:
    problem = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
print(problem, table.numbers(), table.create(bob, ["b.example"], None))
"""


def test_what_cannot_be_written_is_said_and_written_once_there_is_room(path):
    told = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True).stdout
    assert told == "the registry of twins: unavailable (disk I/O error) [1] 2\n"


def test_a_file_of_something_else_is_refused(path):
    alter(path, "CREATE TABLE something (else_ TEXT)")
    with pytest.raises(ConfigError, match="is not a registry of twins"):
        TwinTable(path)


@pytest.mark.parametrize("content", [b"x" * 5000, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    (tmp_path / "twins").write_bytes(content)
    with pytest.raises(ConfigError, match=r"registry: .* cannot be used"):
        TwinTable(str(tmp_path / "twins"))
    assert (tmp_path / "twins").read_bytes() == content


def damage(path, old, new):
    """Overwrite some bytes of the file."""
    with open(path, "rb") as file:
        content = file.read()
    assert old in content and len(old) == len(new)
    with open(path, "wb") as file:
        file.write(content.replace(old, new))


def test_a_file_whose_schema_is_damaged_is_refused(path, table):
    """SQLite quotes the schema in its error, and Python cannot decode that."""
    table.close()
    damage(path, b"CREATE TABLE", b"CREATE\xffTABLE")
    with pytest.raises(ConfigError, match=r"registry: .* cannot be used \(its schema is damaged\)"):
        TwinTable(path)


def test_a_row_without_a_number_is_an_error(path, table):
    table.create(ALICE, [], PK)
    table.close()
    damage(path, b"PRIMARY", b"PRIMARX")
    again = TwinTable(path)
    with pytest.raises(RegistryError) as caught:
        again.create(ALICE, ["r.example"], PK)
    assert caught.value.reason == "unavailable"
    again.close()


@pytest.mark.parametrize("name", ["", "missing/twins"])
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="registry: "):
        TwinTable(str(tmp_path / name))


def test_a_closed_or_broken_file_is_an_error_that_may_pass(path, table):
    table.create(ALICE, ["a.example"], None)
    alter(path, "DROP TABLE twins")
    with pytest.raises(RegistryError) as error:
        table.get(1)
    assert error.value.reason == "unavailable" and "twins" not in error.value.own_text.partition(":")[2]
    table.close()
    table.close()
    with pytest.raises(RegistryError, match="closed"):
        table.find(ALICE.account)


@pytest.mark.parametrize("writes_in", [None, reactor])
@pytest_twisted.ensureDeferred
async def test_the_registry_reads_what_it_wrote(path, writes_in):
    registry = SqliteRegistry(path, writes_in)
    table = TwinTable(path)
    table.create(ALICE, ["a.example"], None)
    assert await registry.get(1) == Twin(1, ALICE.account, ("a.example",), None)
    await registry.update(ALICE, ["b.example"], PK)
    assert await registry.get(1) == Twin(1, ALICE.account, ("b.example",), PK)
    assert await registry.find(ALICE.account) == 1
    with pytest.raises(NoSuchAccount):
        await registry.update(BOB, ["b.example"], None)
    await registry.close()
    table.close()


@pytest_twisted.ensureDeferred
async def test_a_registry_is_said_to_be_made_only_when_it_is(path, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for unreachable in ("none/twins", "loop/twins"):
        with capturedLogs() as lines, pytest.raises(ConfigError, match="cannot be used"):
            SqliteRegistry(str(tmp_path / unreachable))
        assert lines == []
    for expected in ([f"The registry {path} was not there: it is made, without a twin"], []):
        with capturedLogs() as lines:
            await SqliteRegistry(path).close()
        assert [formatEvent(one) for one in lines] == expected
