"""What an installation has: the plugins above all, which a wrong layout loses without a word."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.time_limit(180)]
ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a package is built of: building writes beside it."""
    directory = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "dropin.cache")
    for name in ("dmsg", "twisted"):
        shutil.copytree(ROOT / name, directory / name, ignore=unwanted)
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.rst", "LICENSE"):
        shutil.copy(ROOT / name, directory / name)
    (directory / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_errors.py", directory / "tests")
    return directory


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once; a warning about what setup.cfg says, such as of a name that is going away, is an error."""
    directory = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-W", "error", "-c", build, directory, cwd=source)
    [path] = directory.glob("*.whl")
    return path


def make_environment(directory: Path) -> Path:
    """A virtual environment that finds everything but dmsg where these tests run; its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    [packages] = (directory / "lib").glob("python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin" / "python"


def check_plugins(python: Path, directory: Path) -> None:
    text = run(python, "-m", "twisted", "--help", cwd=directory)
    assert "dmsg-server" in text and "dmsg-discovery" in text
    text = run(python, "-c", "from twisted.scripts.twistd import run; run()", "--help", cwd=directory)
    assert "dmsg-server" in text and "dmsg-discovery" in text


def where(python: Path, directory: Path) -> Path:
    return Path(run(python, "-c", "import dmsg; print(dmsg.__file__)", cwd=directory).strip())


def test_a_wheel_brings_its_plugins(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    run(*PIP, "--python", python, "install", *OFFLINE, "--force-reinstall", wheel, cwd=tmp_path)
    assert tmp_path in where(python, tmp_path).parents
    check_plugins(python, tmp_path)
    assert "dmsg-server" in run(python.with_name("python"), "-m", "twisted", "--help", cwd=tmp_path)


def test_an_editable_installation_brings_its_plugins(source: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    run(*PIP, "--python", python, "install", *OFFLINE, "--force-reinstall", "--editable", source, cwd=tmp_path)
    assert where(python, tmp_path) == source / "dmsg" / "__init__.py"
    check_plugins(python, tmp_path)


def test_the_wheel_has_what_it_should_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert "twisted/plugins/dmsg_plugins.py" in names
    assert "twisted/__init__.py" not in names and "twisted/plugins/__init__.py" not in names
    assert "dmsg/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dmsg", "twisted"}
    in_tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dmsg").rglob("*.py")}
    assert in_tree - set(names) == set()
    for extra in ("test", "lint", "docs", "bench", "all"):
        assert f"Provides-Extra: {extra}\n" in text


def test_a_source_distribution_has_no_tests_without_their_tools(source: Path, tmp_path: Path) -> None:
    """By itself, setuptools takes ``tests/test_*.py``, and neither the directories below nor what the tests import."""
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=source)
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {"/".join(name.split("/")[1:2]) for name in archive.getnames() if name.count("/") > 1}
    assert names == {"dmsg", "dmsg.egg-info", "twisted"}


def test_every_package_is_declared() -> None:
    parser: Any = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    declared = set(parser["options"]["packages"].split())
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / "dmsg").rglob("__init__.py")
    }
    assert declared == found | {"twisted.plugins"}
