"""The rules of the house: who may import what, where the reactor comes from, how long and how well told modules are.

Files are found, not listed: a new one is held to all of this from its first day.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dmsg"
LINE_LIMIT = 500

#: Floors, from the ground up: a module imports from its own floor and those below.
FLOORS = (
    {"", "errors", "foreign", "crypto", "address", "sansio"},
    {"interfaces", "glue", "http", "eventlog"},
    {"discovery", "relays", "clients", "endpoints", "ops", "shipping"},
    {"serving"},
    {"mux", "messaging", "rmb"},
    {"testing"},
    {"taps", "cli"},
)
#: Floor of a package, by the package's name.
FLOOR = {package: number for number, packages in enumerate(FLOORS) for package in packages}
#: Protocols. They import nothing of each other: they meet in dmsg.taps and dmsg.cli.
PROTOCOLS = {"mux", "messaging", "rmb"}
#: Values that every floor may import, also those below the floor that declares them.
COMMON = {"dmsg.discovery.entry", "dmsg.discovery.ranks", "dmsg.eventlog.reasons", "dmsg.eventlog.schema"}
#: Pure packages, beside every package that is called core.
PURE_PACKAGES = ("crypto", "sansio")

#: library -> the modules that may import it.
OWNERS = {
    "coincurve": {"dmsg.crypto.keys"},
    "noise": {"dmsg.crypto.noise"},
    "cryptography": {"dmsg.crypto.aead", "dmsg.crypto.ed25519"},
    "sr25519": {"dmsg.rmb.core.keys"},
    "mnemonic": {"dmsg.rmb.core.keys"},
    "klein": {"dmsg.discovery.api"},
    "werkzeug": {"dmsg.discovery.api"},
    "google": {"dmsg.rmb.core.wire", "dmsg.rmb.core.proto.envelope_pb2", "dmsg.rmb.core.proto.backlog_pb2"},
    "treq": {"dmsg.http.client"},
    "sqlite3": {"dmsg.discovery.stores.table", "dmsg.rmb.relay.stores.sqlite"},
    "prometheus_client": {"dmsg.ops.metrics"},
    "zstandard": {"dmsg.eventlog.compress"},
    "fsspec": {"dmsg.shipping.destinations"},
    "platformdirs": {"dmsg.relays.state"},
    "hypothesis": {"dmsg.testing.strategies"},
}
#: library -> the package it stays in.
HOMES = {"click": "dmsg.cli", "rich": "dmsg.cli"}


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str
    path: Path

    @property
    def slice(self) -> str:
        """``mux`` for ``dmsg.mux.core.wire``; the module's own name at the top level."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def tree(self) -> ast.Module:
        return _parse(self.path)

    def imports(self) -> Iterator[tuple[str, ast.stmt]]:
        """Every imported module, names imported from a package included: ``from a import b`` gives a and a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.name.split(".")
                    above = above if self.path.name == "__init__.py" else above[:-1]
                    above = above[: len(above) - node.level + 1]
                    base = ".".join([*above, base]).rstrip(".")
                yield base, node
                for alias in node.names:
                    yield f"{base}.{alias.name}", node


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def _modules(package: Path) -> list[Module]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


MODULES = _modules(PACKAGE)
PIPELINE = _modules(ROOT / "spark" / "dmsg_logs")
NAMES = {module.name for module in MODULES}
Check = Callable[[Module], Iterator[str]]


def rule(check: Check) -> Callable[[], None]:
    """Make a test of ``check``, which tells what is wrong with one module: all modules, all that is wrong with them."""

    def test() -> None:
        problems = [problem for module in MODULES for problem in check(module)]
        assert not problems, "\n".join(problems)

    test.__doc__ = check.__doc__
    test.check = check  # type: ignore[attr-defined]
    return test


def _is_pure(module: Module) -> bool:
    """By its place, or because its docstring says "Pure."."""
    parts = module.name.split(".")
    docstring = ast.get_docstring(module.tree) or ""
    return module.slice in PURE_PACKAGES or "core" in parts[:-1] or bool(re.search(r"\bPure[.;:]", docstring))


def _under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _python(source: str) -> str:
    """Run ``source`` in a fresh interpreter; its output."""
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# --- who imports whom --------------------------------------------------------------------------------------------------


def test_pure_modules_do_without_twisted():
    pure = sorted(module.name for module in MODULES if _is_pure(module))
    assert {"dmsg.errors", "dmsg.crypto.keys", "dmsg.mux.core.wire", "dmsg.mux.relay.switch"} <= set(pure)
    source = f"""
import importlib, sys

class Blocker:
    blocked = {{"twisted", "zope", "klein", "treq"}}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ImportError(f"{{name}} is not for pure modules")

sys.meta_path.insert(0, Blocker())
failed = []
for name in {pure!r}:
    try:
        importlib.import_module(name)
    except ImportError as problem:
        failed.append(f"{{name}}: {{problem}}")
assert not failed, failed
print(len({pure!r}), "imported")
"""
    assert _python(source) == f"{len(pure)} imported\n"


@rule
def test_pure_modules_ask_no_clock_and_no_dice(module: Module) -> Iterator[str]:
    """Clocks and randomness are arguments of pure modules, and what happens there is told by events."""
    forbidden = {"time", "random", "secrets", "socket", "asyncio", "threading", "logging", "select", "subprocess"}
    for name, node in module.imports():
        if _is_pure(module) and name.partition(".")[0] in forbidden:
            yield f"{module.path}:{node.lineno}: a pure module imports {name}"


@rule
def test_imports_go_down(module: Module) -> Iterator[str]:
    """A floor knows its own modules and those below; protocols do not know each other."""
    for name, node in module.imports():
        if not _under(name, "dmsg") or any(_under(name, one) for one in COMMON):
            continue
        package = ([*name.split("."), ""])[1]
        looks_up = FLOOR.get(package, 0) > FLOOR[module.slice]
        strangers = module.slice in PROTOCOLS and package in PROTOCOLS - {module.slice}
        if looks_up or strangers:
            yield f"{module.path}:{node.lineno}: {module.name} imports {name}"


def test_every_package_has_a_floor():
    assert {module.slice for module in MODULES} <= set(FLOOR)


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of two and more modules each of which reaches the others by imports."""
    reach: dict[str, set[str]] = {}
    for start in imports:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in imports[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        reach[start] = seen
    found = {frozenset({name} | {other for other in reach[name] if name in reach[other]}) for name in imports}
    return sorted((set(one) for one in found if len(one) > 1), key=sorted)


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert circles(imports) == [{"a", "b", "c"}]


@pytest.mark.parametrize("modules", [MODULES, PIPELINE], ids=["dmsg", "the log pipeline"])
def test_no_module_imports_itself_through_others(modules: list[Module]) -> None:
    """Imports for type checking count: modules that need each other's types are one module, or need a third one."""
    names = {module.name for module in modules}
    imports = {}
    for module in modules:
        found = {name for name, _ in module.imports()} & names - {module.name}
        # ``from package import module`` is an import of the module, even if the package has a face that imports it, too.
        imports[module.name] = {one for one in found if not any(name.startswith(f"{one}.") for name in found)}
    assert circles(imports) == []


@rule
def test_pure_packages_import_pure_modules(module: Module) -> Iterator[str]:
    """And the crypto and sansio packages nothing but themselves and errors."""
    if module.slice not in PURE_PACKAGES and "core" not in module.name.split("."):
        return
    for name, node in module.imports():
        for other in MODULES:
            if other.name == name and other.path.name != "__init__.py" and not _is_pure(other):
                yield f"{module.path}:{node.lineno}: {module.name} imports {name}"
        package = ([*name.split("."), ""])[1]
        if module.slice in PURE_PACKAGES and _under(name, "dmsg") and package not in (*PURE_PACKAGES, "errors", ""):
            yield f"{module.path}:{node.lineno}: {module.name} imports {name}"


@rule
def test_libraries_have_one_owner(module: Module) -> Iterator[str]:
    """The owner translates their exceptions, so that no other module has to know them."""
    for name, node in module.imports():
        top = name.partition(".")[0]
        if top in OWNERS and module.name not in OWNERS[top]:
            yield f"{module.path}:{node.lineno}: {top} belongs to {sorted(OWNERS[top])}"
        if top in HOMES and not _under(module.name, HOMES[top]):
            yield f"{module.path}:{node.lineno}: {top} stays in {HOMES[top]}"


def test_owners_exist():
    assert set().union(*OWNERS.values()) <= NAMES


# --- the reactor -------------------------------------------------------------------------------------------------------


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: classes, ifs and tries are entered, functions are not."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


@rule
def test_no_module_imports_the_reactor(module: Module) -> Iterator[str]:
    """Importing the reactor installs one; importing a module of ours must not."""
    for node in _top_level(module.tree.body):
        if isinstance(node, ast.ImportFrom):
            found = node.module == "twisted.internet" and any(alias.name == "reactor" for alias in node.names)
            found = found or node.module == "twisted.internet.reactor"
        else:
            found = isinstance(node, ast.Import) and any(a.name == "twisted.internet.reactor" for a in node.names)
        if found:
            yield f"{module.path}:{node.lineno}: imports the reactor"


#: Where the reactor may be asked for at all: entrances, and the test kit's default.
REACTOR_USERS = {
    "dmsg.cli.runner",
    "dmsg.taps.discovery",
    "dmsg.taps.messaging_server",
    "dmsg.taps.rmb_peer",
    "dmsg.taps.rmb_relay",
    "dmsg.taps.server",
    "dmsg.taps.shipper",
    "dmsg.testing.harness",
}


@rule
def test_only_entrances_ask_for_the_reactor(module: Module) -> Iterator[str]:
    """All other modules are given it."""
    for name, node in module.imports():
        if _under(name, "twisted.internet.reactor") and module.name not in REACTOR_USERS:
            yield f"{module.path}:{node.lineno}: the reactor is an argument"


def test_importing_installs_no_reactor():
    """In one interpreter, one after the other: the module that installs one is named."""
    # What needs Klein or treq is imported by makeService and main only: these install a reactor when imported.
    heavy = {"dmsg.discovery.api", "dmsg.discovery.client", "dmsg.discovery.stores.redis", "dmsg.http.client"}
    names = sorted(NAMES - heavy)
    assert "dmsg.mux.client.service" in names
    assert "dmsg.taps.server" in names
    source = f"""
import importlib, sys
sys.path.insert(0, {str(ROOT)!r})
for name in {names!r} + ["twisted.plugins.dmsg_plugins"]:
    importlib.import_module(name)
    assert "twisted.internet.reactor" not in sys.modules, f"importing {{name}} installs the reactor"
print("none")
"""
    assert _python(source) == "none\n"


def test_the_package_itself_imports_nothing():
    [package] = [module for module in MODULES if module.name == "dmsg"]
    assert list(package.imports()) == []


# --- one socket write --------------------------------------------------------------------------------------------------


def _socket_writes(module: Module) -> list[int]:
    """The lines of ``….transport.write(…)`` and ``….transport.writeSequence(…)``."""
    return [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("write", "writeSequence")
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr in ("transport", "_transport")
    ]


def test_there_is_one_socket_write():
    """All that a protocol sends leaves through the shell. Commands and tests are applications, and write as such."""
    writes = {m.name: lines for m in MODULES if m.slice not in ("cli", "testing") and (lines := _socket_writes(m))}
    # The refusal of an HTTP request whose head is not even complete: there is no request to answer through yet.
    assert len(writes.pop("dmsg.http.server", [0])) == 1
    assert {name: len(lines) for name, lines in writes.items()} == {"dmsg.glue.shell": 1}


# --- states ------------------------------------------------------------------------------------------------------------


def _state_writes(tree: ast.AST, function: str = "") -> Iterator[int]:
    """The lines that write an attribute ``state`` elsewhere than on ``self`` in ``__init__``, ``move`` or ``_move``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store | ast.Del):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not own or function not in ("__init__", "move", "_move"):
                yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            words = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if called in ("setattr", "delattr", "__setattr__", "__delattr__") and "state" in words:
                yield node.lineno
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _state_writes(node, getattr(node, "name", "") if is_function else function)


@rule
def test_states_have_one_writer(module: Module) -> Iterator[str]:
    """``move`` looks into the table of transitions; nothing goes past it."""
    for line in _state_writes(module.tree):
        yield f"{module.path}:{line}: a state is written elsewhere than in move()"


@rule
def test_streams_are_not_told_apart_by_their_class(module: Module) -> Iterator[str]:
    """What differs between a plain and a sealed one is a method or an attribute of both."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            kinds = {one.id for one in ast.walk(node.args[1]) if isinstance(one, ast.Name)}
            if kinds & {"PlainStream", "SealedStream"}:
                yield f"{module.path}:{node.lineno}: asks for the class of a stream"


# --- modules for readers -------------------------------------------------------------------------------------------------


@rule
def test_modules_are_short(module: Module) -> Iterator[str]:
    """A reader can keep one in mind."""
    lines = len(module.path.read_text("utf-8").splitlines())
    if lines > LINE_LIMIT:
        yield f"{module.path} has {lines} lines: split it by nouns"


def test_modules_of_the_log_pipeline_are_short() -> None:
    assert [problem for module in PIPELINE for problem in test_modules_are_short.check(module)] == []


def _dictated(name: str) -> bool:
    """Whether a method's meaning is Twisted's or Python's: their interfaces have the docstring."""
    return name.startswith("_") or any(letter.isupper() for letter in name)


def _public(body: list[ast.stmt], inside: str = "", in_class: bool = False) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield inside + node.name, node
            yield from _public(node.body, f"{inside}{node.name}.", True)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            overload = any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)
            setter = any(isinstance(one, ast.Attribute) and one.attr == "setter" for one in node.decorator_list)
            if not overload and not setter and not (in_class and _dictated(node.name)):
                yield inside + node.name, node


@rule
def test_everything_public_has_a_docstring(module: Module) -> Iterator[str]:
    """Modules, classes, functions and methods that are ours."""
    if not ast.get_docstring(module.tree):
        yield f"{module.path} has no docstring"
    for name, node in _public(module.tree.body):
        if not ast.get_docstring(node):
            yield f"{module.path}: {name} has no docstring"


# --- what is searched by a fuzzer --------------------------------------------------------------------------------------

#: Three quarters of a pure module's functions are to be reached by the kept corpus of some target.
REACHED_PERCENT = 75
#: With fewer lines in functions, a module is part of another one's subject.
REACHED_LINES = 10
#: What is not searched, and why. Modules of errors are left out, too: their texts are not worth a target.
NOT_SEARCHED = {
    "dmsg/crypto/private_files.py": "it reads files of our own disk, and nothing in them",
}
#: Its core is not installed with ours; the log pipeline's tests replay it.
PIPELINE_TARGET = "plain_lines"


@pytest.mark.time_limit(300)
def test_a_target_of_the_fuzzer_reaches_each_pure_module() -> None:
    """What bytes of strangers get to is searched, also what is written tomorrow: ``docs/explanation/fuzzing.rst``."""
    pure = [str(module.path.relative_to(ROOT)) for module in MODULES if _is_pure(module)]
    errors = {path for path in pure if path.endswith("/errors.py")}
    targets = {path.stem for path in (ROOT / "fuzz" / "targets").glob("[a-z]*.py")} - {PIPELINE_TARGET}
    command = [
        *(sys.executable, "-m", "fuzz.reach", *pure),
        *("--targets", *sorted(targets)),
        *("--below", str(REACHED_PERCENT), "--least", str(REACHED_LINES)),
        *("--but", *sorted(errors), *NOT_SEARCHED),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    found = {line.split()[4]: line for line in result.stdout.splitlines()}
    assert set(found) - errors == set(NOT_SEARCHED), result.stdout


# --- the rules themselves ----------------------------------------------------------------------------------------------

OFFENCES = [
    (test_pure_modules_ask_no_clock_and_no_dice, "dmsg.mux.core.new", "import time"),
    (test_pure_modules_ask_no_clock_and_no_dice, "dmsg.sansio.new", "def f():\n    from random import Random"),
    (test_imports_go_down, "dmsg.glue.new", "from dmsg.mux.core.events import Opened"),
    (test_imports_go_down, "dmsg.discovery.new", "def f():\n    import dmsg.mux.client.service"),
    (test_imports_go_down, "dmsg.relays.new", "from ..mux.core import wire"),
    (test_imports_go_down, "dmsg.mux.new", "from dmsg import testing"),
    (test_imports_go_down, "dmsg.mux.new", "from dmsg.taps import server"),
    (test_imports_go_down, "dmsg.mux.new", "from dmsg.messaging.core import link"),
    (test_pure_packages_import_pure_modules, "dmsg.mux.core.new", "from dmsg.glue.shell import Shell"),
    (test_pure_packages_import_pure_modules, "dmsg.crypto.new", "from dmsg.address import HostPort"),
    (test_libraries_have_one_owner, "dmsg.mux.new", "from coincurve.keys import PrivateKey"),
    (test_libraries_have_one_owner, "dmsg.cli.new", "import klein"),
    (test_libraries_have_one_owner, "dmsg.ops.new", "import click"),
    (test_no_module_imports_the_reactor, "dmsg.mux.client.service", "from twisted.internet import defer, reactor"),
    (
        test_no_module_imports_the_reactor,
        "dmsg.mux.client.service",
        "try:\n    import twisted.internet.reactor\nfinally: pass",
    ),
    (
        test_only_entrances_ask_for_the_reactor,
        "dmsg.mux.client.service",
        "def f():\n    from twisted.internet import reactor",
    ),
    (test_states_have_one_writer, "dmsg.mux.core.new", "def f(stream):\n    stream.state = None"),
    (test_states_have_one_writer, "dmsg.mux.core.new", "class A:\n    def open(self):\n        self.state = 1"),
    (test_states_have_one_writer, "dmsg.mux.core.new", "def move(stream):\n    stream.state, x = 1, 2"),
    (test_states_have_one_writer, "dmsg.mux.core.new", "def f(stream):\n    setattr(stream, 'state', 1)"),
    (
        test_streams_are_not_told_apart_by_their_class,
        "dmsg.mux.new",
        "def f(stream):\n    return isinstance(stream, PlainStream | SealedStream)",
    ),
    (test_modules_are_short, "dmsg.mux.new", "x = 1\n" * (LINE_LIMIT + 1)),
    (test_everything_public_has_a_docstring, "dmsg.mux.new", "x = 1"),
    (test_everything_public_has_a_docstring, "dmsg.mux.new", '"""Doc."""\ndef f(): pass'),
    (
        test_everything_public_has_a_docstring,
        "dmsg.mux.new",
        '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): pass',
    ),
]


@pytest.mark.parametrize(("test", "name", "source"), OFFENCES, ids=range(len(OFFENCES)))
def test_rules_find_offenders(test, name, source, tmp_path):
    path = tmp_path / (name.rpartition(".")[2] + ".py")
    path.write_text(source, "utf-8")
    assert list(test.check(Module(name, path)))


def test_socket_writes_are_found(tmp_path):
    path = tmp_path / "new.py"
    path.write_text("self.transport.write(b'')\nself._transport.writeSequence([])\nfile.write(b'')\n", "utf-8")
    assert _socket_writes(Module("dmsg.mux.new", path)) == [1, 2]
