"""What a session is started with."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.session import JAVA_OPTIONS


@pytest.mark.parametrize("more", [(), ("-XX:+KnownToAnotherJvmOnly", "-XX:NorThis=4")])
def test_a_jvm_starts_with_our_options_and_says_nothing_of_them(more: tuple[str, ...]) -> None:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    assert java is not None

    done = subprocess.run([java, *JAVA_OPTIONS.split(), *more, "-version"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert not done.stdout and "warning" not in done.stderr


def test_a_sum_that_overflows_ends_nothing(spark: SparkSession) -> None:
    """Whoever may write lines can write a thousand of the largest numbers."""
    huge = spark.range(3).select(F.lit(2**63 - 1).alias("n"))
    assert huge.agg(F.sum("n"), F.sum(F.col("n") + F.col("n"))).collect()
