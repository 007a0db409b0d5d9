"""What a session is started with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.runtime.session import JAVA_OPTIONS, build_session, utf8_locale


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    assert java is not None
    return java


@pytest.mark.parametrize("more", [(), ("-XX:+KnownToAnotherJvmOnly", "-XX:NorThis=4")])
def test_a_jvm_starts_with_our_options_and_says_nothing_of_them(more: tuple[str, ...]) -> None:
    done = subprocess.run(
        [_java(), *JAVA_OPTIONS.split(), *more, "-version"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert not done.stdout and "warning" not in done.stderr


def test_a_sum_that_overflows_ends_nothing(spark: SparkSession) -> None:
    """A client can put the largest numbers into its log a thousand times."""
    huge = spark.range(3).select(F.lit(2**63 - 1).alias("n"))
    assert huge.agg(F.sum("n"), F.sum(F.col("n") + F.col("n"))).collect()


def _names_encoding(environment: Mapping[str, str]) -> str:
    """How a JVM in this environment encodes the names of files."""
    done = subprocess.run(
        [_java(), "-XshowSettings:properties", "-version"],
        env={**environment, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return next(line.partition("=")[2].strip() for line in done.stderr.splitlines() if "sun.jnu.encoding" in line)


@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        ({}, True),
        ({"LANG": "C", "LC_ALL": ""}, True),
        ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, True),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, False),
    ],
)
def test_a_jvm_finds_files_whose_names_are_not_ascii(environment: dict[str, str], changes: bool) -> None:
    chosen = utf8_locale(environment)
    assert bool(chosen) == changes
    assert _names_encoding({**environment, **chosen}) == "UTF-8"
    assert not changes or _names_encoding(environment) != "UTF-8"
    assert utf8_locale({"LC_CTYPE": "de_DE.ISO-8859-1"}) == {}, "the user has chosen it"


def test_a_session_is_started_in_that_locale(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    partitions = {"spark.sql.shuffle.partitions": spark.conf.get("spark.sql.shuffle.partitions") or "1"}
    assert build_session("tests", partitions) is spark
    assert os.environ["LC_ALL"] == "C.UTF-8"
