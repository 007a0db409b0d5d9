"""What is depended on: bounds on both sides, a lock file that keeps to them, and what of others' code we replace."""

from __future__ import annotations

import ast
import configparser
import hashlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-analytics.lock", "requirements-fuzz.lock")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ \\]+)(?: ; [^\\]+)? \\$")


def _setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return config


def _requirements(text: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("%(")]


def _of_the_core() -> list[Requirement]:
    config = _setup_cfg()
    extras = dict(config["options.extras_require"])
    extras.pop("all")
    extras.pop("fuzz")
    return _requirements("\n".join([config["options"]["install_requires"], *extras.values()]))


def _of_the_fuzzers() -> list[Requirement]:
    return _requirements(_setup_cfg()["options.extras_require"]["fuzz"])


def _of_the_pipeline() -> list[Requirement]:
    text = (ROOT / "spark" / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|test|bench) = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    assert len(lists) == 3
    return [Requirement(each) for one in lists for each in ast.literal_eval(one)]


def _pins(name: str) -> dict[str, str]:
    """Name -> version of everything in a lock file; each has a hash."""
    pins: dict[str, str] = {}
    current = ""
    for line in (ROOT / name).read_text().splitlines():
        found = _PIN.match(line)
        if found is not None:
            current = canonicalize_name(found[1])
            pins[current] = found[2]
        else:
            assert current and re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    return pins


@pytest.mark.parametrize("requirement", [*_of_the_core(), *_of_the_fuzzers(), *_of_the_pipeline()], ids=str)
def test_every_dependency_has_a_lower_and_an_upper_bound(requirement: Requirement) -> None:
    operators = {one.operator for one in requirement.specifier}
    assert operators in ({">=", "<"}, {"=="}), requirement


def test_the_lock_files_keep_to_the_bounds() -> None:
    core, pipeline, fuzzers = (_pins(name) for name in LOCKS)
    needed = ((core, _of_the_core()), (pipeline, _of_the_pipeline()), (fuzzers, _of_the_fuzzers()))
    for pins, requirements in needed:
        for requirement in requirements:
            if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"}):
                assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    for other in (pipeline, fuzzers):
        shared = core.keys() & other.keys()
        assert shared and {name: core[name] for name in shared} == {name: other[name] for name in shared}


def test_the_lock_files_need_no_resolver() -> None:
    """Everything that is needed by what is needed is in them, with its extras, so that they are installed as they are."""
    for pins, requirements in ((_pins(LOCKS[0]), _of_the_core()), (_pins(LOCKS[1]), _of_the_pipeline())):
        waiting = [(requirement, "") for requirement in requirements]
        seen: set[tuple[str, str]] = set()
        while waiting:
            requirement, extra = waiting.pop()
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            assert name in pins, requirement
            for each in {"", *requirement.extras}:
                if (name, each) not in seen:
                    seen.add((name, each))
                    waiting += [(Requirement(one), each) for one in importlib.metadata.requires(name) or ()]


def test_pip_is_never_asked_to_resolve_what_a_lock_file_says() -> None:
    """It would take a newer version of a package that another wants with an extra, and find no hash for it."""
    rules = (ROOT / "Makefile").read_text()
    assert rules.count("$(PIP_LOCKED)") == rules.count("-r requirements") == len(LOCKS)
    assert re.search(r"^PIP_LOCKED := .*--no-deps --require-hashes$", rules, re.MULTILINE)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_names_no_place_to_get_things_from(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host|file:|@", text)


def test_everything_that_is_imported_is_declared() -> None:
    """A dependency of a dependency may leave with any release of that."""
    declared = {canonicalize_name(one.name) for one in _of_the_core()}
    distributions = importlib.metadata.packages_distributions()
    ours = {"dmsg", *(path.stem for path in (ROOT / "dmsg").rglob("*.py"))}
    missing = set()
    for path in (ROOT / "dmsg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.partition(".")[0] for name in names} - ours:
                found = {canonicalize_name(one) for one in distributions.get(top, ())}
                if found and not found & declared:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert not missing


def test_every_module_is_imported_with_the_oldest_interfaces() -> None:
    """Those of zope.interface before 6.2, which the lower bound allows, cannot be joined by ``|`` as types can.

    All is imported twice: a Twisted newer than the oldest joins interfaces itself.
    """
    script = """
import importlib, pkgutil, sys
from zope.interface.interface import InterfaceClass
import dmsg
names = [module.name for module in pkgutil.walk_packages(dmsg.__path__, "dmsg.")]
for name in names:
    importlib.import_module(name)
for name in names:
    del sys.modules[name]
for name in {"__or__", "__ror__"} & set(vars(InterfaceClass)):
    delattr(InterfaceClass, name)
for name in names:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- noiseprotocol: no release since 2020, and most of it is replaced ----------------------------------------------------


def test_noiseprotocol_is_the_one_release_we_know() -> None:
    assert importlib.metadata.version("noiseprotocol") == "0.3.1"
    [requirement] = [one for one in _of_the_core() if one.name == "noiseprotocol"]
    assert str(requirement.specifier) == "==0.3.1"


#: SHA-256 of the modules that dmsg/crypto/noise.py takes, or replaces a part of. Of state.py it takes the interpreter of
#: patterns; it gives that keys and a symmetric state with everything that is calculated.
READ_AND_JUDGED = {
    "constants.py": "618c9689191cf8df88392bb984f3bb892ac893978f05f5d354ae36b86bd027a8",
    "exceptions.py": "a0b543f9bcddd9600f451e0c26a776270bb5a3123a8b4a5a605b30b4b4626a5d",
    "functions/patterns.py": "f97e240f5394e115ff9a74d00f978eeae76aa42b70ae0ac51cd658133ceed91b",
    "patterns.py": "67942cf0c4ee0512b70a57aaee6886eb1941939ac0e76121e992a36196e82329",
    "state.py": "6c042444e91e06bbe184bf4810e78241848e086ac776e769fdba38c9c31eaecd",
}


def test_no_more_of_noiseprotocol_is_loaded_than_was_read() -> None:
    script = "import sys, dmsg.crypto.noise; print(*(one.__file__ for n, one in sys.modules.items() if n.startswith('noise')))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {one.partition("/noise/")[2] for one in loaded} - {"__init__.py", "functions/__init__.py"} == set(
        READ_AND_JUDGED
    )


@pytest.mark.parametrize("module", READ_AND_JUDGED)
def test_noiseprotocol_is_the_text_we_have_read(module: str) -> None:
    """A release that works otherwise could go round what we replace without a word. Read it before this is changed."""
    import noise

    assert noise.__file__ is not None
    text = (Path(noise.__file__).parent / module).read_bytes()
    assert hashlib.sha256(text).hexdigest() == READ_AND_JUDGED[module]
