"""The archive of classes: made by a command, used by the next JVM, and of no harm where it does not fit.

The archive that is made here is left for the other tests that start Spark in processes of their own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dmsg_logs.__main__ import main
from dmsg_logs.runtime import class_archive

#: Starts Spark and says what its JVM has mapped into its memory that is named like an archive of ours.
_MAPPED = """
from pathlib import Path
from dmsg_logs.runtime.session import build_session

session = build_session("test", {"spark.master": "local[1]", "spark.driver.extraJavaOptions": "-XX:+UseSerialGC"})
assert session.range(3).count() == 3
jvm = session._jvm.java.lang.ProcessHandle.current().pid()
mapped = Path(f"/proc/{jvm}/maps").read_text().split()
session.stop()
print(sorted({each for each in mapped if each.endswith(".jsa") and "/classes-" in each}))
"""


@pytest.mark.process
def test_an_archive_is_made_and_used(tmp_path: Path) -> None:
    """A JVM with another class path goes without it, and says nothing."""
    result = CliRunner().invoke(main, ["prepare", "--json"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout.splitlines()[-1])
    assert Path(made["archive"]) == class_archive.find()
    assert 0 < made["start_s"] < made["seconds"]
    assert [str(each) for each in class_archive.directory().iterdir()] == [made["archive"]]

    spark = subprocess.run([sys.executable, "-c", _MAPPED], capture_output=True, text=True, timeout=120, check=True)
    assert spark.stdout.splitlines()[-1] == str([made["archive"]])

    java = shutil.which(
        "java", path=os.path.join(os.environ["JAVA_HOME"], "bin") if "JAVA_HOME" in os.environ else None
    )
    assert java is not None
    stranger = [java, *shlex.split(class_archive.java_options()), "-cp", str(tmp_path / "x.jar"), "-version"]
    done = subprocess.run(stranger, capture_output=True, text=True, timeout=60, check=True)
    assert "version" in done.stderr and "archive" not in done.stdout + done.stderr


def test_what_a_jvm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of an archive that is whole."""
    cache = tmp_path / "a cache"
    monkeypatch.setenv(class_archive.CACHE_VARIABLE, str(cache))
    assert class_archive.java_options() == ""
    cache.mkdir()
    archive = cache / f"{class_archive.name()}-5.jsa"
    archive.write_bytes(b"part")
    assert class_archive.java_options() == ""
    archive.write_bytes(b"whole")
    assert shlex.split(class_archive.java_options())[0] == f"-XX:SharedArchiveFile={archive}"


def test_where_it_is_without_a_word_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(class_archive.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert class_archive.directory() == tmp_path / "dmsg-logs"


def _java(directory: Path) -> None:
    for name in ("bin/java", "lib/modules"):
        (directory / name).parent.mkdir(parents=True)
        (directory / name).touch()


def test_another_java_has_another_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it took the other's place."""
    names = [class_archive.name()]
    for name in ("one", "two"):
        _java(tmp_path / name)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / name))
        names.append(class_archive.name())
    os.utime(tmp_path / "two" / "lib" / "modules", (1.0, 1.0))
    names.append(class_archive.name())
    assert None not in names and len(set(names)) == 4


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_a_java_that_makes_no_archive_leaves_nothing(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _java(tmp_path)
    java, cache = tmp_path / "bin" / "java", tmp_path / "cache"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv(class_archive.CACHE_VARIABLE, str(cache))
    result: Any = CliRunner().invoke(main, ["prepare", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["error"]
    assert list(cache.iterdir()) == []


def test_without_java_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    result = CliRunner().invoke(main, ["prepare"])
    assert result.exit_code == 1
    assert "there is no Java" in result.stderr
    assert class_archive.java_options() == ""
