"""Destinations: after ``deliver`` the right content stands under its name, and other content is never written over."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmsg.errors import ConfigError
from dmsg.shipping import local
from dmsg.shipping.destinations import (
    Destination,
    ObjectDestination,
    StagedDestination,
    check_target,
    open_destination,
    parse_options,
)
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.local import LocalDestination, reason_of
from dmsg.shipping.plan import landing_path
from dmsg.shipping.scan import Content, examine


@pytest.fixture
def content(tmp_path: Path, event_file: Any) -> tuple[str, Content]:
    """A file of a few hundred kilobytes, looked through, and its path at the target."""
    return make(tmp_path / "events", event_file)


def make(directory: Path, event_file: Any, number: int = 0) -> tuple[str, Content]:
    path = str(event_file(directory, number, lines=5, pad=50_000).relative_to(directory))
    made = examine(str(directory), path)
    return landing_path(path, made.sha256), made


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def open_at(root: Path) -> Destination:
    root.mkdir(exist_ok=True)
    return open_destination(str(root), {}, read_back=False, random=os.urandom)


def arrow(root: Path) -> StagedDestination:
    """The path that ``hdfs://`` takes: fsspec's wrapper around a file system of pyarrow, here the local one."""
    root.mkdir(exist_ok=True)

    def connect() -> tuple[Any, str]:
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow.fs import LocalFileSystem

        return ArrowFSWrapper(LocalFileSystem(), skip_instance_cache=True), str(root)

    return StagedDestination("hdfs://namenode/landing", connect, token=os.urandom(8).hex())


def plain(root: Path) -> StagedDestination:
    """A file system of fsspec that knows no more than it must: ``mv`` is a copy and a removal."""
    root.mkdir(exist_ok=True)

    def connect() -> tuple[Any, str]:
        import fsspec

        return fsspec.filesystem("file", skip_instance_cache=True), str(root)

    return StagedDestination("other://host/landing", connect, token=os.urandom(8).hex(), one_at_a_time=True)


def objects(root: Path) -> ObjectDestination:
    """An object store that knows no conditions."""
    root.mkdir(exist_ok=True)

    def connect() -> tuple[Any, str]:
        import fsspec

        return fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True), str(root)

    return ObjectDestination("gs://bucket/landing", connect)


KINDS: dict[str, Callable[[Path], Destination]] = {
    "local": open_at,
    "arrow": arrow,
    "plain": plain,
    "objects": objects,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def test_a_file_is_known_by_the_digests_that_stores_tell(content: tuple[str, Content]) -> None:
    _, what = content
    data = Path(what.path).read_bytes()
    assert (what.size_bytes, what.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert what.md5 == hashlib.md5(data).hexdigest(), "without it each object would be read back"


@kinds
def test_content_arrives_and_may_be_delivered_again(kind: str, tmp_path: Path, content: tuple[str, Content]) -> None:
    root = tmp_path / "landing"
    path, what = content
    for _ in range(2):
        KINDS[kind](root).deliver(path, what)
        assert everything(root) == {path: Path(what.path).read_bytes()}


@kinds
@pytest.mark.parametrize("wrong", ["other content", "same size", "cut off", "empty"])
def test_other_content_is_never_written_over(
    kind: str, wrong: str, tmp_path: Path, content: tuple[str, Content]
) -> None:
    root = tmp_path / "landing"
    path, what = content
    data = Path(what.path).read_bytes()
    there = {
        "other content": b"something else",
        "same size": data[:-1] + bytes([data[-1] ^ 1]),
        "cut off": data[:1000],
        "empty": b"",
    }[wrong]
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(there)
    with pytest.raises(ShippingError) as caught:
        KINDS[kind](root).deliver(path, what)
    assert caught.value.reason == "conflict"
    assert everything(root) == {path: there}


@pytest.mark.parametrize("left_bytes", [b"half of", bytes(1 << 20)], ids=["less", "more"])
@pytest.mark.parametrize("kind", ["local", "arrow", "plain"])
def test_what_a_killed_shipper_left_is_tidied_up(
    kind: str, tmp_path: Path, content: tuple[str, Content], left_bytes: bytes
) -> None:
    root = tmp_path / "landing"
    path, what = content
    folder, name = os.path.split(path)
    (root / folder).mkdir(parents=True)
    left = f".{name}.staging" if kind == "local" else f".{name}.ffee.staging"
    (root / folder / left).write_bytes(left_bytes)
    KINDS[kind](root).deliver(path, what)
    assert everything(root) == {path: Path(what.path).read_bytes()}


def test_killed_between_the_two_names_of_a_file(tmp_path: Path, content: tuple[str, Content]) -> None:
    root = tmp_path / "landing"
    path, what = content
    open_at(root).deliver(path, what)
    folder, name = os.path.split(root / path)
    os.link(root / path, f"{folder}/.{name}.staging")
    open_at(root).deliver(path, what)
    assert list(everything(root)) == [path]


def test_a_local_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, content: tuple[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is removed after that, and a power cut must not take both."""
    path, what = content
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def synced(descriptor: int) -> None:
        steps.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        sync(descriptor)

    def linked(source: str, final: str) -> None:
        steps.append("link")
        link(source, final)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    root = tmp_path / "landing"
    open_at(root).deliver(path, what)
    folder, name = os.path.split(root / path)
    assert steps[-3:] == [f"sync {folder}/.{name}.staging", "link", f"sync {folder}"]
    assert f"sync {root}" in steps, "the folders, too"


def test_the_name_of_a_local_file_that_is_there_is_on_the_disk_before_the_source_goes(
    tmp_path: Path, content: tuple[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipper before may have been killed when it had given the name, and the power may fail next."""
    path, what = content
    root = tmp_path / "landing"
    open_at(root).deliver(path, what)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    open_at(root).deliver(path, what)
    assert os.path.dirname(root / path) in synced


def test_a_name_that_another_shipper_has_given_meanwhile_is_as_good(tmp_path: Path) -> None:
    destination = LocalDestination(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        destination.publish(str(tmp_path / ".x.staging"), str(tmp_path / "x"))
    (tmp_path / "x").write_bytes(b"theirs")
    destination.publish(str(tmp_path / ".x.staging"), str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b"theirs"


@kinds
def test_many_threads_deliver_the_same_file(kind: str, tmp_path: Path, content: tuple[str, Content]) -> None:
    """Some may have to come again; nothing else ever stands there, and nothing is left over."""
    root = tmp_path / "landing"
    path, what = content
    errors: list[ShippingError] = []
    begin = threading.Barrier(4)

    def work() -> None:
        destination = KINDS[kind](root)
        begin.wait(10)
        try:
            destination.deliver(path, what)
        except ShippingError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    KINDS[kind](root).deliver(path, what)
    assert everything(root) == {path: Path(what.path).read_bytes()}
    if kind == "local":
        assert {error.reason for error in errors} <= {"unreadable"}


@kinds
def test_a_file_that_another_shipper_has_taken_meanwhile_leaves_nothing(
    kind: str, tmp_path: Path, content: tuple[str, Content]
) -> None:
    root = tmp_path / "landing"
    root.mkdir()
    path, what = content
    os.unlink(what.path)
    with pytest.raises(ShippingError) as caught:
        KINDS[kind](root).deliver(path, what)
    assert caught.value.reason == "unreadable"
    assert everything(root) == {}


def test_a_local_root_is_never_made(tmp_path: Path, content: tuple[str, Content]) -> None:
    path, what = content
    with pytest.raises(ShippingError) as caught:
        LocalDestination(str(tmp_path / "unmounted")).deliver(path, what)
    assert caught.value.reason == "no_such_place" and not (tmp_path / "unmounted").exists()


class NoLinks(LocalDestination):
    """A file system without hard links."""

    def publish(self, staging: str, final: str) -> None:
        """As the kernel answers there."""
        real = os.link

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        os.link = refuse
        try:
            super().publish(staging, final)
        finally:
            os.link = real


def test_a_local_file_system_without_links(tmp_path: Path, content: tuple[str, Content]) -> None:
    root = tmp_path / "landing"
    root.mkdir()
    path, what = content
    NoLinks(str(root)).deliver(path, what)
    assert list(everything(root)) == [path]


def stale(*_: object) -> None:
    """As on NFS, where another host has removed the file."""
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_another_host_has_removed_keeps_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", stale)
        patch.setattr(os, "fstat", stale)
        with pytest.raises(OSError, match="Stale"):
            local._claim(str(tmp_path / "a"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_file_that_another_host_has_removed_keeps_no_descriptor(
    tmp_path: Path, content: tuple[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        with pytest.raises(ShippingError, match="Stale"):
            content[1].open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_local_file_system_without_locks_fails_and_keeps_no_descriptor_and_no_file(
    tmp_path: Path, content: tuple[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lockless:
        LOCK_EX = LOCK_NB = 0

        def flock(self, descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

    destination = LocalDestination(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(local, "fcntl", Lockless())
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ShippingError, match="locks"):
                destination.deliver(*content)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not [one for one in everything(tmp_path) if one.endswith(local.STAGING_SUFFIX)]
    destination.deliver(*content)
    assert destination.standing(str(tmp_path / content[0]), content[1]) is local.Standing.THIS


def test_a_file_is_never_its_own_target(tmp_path: Path, event_file: Any) -> None:
    """Two paths to one disk: were the file found "there", it would be removed as shipped."""
    events = tmp_path / "events"
    source = event_file(events)
    path = str(source.relative_to(events))
    what = examine(str(events), path)
    (tmp_path / "other").symlink_to(events)
    with pytest.raises(ShippingError, match="the very file"):
        LocalDestination(str(tmp_path / "other")).deliver(path, what)
    assert source.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_its_own_reason(tmp_path: Path, content: tuple[str, Content], code: int) -> None:
    class Full(LocalDestination):
        def publish(self, staging: str, final: str) -> None:
            raise OSError(code, os.strerror(code))

    (tmp_path / "landing").mkdir()
    with pytest.raises(ShippingError) as caught:
        Full(str(tmp_path / "landing")).deliver(*content)
    assert caught.value.reason == "no_space"
    assert everything(tmp_path / "landing") == {}


def test_what_was_written_wrongly_is_not_published(tmp_path: Path, content: tuple[str, Content]) -> None:
    path, what = content

    class Lying:
        """A file system that loses the end of what it is given."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def open(self, path: str, mode: str, **more: Any) -> Any:
            file = self._inner.open(path, mode, **more)
            if mode == "wb":
                write = file.write
                file.write = lambda data: write(data[:-1])
            return file

    def connect() -> tuple[Any, str]:
        import fsspec

        return Lying(fsspec.filesystem("memory", skip_instance_cache=True)), "/lying"

    with pytest.raises(ShippingError) as caught:
        StagedDestination("hdfs://x/", connect, token="00").deliver(path, what)
    assert caught.value.reason == "mismatch"
    file_system, root = connect()
    assert file_system.find(root) == []


def test_a_connection_that_was_ended_meanwhile_is_made_anew(tmp_path: Path, event_file: Any) -> None:
    """As fsspec's FTP and SFTP: what holds the one connection fails for ever once the server has ended it."""

    class Connection:
        def __init__(self) -> None:
            import fsspec

            self.is_up = is_server_up
            self._inner = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)

        def __getattr__(self, name: str) -> Any:
            if not self.is_up:
                raise BrokenPipeError(errno.EPIPE, "Broken pipe")
            return getattr(self._inner, name)

    is_server_up = True
    connections: list[Connection] = []

    def connect() -> tuple[Any, str]:
        connections.append(Connection())
        return connections[-1], str(tmp_path / "landing")

    destination = StagedDestination("sftp://host/landing", connect, token="00", one_at_a_time=True)
    files = [make(tmp_path / "events", event_file, number) for number in range(4)]
    destination.deliver(*files[0])
    destination.deliver(*files[1])
    assert len(connections) == 1
    connections[0].is_up = False  # nothing was shipped for a while
    destination.deliver(*files[2])
    assert len(connections) == 2
    connections[1].is_up = is_server_up = False
    for made in (3, 4):  # it is the server, and not the connection: one trial each
        with pytest.raises(ShippingError) as caught:
            destination.deliver(*files[3])
        assert caught.value.reason == "unreachable"
        assert len(connections) == made
    is_server_up = True
    destination.deliver(*files[3])
    assert set(everything(tmp_path / "landing")) == {path for path, _ in files}


def test_credentials_that_were_renewed_are_read_again(tmp_path: Path, event_file: Any) -> None:
    """As s3fs: it reads ~/.aws when it is made, and what a store refuses with is a PermissionError."""

    class Client:
        def __init__(self) -> None:
            import fsspec

            self._token = token
            self._inner = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)

        def __getattr__(self, name: str) -> Any:
            if self._token != token:
                raise PermissionError(errno.EACCES, "The provided token has expired.")
            return getattr(self._inner, name)

    token, made = "monday", []

    def connect() -> tuple[Any, str]:
        made.append(Client())
        return made[-1], str(tmp_path / "landing")

    destination = ObjectDestination("s3://bucket/landing", connect)
    files = [make(tmp_path / "events", event_file, number) for number in range(2)]
    destination.deliver(*files[0])
    token = "tuesday"
    with pytest.raises(ShippingError) as caught:
        destination.deliver(*files[1])
    assert caught.value.reason == "denied"
    destination.deliver(*files[1])
    assert len(made) == 2
    assert set(everything(tmp_path / "landing")) == {path for path, _ in files}


def test_exceptions_of_libraries_become_reasons(tmp_path: Path, content: tuple[str, Content]) -> None:
    class EndpointConnectionError(Exception):
        """As botocore's."""

    cases = [
        (FileNotFoundError("bucket"), "no_such_place"),
        (PermissionError("no"), "denied"),
        (TimeoutError("late"), "unreachable"),
        (ConnectionResetError("gone"), "unreachable"),
        (OSError(errno.ENOSPC, "full"), "no_space"),
        (OSError(errno.EHOSTUNREACH, "no route"), "unreachable"),
        (OSError(errno.ESTALE, "the server of the file system is another one"), "unreachable"),
        (EndpointConnectionError("where"), "unreachable"),
        (RuntimeError("sftp://me:hunter2@host/ hunter2 said no"), "failed"),
    ]
    for error, reason in cases:
        assert reason_of(error) == reason

        def connect(error: Exception = error) -> tuple[Any, str]:
            raise error

        destination = StagedDestination("sftp://me:hunter2@host/", connect, token="00")
        assert destination.text == "sftp://…@host/"
        with pytest.raises(ShippingError) as caught:
            destination.deliver(*content)
        assert caught.value.reason == reason and "hunter2" not in str(caught.value)


# --- targets and options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("/var/events", "neither the directory"),
        ("/var/events/landing", "neither the directory"),
        ("/var", "neither the directory"),
        ("file:///var/events", "neither the directory"),
        ("nonsense://host/x", "not known to fsspec"),
        ("memory://landing", "is lost when it ends"),
        ("s3://", "must be a directory or a URL"),
        ("s3://[bad/x", "must be a directory or a URL"),
        ("sftp://me:hunter2@[fe80]/x", "must be a directory or a URL"),
        ("s3://bad]/x", "must be a directory or a URL"),
        ("simplecache::s3://bucket/x", "must be a directory or a URL"),
    ],
)
def test_targets_that_can_never_work(target: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_target(target, "/var/events", {})


def test_targets_that_may(tmp_path: Path) -> None:
    for target in (str(tmp_path), f"file://{tmp_path}", "s3://bucket/prefix", "hdfs://namenode:8020/landing"):
        check_target(target, "/var/events", {})
    with pytest.raises(ConfigError, match="takes none"):
        check_target(str(tmp_path), "/var/events", {"a": 1})


def test_local_targets_do_without_fsspec() -> None:
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fsspec", "s3fs", "pyarrow"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
from dmsg.errors import ConfigError
from dmsg.shipping.destinations import check_target
check_target("/a", "/b", {})
try:
    check_target("s3://bucket", "/b", {})
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=True)
    assert b"install dmsg[ship] or dmsg[s3]" in done.stdout


def test_options() -> None:
    assert parse_options(None) == {} == parse_options("  ")
    text = "endpoint_url=http://127.0.0.1:9000 anon=false port=8020 config_kwargs.s3.addressing_style=path"
    assert parse_options(f"{text} config_kwargs.s3.x=1.5") == {
        "endpoint_url": "http://127.0.0.1:9000",
        "anon": False,
        "port": 8020,
        "config_kwargs": {"s3": {"addressing_style": "path", "x": 1.5}},
    }
    for wrong in ("endpoint_url", "=x", "a.=x", "a=1 a.b=2"):
        with pytest.raises(ConfigError):
            parse_options(wrong)


@pytest.mark.parametrize(
    "name", ["key", "secret", "token", "client_kwargs.aws_secret_access_key", "password", "account_key", "sas_token"]
)
def test_credentials_are_no_options(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(f"{name}=hunter2")
    assert "environment" in str(caught.value) and "hunter2" not in str(caught.value)


# --- S3 ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(bucket: Any) -> Callable[..., Any]:
    """``s3(read_back=False)``: a destination in the bucket."""

    def make(read_back: bool = False, **options: Any) -> Any:
        given = {"endpoint_url": bucket.endpoint, "region": "us-east-1", **options}
        return open_destination(f"{bucket.url}/land/", given, read_back=read_back, random=os.urandom)

    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"botocore|aiobotocore|s3fs")
    return make


@pytest.mark.parametrize("read_back", [False, True])
def test_s3_takes_files_once(s3: Any, bucket: Any, content: tuple[str, Content], read_back: bool) -> None:
    path, what = content
    for _ in range(2):
        s3(read_back).deliver(path, what)
        assert bucket.keys() == [f"land/{path}"]
        assert hashlib.sha256(bucket.get(f"land/{path}")).hexdigest() == what.sha256


def test_s3_leaves_other_content_as_it_is(s3: Any, bucket: Any, content: tuple[str, Content]) -> None:
    path, what = content
    data = Path(what.path).read_bytes()
    for wrong in (b"something else", data[:-1] + bytes((data[-1] ^ 1,))):
        bucket.put(f"land/{path}", wrong)
        with pytest.raises(ShippingError) as caught:
            s3().deliver(path, what)
        assert caught.value.reason == "conflict"
        assert bucket.get(f"land/{path}") == wrong


def test_s3_creates_only_what_is_not_there(s3: Any, bucket: Any, content: tuple[str, Content]) -> None:
    """Another writer makes the object after it was looked for: the store itself refuses ours."""
    path, what = content
    destination = s3()
    real = destination.put

    def late(file_system: Any, final: str, which: Content) -> None:
        bucket.put(f"land/{path}", b"quicker")
        real(file_system, final, which)

    destination.put = late
    with pytest.raises(ShippingError) as caught:
        destination.deliver(path, what)
    assert caught.value.reason == "conflict" and bucket.get(f"land/{path}") == b"quicker"


def test_s3_in_parts(s3: Any, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of several parts has no MD5 to compare: it is read back."""
    from s3fs import S3FileSystem

    real = S3FileSystem._put_file

    async def in_parts(self: Any, lpath: str, rpath: str, **more: Any) -> Any:
        return await real(self, lpath, rpath, **{**more, "chunksize": 5 * 2**20})

    monkeypatch.setattr(S3FileSystem, "_put_file", in_parts)
    path = tmp_path / "big"
    path.write_bytes(data := os.urandom(11 * 2**20))
    whole = Content(
        str(path), len(data), 1, hashlib.sha256(data).hexdigest(), hashlib.md5(data).hexdigest(), path.stat()
    )
    for _ in range(2):
        s3().deliver("big", whole)
        assert bucket.keys() == ["land/big"] and bucket.get("land/big") == data
    assert re.search(r"<ETag>[^<]*-3[^<]*<", bucket.listing())


@pytest.mark.parametrize(
    ("options", "where", "reason"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, None, "unreachable"),
        ({}, "s3://no-such-bucket-here", "no_such_place"),
    ],
)
def test_s3_that_cannot_be_reached(
    bucket: Any, content: tuple[str, Content], options: dict[str, str], where: str | None, reason: str
) -> None:
    given = {"endpoint_url": bucket.endpoint, **options}
    destination = open_destination(where or bucket.url, given, read_back=False, random=os.urandom)
    with pytest.raises(ShippingError) as caught:
        destination.deliver(*content)
    assert caught.value.reason == reason


def test_a_store_that_knows_no_conditions_is_asked_without(tmp_path: Path, content: tuple[str, Content]) -> None:
    path, what = content
    asked: list[Any] = []

    class Answer(Exception):
        """As botocore's ClientError."""

        response: dict[str, Any] = {"Error": {"Code": "NotImplemented"}}  # noqa: RUF012

    class Old:
        """An S3 of long ago."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def put_file(self, local: str, remote: str, mode: str = "overwrite", **more: Any) -> None:
            asked.append(mode)
            if mode == "create":
                raise OSError(5, "a header is not implemented") from Answer()
            self._inner.put_file(local, remote)

    def connect() -> tuple[Any, str]:
        import fsspec

        return Old(fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)), str(tmp_path / "landing")

    destination = ObjectDestination("s3://bucket", connect, conditional=True)
    for name in (path, f"{path}.2"):
        destination.deliver(name, what)
    assert asked == ["create", "overwrite", "overwrite"]
    assert set(everything(tmp_path / "landing")) == {path, f"{path}.2"}
