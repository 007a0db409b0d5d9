"""The rules of the house: who may import what, where the reactor comes from, how long and how well told modules are.

Files are found, not listed: a new one is held to all of this from its first day.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dmsg"
LINE_LIMIT = 450
#: Modules with a limit of their own: this one is a table, a class for each thing that can go wrong.
LONGER = {"dmsg.errors": 600}

#: Slices: one for each protocol. They know nothing of each other.
SLICES = {"mux", "discovery"}
#: Modules of a slice that any other may import: what an entry is, is common knowledge.
COMMON = {"dmsg.discovery.entry"}
#: The places where one slice hands over to another, each with its reason. None may be added without one.
JOINTS = {
    # an endpoint string names its discovery by URL; imported only when one does
    ("dmsg.mux.sharing", "dmsg.discovery.client"),
    # and its list of relays by file or URL; imported only when it does
    ("dmsg.mux.sharing", "dmsg.discovery.relay_list_source"),
}

#: The parts of dmsg.mux that know Twisted. All other modules there are pure, and so is every new one until it is listed.
MUX_SHELLS = {
    "client",
    "dialer",
    "endpoints",
    "feed",
    "goal",
    "incoming",
    "link",
    "listed",
    "listener",
    "lookups",
    "pending",
    "pool",
    "prover",
    "rankwatch",
    "refusals",
    "registrar",
    "relaystate",
    "server",
    "server_shell",
    "services",
    "session",
    "sharing",
    "timers",
    "transport",
}
PURE_PACKAGES = ("crypto", "sansio")
PURE_MODULES = {
    "dmsg",
    "dmsg.errors",
    "dmsg.foreign",
    "dmsg.address",
    "dmsg.discovery.entry",
    "dmsg.discovery.entry_cache",
    "dmsg.discovery.http_places",
    "dmsg.discovery.http_rates",
    "dmsg.discovery.ranks",
    "dmsg.discovery.relay_list",
    "dmsg.discovery.signed",
    "dmsg.discovery.proof_budgets",
    "dmsg.discovery.proof_limits",
    "dmsg.discovery.proof_queue",
    "dmsg.discovery.proof_schedule",
    "dmsg.discovery.relay_addresses",
    "dmsg.discovery.relay_cache",
    "dmsg.discovery.relay_record",
    "dmsg.ops.events",
    "dmsg.ops.loglines",
    "dmsg.ops.lognames",
    "dmsg.ops.shipping",
}

#: library -> the modules that may import it.
OWNERS = {
    "coincurve": {"dmsg.crypto.keys"},
    "noise": {"dmsg.crypto.noise"},
    "cryptography": {"dmsg.crypto.aead", "dmsg.crypto.box", "dmsg.crypto.noise"},
    "klein": {"dmsg.discovery.api"},
    "werkzeug": {"dmsg.discovery.api"},
    "treq": {"dmsg.discovery.http_client"},
    "txredisapi": {"dmsg.discovery.store_redis"},
    "sqlite3": {"dmsg.discovery.store_table"},
    "prometheus_client": {"dmsg.ops.metrics"},
    "zstandard": {"dmsg.ops.compress"},
    "fsspec": {"dmsg.ops.destinations"},
    "platformdirs": {"dmsg.mux.relaystate"},
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
        """``mux`` for ``dmsg.mux.wire``; the module's own name at the top level."""
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


def _modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


MODULES = _modules()
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


def _is_pure(name: str) -> bool:
    _, _, rest = name.partition(".")
    package, _, module = rest.partition(".")
    if package in PURE_PACKAGES or name in PURE_MODULES:
        return True
    return package == "mux" and module not in MUX_SHELLS


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
    pure = sorted(name for name in NAMES if _is_pure(name))
    assert {"dmsg.errors", "dmsg.crypto.keys", "dmsg.mux.wire", "dmsg.sansio.limits"} <= set(pure)
    source = f"""
import importlib, sys

class Blocker:
    blocked = {{"twisted", "zope", "klein", "treq", "automat"}}
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


def test_shells_that_are_listed_are_there_and_need_to_be_listed():
    for name in MUX_SHELLS:
        assert f"dmsg.mux.{name}" in NAMES, f"dmsg.mux.{name} is listed as a shell and does not exist"


@rule
def test_pure_modules_ask_no_clock_and_no_dice(module: Module) -> Iterator[str]:
    """Clocks and randomness are arguments of pure modules, and what happens there is told by events."""
    forbidden = {"time", "random", "secrets", "socket", "asyncio", "threading", "logging", "select", "subprocess"}
    for name, node in module.imports():
        if _is_pure(module.name) and name.partition(".")[0] in forbidden:
            yield f"{module.path}:{node.lineno}: a pure module imports {name}"


@rule
def test_slices_know_nothing_of_each_other(module: Module) -> Iterator[str]:
    """They meet in dmsg.taps, and at the joints."""
    for name, node in module.imports():
        for other in SLICES - {module.slice}:
            if module.slice in SLICES and _under(name, f"dmsg.{other}"):
                common = any(_under(name, one) for one in COMMON)
                joint = any(one == module.name and _under(name, target) for one, target in JOINTS)
                if not common and not joint:
                    yield f"{module.path}:{node.lineno}: {module.slice} imports {name}"


def test_joints_are_still_needed():
    for name, target in JOINTS:
        [module] = [one for one in MODULES if one.name == name]
        assert any(_under(imported, target) for imported, _ in module.imports()), f"{name} no longer imports {target}"


@rule
def test_lower_floors_do_not_look_up(module: Module) -> Iterator[str]:
    """The common ground imports no slice; only entrances import entrances; only tests import the test kit."""
    ground = module.slice in ("glue", "sansio", "crypto", "ops", "errors", "address")
    for name, node in module.imports():
        if not _under(name, "dmsg"):
            continue
        package = ([*name.split("."), ""])[1]
        if (
            (ground and package in SLICES)
            or (package in ("taps", "cli") and module.slice not in ("taps", "cli"))
            or (package == "testing" and module.slice != "testing")
            or (module.slice in PURE_PACKAGES and package not in (*PURE_PACKAGES, "errors", ""))
        ):
            yield f"{module.path}:{node.lineno}: {module.name} imports {name}"


@rule
def test_libraries_have_one_owner(module: Module) -> Iterator[str]:
    """It translates their exceptions, so that nobody else has to know them."""
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
    """Importing the reactor installs one: nobody may when imported."""
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
    "dmsg.taps.server",
    "dmsg.taps.shipper",
    "dmsg.testing.harness",
}


@rule
def test_only_entrances_ask_for_the_reactor(module: Module) -> Iterator[str]:
    """Everybody else is given it."""
    for name, node in module.imports():
        if _under(name, "twisted.internet.reactor") and module.name not in REACTOR_USERS:
            yield f"{module.path}:{node.lineno}: the reactor is an argument"


def test_importing_installs_no_reactor():
    """In one interpreter, one after the other: whoever installs one is named."""
    # What needs Klein or treq is imported by makeService and main only: these install a reactor when imported.
    heavy = {f"dmsg.discovery.{name}" for name in ("api", "client", "http_client", "store_redis")}
    names = sorted(name for name in NAMES - heavy if not _under(name, "dmsg.cli"))
    assert "dmsg.mux.client" in names
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
    assert len(writes.pop("dmsg.discovery.http_limits", [0])) == 1
    assert {name: len(lines) for name, lines in writes.items()} == {"dmsg.glue.shell": 1}


# --- modules for readers -------------------------------------------------------------------------------------------------


@rule
def test_modules_are_short(module: Module) -> Iterator[str]:
    """Whoever reads one can keep it in mind."""
    lines = len(module.path.read_text("utf-8").splitlines())
    if lines > LONGER.get(module.name, LINE_LIMIT):
        yield f"{module.path} has {lines} lines: split it by nouns"


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


# --- the rules themselves ----------------------------------------------------------------------------------------------

OFFENCES = [
    (test_pure_modules_ask_no_clock_and_no_dice, "dmsg.mux.new", "import time"),
    (test_pure_modules_ask_no_clock_and_no_dice, "dmsg.sansio.new", "def f():\n    from random import Random"),
    (test_slices_know_nothing_of_each_other, "dmsg.mux.new", "from dmsg.discovery import store"),
    (test_slices_know_nothing_of_each_other, "dmsg.mux.new", "from ..discovery.client import HttpDiscovery"),
    (test_slices_know_nothing_of_each_other, "dmsg.discovery.new", "def f():\n    import dmsg.mux.client"),
    (test_lower_floors_do_not_look_up, "dmsg.glue.new", "from dmsg.mux.events import Opened"),
    (test_lower_floors_do_not_look_up, "dmsg.mux.new", "from dmsg import testing"),
    (test_lower_floors_do_not_look_up, "dmsg.mux.new", "from dmsg.taps import server"),
    (test_lower_floors_do_not_look_up, "dmsg.crypto.new", "from dmsg.address import HostPort"),
    (test_libraries_have_one_owner, "dmsg.mux.new", "from coincurve.keys import PrivateKey"),
    (test_libraries_have_one_owner, "dmsg.cli.new", "import klein"),
    (test_libraries_have_one_owner, "dmsg.ops.new", "import click"),
    (test_no_module_imports_the_reactor, "dmsg.mux.client", "from twisted.internet import defer, reactor"),
    (test_no_module_imports_the_reactor, "dmsg.mux.client", "try:\n    import twisted.internet.reactor\nfinally: pass"),
    (test_only_entrances_ask_for_the_reactor, "dmsg.mux.client", "def f():\n    from twisted.internet import reactor"),
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
