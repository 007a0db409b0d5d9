"""The Spark session: one place for the settings every stage, command and test shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from dmsg_logs.runtime import class_archive

#: Right for a laptop and for one large machine; on a cluster ``spark-submit --conf`` sets its own.
SHUFFLE_PARTITIONS = 8
_LOOPBACK = "127.0.0.1"
#: Throughput counts, not pauses, so the collector is the one with the least work. A run takes only minutes, and half of
#: that went into optimising methods that were hardly called again. So a method is optimised only after many more calls
#: than usual, and with less loop optimisation and inlining. A JVM ignores options that it does not know.
JAVA_OPTIONS: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
    "-XX:+UseParallelGC -XX:MetaspaceSize=256m -XX:Tier4InvocationThreshold=40000 -XX:Tier4MinInvocationThreshold=5000 "
    "-XX:Tier4CompileThreshold=120000 -XX:Tier4BackEdgeThreshold=320000 -XX:FreqInlineSize=80 -XX:InlineSmallCode=700 "
    "-XX:MaxInlineLevel=7 -XX:LoopUnrollLimit=0 -XX:-UseSuperWord -XX:-UseLoopPredicate -XX:-UseProfiledLoopPredicate "
    "-XX:-OptoScheduling -XX:-DoEscapeAnalysis -XX:-DontCompileHugeMethods"
)
#: For queries of small tables: interpret the plan, because generating code takes several times as long as the answer.
UNCOMPILED: Final = {"spark.sql.codegen.factoryMode": "NO_CODEGEN"}
#: Log configuration of a JVM started here; missing when the package is read out of a wheel.
_LOGGING = Path(__file__).parents[1] / "conf" / "log4j2.properties"


def build_session(name: str = "dmsg-logs", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session in UTC, with ``settings`` on top of ours.

    Settings of ``spark-submit`` or ``spark-defaults.conf`` are kept, above all the master: without one the session is
    ``local[*]`` and bound to loopback. ``DMSG_LOGS_DRIVER_MEMORY`` (``2g``) sets the memory of a driver that is started
    here; it cannot be changed once a JVM runs.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # this process was started by spark-submit
    chosen = dict(settings or {})
    if not submitted:
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
        os.environ.update(utf8_locale(os.environ))
        defaults = {
            "spark.master": "local[*]",
            "spark.driver.defaultJavaOptions": f"{_logging()} {class_archive.java_options()}",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.driver.memory": os.environ.get("DMSG_LOGS_DRIVER_MEMORY", "2g"),
            "spark.driver.host": _LOOPBACK,
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
        }
        chosen = {**defaults, **chosen}
    chosen.setdefault("spark.sql.session.timeZone", "UTC")
    # Sums overflow only with forged logs; that must give a wrong figure and not end every run.
    chosen.setdefault("spark.sql.ansi.enabled", "false")
    # Otherwise pyspark tells the JVM the source line of each expression, which takes most of the time of making it.
    chosen.setdefault("spark.python.sql.dataFrameDebugging.enabled", "false")
    for key, value in chosen.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    look_up_by_cores(session)
    return session


def utf8_locale(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to set in ``environment`` before a JVM is started, so that it finds files whose names are not ASCII.

    None unless the locale is C, as in cron and many containers: Java 17 takes the encoding of names from the locale, and no
    option changes that.
    """
    chosen = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "C")
    return {"LC_ALL": "C.UTF-8"} if chosen in ("C", "POSIX") else {}


def _logging() -> str:
    """The JVM option for our log configuration, unless the user has configured Spark."""
    chosen = {"SPARK_HOME", "SPARK_CONF_DIR"} & os.environ.keys()
    # A directory on the class path, such as SPARK_CONF_DIR, would rule out a class archive.
    return "" if chosen or not _LOGGING.is_file() else f'"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"'


def look_up_by_cores(session: SparkSession) -> None:
    """List many files with one task for each core. By default there is a task for each file, which costs five times as much
    as reading a small file."""
    cores = session.sparkContext.defaultParallelism
    session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", str(cores))


def session_with(session: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """A session of its own on the same context, in UTC, with ``settings`` of SQL."""
    own: SparkSession = session.newSession()
    for key, value in {"spark.sql.session.timeZone": "UTC", **settings}.items():
        own.conf.set(key, value)
    look_up_by_cores(own)
    return own
