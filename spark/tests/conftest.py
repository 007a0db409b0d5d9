"""One small Spark session for all tests of this process: starting one costs more than most tests.

Two processes run the tests, each whole files of them; ``-n 0`` runs all in one, as a debugger needs it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from rank_fleet import Fleet

from dmsg_logs.runtime import class_archive
from dmsg_logs.runtime.session import build_session

#: A JVM that only compiles quickly has room for a fifth of its code, and ceases to compile when that is full.
_FAST = {
    "spark.master": "local[1]",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m -Xmn400m",
}


_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """One cache for all processes of the run, and none of the user's."""
    if not hasattr(config, "workerinput"):
        config.stash[_CACHE] = os.environ[class_archive.CACHE_VARIABLE] = tempfile.mkdtemp(prefix="dmsg-cache-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no process waits for another at the end."""
    long = {each.path for each in items if each.get_closest_marker("process") or each.get_closest_marker("cluster")}
    items.sort(key=lambda each: each.path not in long)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove it."""
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session with one core and one shuffle partition."""
    session = build_session("tests", _FAST)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def fleet(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """What the tests of ranks share: reading it takes longer than any of them."""
    return Fleet(spark, tmp_path_factory.mktemp("fleet"))
