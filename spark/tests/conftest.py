"""One small Spark session for all tests of this process: starting one costs more than most tests.

Two processes run the tests, each whole files of them; ``-n 0`` runs all in one, as a debugger needs it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from rank_fleet import Fleet

from dmsg_logs.session import build_session

_FAST = {
    "spark.master": "local[1]",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
}


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
