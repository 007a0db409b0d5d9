"""What every test can rely on, and what every test is held to.

Held to: no unhandled error in a Deferred and no error in Twisted's log (``logged_errors.flush`` takes back the ones a
test provokes), no delayed call or open socket left in the reactor, and a time limit (30 s, 120 s for ``system`` tests, or
``@pytest.mark.time_limit(seconds)``) that also ends tests whose Deferred never fires.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import inspect
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import greenlet
import hypothesis
import pytest
import pytest_twisted
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from twisted.internet import defer, task
from twisted.internet.base import DelayedCall
from twisted.logger import LogLevel, globalLogPublisher

from dmsg.glue.lean_epoll import install
from dmsg.glue.reactors import REACTOR_VARIABLE
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.process import free_port

pytest_plugins = ["pytester"]

TIME_LIMIT_S = 30.0
#: For tests that start programs, which share a busy machine with each other.
SYSTEM_TIME_LIMIT_S = 120.0
_USERS_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
#: The functions in which the reactor waits: Twisted's, and that of the reactor of our programs.
_POLLING = ("doPoll", "_turn_until_stopped")
#: A test that is over its limit gets this long to come to an end once its Deferred is cancelled.
CANCEL_GRACE_S = 3.0
#: When all else fails (a loop in C code), the whole run ends this long after a test's time limit.
KILL_GRACE_S = 20.0
#: Sockets that are being closed when a test ends get this long to be gone: the other end has to see it first.
CLOSE_GRACE_S = 1.0

# Two busy cores are no reason for a failure: examples have no deadline of their own, tests have a time limit.
hypothesis.settings.register_profile("dmsg", deadline=None, print_blob=True)
# "make test" is for every change: it tries half as many examples as "make test-core".
hypothesis.settings.register_profile("not long", hypothesis.settings.get_profile("dmsg"), max_examples=50)


class TimeLimitExceeded(BaseException):
    """A test took longer than its limit. Not an ``Exception``: neither tests nor Hypothesis may swallow it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run the tests on the reactor of our programs, and programs on Twisted's own, not the other way round"
    parser.addoption("--swap-reactors", action="store_true", help=about)


@pytest.hookimpl(tryfirst=True)  # before pytest-twisted installs a reactor
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--swap-reactors"):
        install()
        os.environ[REACTOR_VARIABLE] = "epoll"
    hypothesis.settings.load_profile("not long" if config.getoption("markexpr") == "not long" else "dmsg")
    defaults = f"{TIME_LIMIT_S:g} by default, {SYSTEM_TIME_LIMIT_S:g} for system tests"
    config.addinivalue_line("markers", f"time_limit(seconds): how long the test may take ({defaults})")
    # What programs remember from one run to the next is not the user's own while they are tested.
    directory = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="dmsg-state-")
    config.add_cleanup(functools.partial(shutil.rmtree, directory, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """What is there before the tests of a file is no garbage of theirs: the collections after each test need not look at it.

    It is 20 ms for each test otherwise.
    """
    gc.collect()
    gc.freeze()


# --- the guard -------------------------------------------------------------------------------------------------------


def _failure_of(event: Any) -> Any:
    """The failure of an event of Twisted's logger or of its older ``log.err``."""
    return event.get("log_failure") or (event.get("failure") if event.get("isError") else None)


class LoggedErrors:
    """Errors that reached Twisted's log, among them those of Deferreds without a handler."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def __call__(self, event: Any) -> None:
        severe = event.get("log_level") in (LogLevel.critical, LogLevel.error)
        # A Deferred tells of its error twice: once in words, once with the failure.
        in_words = event.get("log_format") == "Unhandled error in Deferred:"
        if _failure_of(event) is not None or (severe and not in_words):
            self._events.append(event)

    def flush(self, *types: type[BaseException]) -> list[Any]:
        """Take back the failures logged so far (of ``types``, or all) and give them: they are what the test wanted."""
        gc.collect()
        taken, kept = [], []
        for event in self._events:
            failure = _failure_of(event)
            wanted = not types or (failure is not None and failure.check(*types) is not None)
            (taken if wanted else kept).append(event)
        self._events = kept
        return [failure for event in taken if (failure := _failure_of(event)) is not None]

    def events(self) -> list[Any]:
        """What is left, as it was logged."""
        return list(self._events)

    def texts(self) -> list[str]:
        """One text for each error left."""
        result = []
        for event in self._events:
            failure = _failure_of(event)
            head = str(event.get("log_format") or "error").split("\n")[0]
            result.append(f"{head}\n{failure.getTraceback()}" if failure is not None else head)
        return result


def _terminal_fd(config: pytest.Config) -> int:
    """A descriptor that reaches the terminal although standard error is captured."""
    from _pytest.faulthandler import fault_handler_stderr_fd_key

    return config.stash.get(fault_handler_stderr_fd_key, 2)


class Watch:
    """The time limit of one test: raises in the test's own code, or cancels the Deferred it waits for."""

    def __init__(self, item: pytest.Item, limit_s: float) -> None:
        self.limit_s = limit_s
        self.used_deferreds = False
        self._item = item
        self._alarms = 0
        self._running: defer.Deferred[Any] | None = None
        self._waiting = greenlet.getcurrent()
        self._codes = {inspect.unwrap(pytest_twisted._async_pytest_pyfunc_call).__code__}

    def start(self) -> None:
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s, CANCEL_GRACE_S)
        faulthandler.dump_traceback_later(self.limit_s + KILL_GRACE_S, exit=True, file=_terminal_fd(self._item.config))

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()

    def around(self, function: Any) -> Any:
        """``function`` with its Deferred remembered. Coroutines are run here, so that none passes without running."""
        self._codes.add(inspect.unwrap(function).__code__)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = defer.Deferred.fromCoroutine(result)
            if isinstance(result, defer.Deferred):
                self.used_deferreds = True
                self._running = result
                result.addBoth(self._finished)
            return result

        return run

    def _finished(self, result: Any) -> Any:
        self._running = None
        if self._alarms:
            raise self._error()
        return result

    def _error(self) -> TimeLimitExceeded:
        return TimeLimitExceeded(f"{self._item.nodeid} took longer than {self.limit_s:g} s")

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        from twisted.internet import reactor

        self._alarms += 1
        if self._alarms > 1:
            print("".join(traceback.format_stack(frame)))
        if greenlet.getcurrent() is self._waiting or self._in_test(frame):
            raise self._error()
        # The reactor runs. Idle, it never comes back to a test whose Deferred does not fire; busy in a callback that
        # does not end, only an exception gets it out of there.
        reactor.callFromThread(self._cancel, self._alarms)
        if self._alarms > 1 and not any(f.f_code.co_name in _POLLING for f in _frames(frame)):
            raise self._error()

    def _in_test(self, frame: FrameType | None) -> bool:
        return any(f.f_code in self._codes for f in _frames(frame))

    def _cancel(self, alarm: int) -> None:
        if alarm == 1 and self._running is not None:
            self._running.cancel()
        elif alarm == self._alarms:
            self._waiting.throw(self._error())


def _frames(frame: FrameType | None) -> list[FrameType]:
    result = []
    while frame is not None:
        result.append(frame)
        frame = frame.f_back
    return result


_watch_key = pytest.StashKey[Watch]()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    watch = pyfuncitem.stash.get(_watch_key, None)
    given = getattr(pyfuncitem.obj, "hypothesis", None)
    if watch is not None and given is not None:
        original = given.inner_test
        given.inner_test = watch.around(original)
        try:
            return (yield)
        finally:
            given.inner_test = original
    if watch is not None:
        pyfuncitem.obj = watch.around(pyfuncitem.obj)
    return (yield)


def _spin(delay_s: float = 0.0) -> None:
    from twisted.internet import reactor

    pytest_twisted.blockon(task.deferLater(reactor, delay_s))


def _open_selectables() -> set[Any]:
    from twisted.internet import reactor

    found = {*reactor.getReaders(), *reactor.getWriters()}
    return found - set(getattr(reactor, "_internalReaders", ()))


def _leftover_calls(before: set[Any]) -> list[str]:
    from twisted.internet import reactor

    if set(reactor.getDelayedCalls()) <= before:
        return []
    _spin()
    _spin()
    left = [call for call in reactor.getDelayedCalls() if call.active() and call not in before]
    texts = [f"delayed call left behind: {call}" for call in left]
    for call in left:
        call.cancel()
    return texts


def _leftover_selectables(before: set[Any]) -> list[str]:
    from twisted.internet import reactor

    give_up = reactor.seconds() + CLOSE_GRACE_S
    while (left := _open_selectables() - before) and reactor.seconds() < give_up:
        _spin(0.005)
    texts = [f"open socket or pipe left behind: {one!r}" for one in left]
    for one in left:
        reactor.removeReader(one)
        reactor.removeWriter(one)
        with contextlib.suppress(Exception):
            handle = getattr(one, "socket", None)
            os.close(one.fileno()) if handle is None else handle.close()
    return texts


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest) -> Any:
    """Fails a test on unhandled errors, leftovers in the reactor, and after its time limit."""
    from twisted.internet import reactor

    item = request.node
    marker = item.get_closest_marker("time_limit")
    default_s = SYSTEM_TIME_LIMIT_S if item.get_closest_marker("system") else TIME_LIMIT_S
    watch = item.stash[_watch_key] = Watch(item, float(marker.args[0]) if marker else default_s)
    errors = item.stash[_errors_key] = LoggedErrors()
    calls, selectables = set(reactor.getDelayedCalls()), _open_selectables()
    globalLogPublisher.addObserver(errors)
    watch.start()
    try:
        yield
        problems = _leftover_calls(calls) + _leftover_selectables(selectables)
    finally:
        watch.stop()
        # Errors of Deferreds show when they are collected. Most are young; a full collection is for tests that
        # worked with Deferreds or have something to tell anyway.
        if watch.used_deferreds or errors.texts() or item.get_closest_marker("system"):
            gc.collect()
        else:
            gc.collect(1)
        globalLogPublisher.removeObserver(errors)
    problems += [f"error in the log, or in a Deferred without a handler: {text}" for text in errors.texts()]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


_errors_key = pytest.StashKey[LoggedErrors]()


# --- fixtures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def signals_are_not_ignored() -> Any:
    """Programs that tests start have signals as users do: nohup ignores SIGHUP, a shell's background SIGINT and SIGQUIT,
    and programs would inherit that."""
    ignored = [each for each in _USERS_SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, lambda number, frame: None)  # a handler, unlike SIG_IGN, is not inherited
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


@pytest.fixture
def logged_errors(guard: None, request: pytest.FixtureRequest) -> LoggedErrors:
    """The errors Twisted logged during this test; ``flush(*types)`` takes back the expected ones."""
    return request.node.stash[_errors_key]


class QuickClock(task.Clock):
    """A ``Clock`` that sorts its calls when it moves, and not with each new one, of which there may be thousands.

    All that is due sees the time that it moved to, as with Twisted's; ``HeapClock`` of the benchmarks stops at each call.
    As a reactor, and unlike Twisted's ``Clock``, it takes no times that have passed.
    """

    def callLater(self, when: float, what: Any, *args: Any, **kwargs: Any) -> DelayedCall:
        assert when >= 0, f"{when} s from now"
        call = DelayedCall(
            self.seconds() + when, what, args, kwargs, self.calls.remove, lambda call: None, self.seconds
        )
        self.calls.append(call)
        return call

    def _sortCalls(self) -> None:
        self.calls.sort(key=DelayedCall.getTime)


@pytest.fixture
def clock() -> task.Clock:
    """A clock that only moves when it is told to."""
    return QuickClock()


@pytest.fixture
def crowded() -> Iterator[Any]:
    """A reactor that does not run, with as many timed calls as a relay with 50,000 sessions of the Reliable Message Bus has."""
    from dmsg.glue.lean_epoll import LeanEpollReactor

    reactor: Any = LeanEpollReactor()
    for _ in range(50_000):
        reactor.callLater(1000.0, lambda: None)
    yield reactor
    reactor.removeAll()
    reactor._poller.close()


@pytest.fixture
def reactor() -> Any:
    """The real reactor, running."""
    from twisted.internet import reactor

    return reactor


@pytest.fixture
def host_names(reactor: Any) -> Iterator[Callable[[str], None]]:
    """``host_names("site")``: until the end of the test, the real reactor knows this name alone, of 127.0.0.1."""
    resolvers = []

    def install(name: str) -> None:
        resolvers.append(reactor.installNameResolver(MemoryNetwork(hosts={name: "127.0.0.1"}).nameResolver))

    yield install
    if resolvers:
        reactor.installNameResolver(resolvers[0])


@pytest.fixture(scope="session")
def self_signed() -> Callable[[x509.GeneralName], bytes]:
    """``self_signed(x509.DNSName("site"))``: a self-signed certificate for it, and its key, in PEM."""

    def make(holder: x509.GeneralName) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(holder.value))])
        now = datetime.datetime.now(datetime.timezone.utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([holder]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    return make


@pytest.fixture(scope="session")
def vectors() -> Any:
    """The golden vectors of the reference implementation."""
    return json.loads((Path(__file__).parent / "vectors" / "dmsg.json").read_text("utf-8"))


@pytest.fixture
def key_file(tmp_path: Path) -> Any:
    """``key_file(secret_key, name="key") -> Path``: writes a key file of mode 0600 into the test's own directory."""
    from dmsg.crypto.keys import SecretKey, write_key_file

    def write(key: SecretKey, name: str = "key") -> Path:
        path = tmp_path / name
        write_key_file(path, key)
        return path

    return write


REDIS_READY_S = 20.0


def _start_redis(program: str, directory: Path, port_option: str, *more: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start one server and wait for the line that says it is ready; fails with its output when it is not."""
    output = b""
    for _ in range(5):
        port = free_port()
        options = [port_option, str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        process = subprocess.Popen(
            [program, *options, "--dir", str(directory), "--daemonize", "no"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(REDIS_READY_S) and (piece := os.read(process.stdout.fileno(), 65536)):
                output += piece
                if b"eady to accept connections" in output:
                    return process, port
        _stop(process)
    raise AssertionError("redis-server did not start:\n" + output.decode("utf-8", "replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="session")
def start_redis() -> Any:
    """``start_redis(directory, port_option="--port", *options) -> port``: a real redis-server until the test run ends."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.fail("these tests need the program redis-server: install Redis", pytrace=False)
    processes = []

    def start(directory: Path, port_option: str = "--port", *options: str) -> int:
        process, port = _start_redis(program, directory, port_option, *options)
        processes.append(process)
        return port

    yield start
    for process in processes:
        _stop(process)


@pytest.fixture(scope="session")
def redis_server(start_redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The loopback port of a real redis-server with an empty directory of its own; ends with the test run."""
    return start_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def redis_url(redis_server: int) -> str:
    """``redis://127.0.0.1:port`` of a real, empty Redis."""
    with socket.create_connection(("127.0.0.1", redis_server), timeout=10) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(100) == b"+OK\r\n"
    return f"redis://127.0.0.1:{redis_server}"


# --- files of event logs, and a store for them -----------------------------------------------------------------------


@pytest.fixture
def event_file() -> Any:
    """``event_file(directory, number=0, lines=3, …) -> Path``: a finished file as a role writes it, one frame a line.

    ``pad`` incompressible bytes are added to each line; ``says`` is what its name says it holds.
    """
    from dmsg.eventlog.compress import Compressor
    from dmsg.eventlog.names import LogFileName

    def write(
        directory: Path,
        number: int = 0,
        *,
        lines: int = 3,
        role: str = "server",
        node: str = "02c6047f9441ed7d",
        hour: int = 5,
        pad: int = 0,
        says: int | None = None,
    ) -> Path:
        folder = directory / f"role={role}" / "date=2026-01-02" / f"hour={hour:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LogFileName(node, "9f2c0011aabbccdd", number, lines if says is None else says).format()
        packer = Compressor()
        made = [{"event": "x", "node": node, "seq": 1000 * number + one} for one in range(lines)]
        texts = [json.dumps({**line, "pad": os.urandom(pad).hex()}).encode() + b"\n" for line in made]
        path.write_bytes(b"".join(packer.frame(text) for text in texts))
        return path

    return write


@pytest.fixture
def landed() -> Any:
    """``landed(directory) -> {path: [seq, …]}``: the finished files of a landing zone and what is in them."""
    from dmsg.eventlog.compress import read_lines

    def read(directory: Path) -> dict[str, list[int]]:
        files = sorted(path for path in directory.rglob("*.jsonl.zst") if not path.name.startswith("."))
        return {
            str(path.relative_to(directory)): [json.loads(line)["seq"] for line in read_lines(path)] for path in files
        }

    return read


S3_ENVIRON = {
    "AWS_ACCESS_KEY_ID": "access-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_S3_PROGRAM = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_server() -> Any:
    """``http://127.0.0.1:port`` of a server that speaks S3, in a process of its own; ends with the test run."""
    process = subprocess.Popen(
        [sys.executable, "-c", _S3_PROGRAM],
        env={**os.environ, **S3_ENVIRON},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None and process.stdout is not None
    port = int(process.stdout.readline())
    yield f"http://127.0.0.1:{port}"
    _stop(process)
    process.stdin.close()


@pytest.fixture
def s3_environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment in which the tests' S3 lets one in; set here, and to be given to processes."""
    for name, value in S3_ENVIRON.items():
        monkeypatch.setenv(name, value)
    return dict(S3_ENVIRON)


class Bucket:
    """A new bucket of the tests' S3, spoken to directly."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self.url = f"s3://{name}"
        self._request("PUT", "")

    def _request(self, method: str, key: str, body: bytes | None = None) -> bytes:
        url = f"{self.endpoint}/{self.name}/{urllib.parse.quote(key)}"
        credential = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"
        headers = {"Authorization": credential, "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return bytes(answer.read())

    def put(self, key: str, body: bytes) -> None:
        """Write an object."""
        self._request("PUT", key, body)

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._request("GET", key)

    def keys(self) -> list[str]:
        """The names of all objects."""
        return sorted(re.findall(r"<Key>([^<]*)</Key>", self.listing()))

    def listing(self) -> str:
        """What the bucket says of its objects."""
        return self._request("GET", "").decode()

    def sync_to(self, directory: Path) -> Path:
        """A copy of everything in the bucket; what has been copied before is taken to be the same."""
        for key in self.keys():
            path = directory / key
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(key))
        return directory


@pytest.fixture
def bucket(s3_server: str, s3_environ: dict[str, str]) -> Bucket:
    """A new, empty bucket."""
    return Bucket(s3_server, f"landing-{os.urandom(6).hex()}")


@pytest.fixture
def served(reactor: Any) -> Any:
    """``served(site)``: the port number it listens on, on loopback, until the test ends."""
    ports = []

    def serve(factory: Any) -> int:
        port = reactor.listenTCP(0, factory, interface="127.0.0.1")
        ports.append(port)
        return int(port.getHost().port)

    yield serve
    for port in ports:
        pytest_twisted.blockon(port.stopListening())


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to import dmsg and its plugins from, so that Twisted's plugin cache is not written to the tree."""
    root, directory = Path(__file__).parents[1], tmp_path_factory.mktemp("site")
    (directory / "dmsg").symlink_to(root / "dmsg")
    (directory / "twisted" / "plugins").mkdir(parents=True)
    (directory / "twisted" / "plugins" / "dmsg_plugins.py").symlink_to(root / "twisted" / "plugins" / "dmsg_plugins.py")
    return directory
