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
#: What counts is the end, not pauses, so the collector is the one with the least work. And a run takes but minutes, of
#: which half went into compiling methods at length that were hardly called again: so a method has to be called a good
#: deal more often than usual before that is done, and it is done with less care for loops and with less copied into it.
#: A JVM that does not know one of these goes without it.
JAVA_OPTIONS: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions "
    "-XX:+UseParallelGC -XX:MetaspaceSize=256m -XX:Tier4InvocationThreshold=40000 -XX:Tier4MinInvocationThreshold=5000 "
    "-XX:Tier4CompileThreshold=120000 -XX:Tier4BackEdgeThreshold=320000 -XX:FreqInlineSize=80 -XX:InlineSmallCode=700 "
    "-XX:MaxInlineLevel=7 -XX:LoopUnrollLimit=0 -XX:-UseSuperWord -XX:-UseLoopPredicate -XX:-UseProfiledLoopPredicate "
    "-XX:-OptoScheduling -XX:-DoEscapeAnalysis -XX:-DontCompileHugeMethods"
)
#: For questions of small tables: compute as told and make no code for it, which takes several times as long as to answer.
UNCOMPILED: Final = {"spark.sql.codegen.factoryMode": "NO_CODEGEN"}
#: What a JVM started here logs; not there when the package is read out of a wheel.
_LOGGING = Path(__file__).parents[1] / "conf" / "log4j2.properties"


def build_session(name: str = "dmsg-logs", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session in UTC, with ``settings`` on top of ours.

    What ``spark-submit`` or ``spark-defaults.conf`` already set stays as it is, the master above all: without one the
    session is ``local[*]`` and bound to loopback. The memory of a driver that is started here is that of
    ``DMSG_LOGS_DRIVER_MEMORY`` (``2g``); it cannot be changed once a JVM runs.
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
    # A sum that overflows, of what only a forged log holds, is to be a wrong figure and not the end of every run.
    chosen.setdefault("spark.sql.ansi.enabled", "false")
    # Otherwise the JVM is told the line in which each expression was made, and that takes most of the time of making it.
    chosen.setdefault("spark.python.sql.dataFrameDebugging.enabled", "false")
    for key, value in chosen.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    look_up_by_cores(session)
    return session


def utf8_locale(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set in ``environment`` before a JVM is started in it, so that it finds files whose names are not ASCII.

    That is nothing unless the locale is the C one, as cron and many containers have it: Java 17 takes the encoding of names
    from the locale, and no option changes that.
    """
    chosen = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "C")
    return {"LC_ALL": "C.UTF-8"} if chosen in ("C", "POSIX") else {}


def _logging() -> str:
    """What tells a JVM how to log, unless the user has set up Spark otherwise."""
    chosen = {"SPARK_HOME", "SPARK_CONF_DIR"} & os.environ.keys()
    # A directory on the class path, as SPARK_CONF_DIR is, would rule an archive of classes out.
    return "" if chosen or not _LOGGING.is_file() else f'"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"'


def look_up_by_cores(session: SparkSession) -> None:
    """Let as many tasks look up many files as there are cores. By default there is a task for each file, and what that
    costs is five times the reading of a small one."""
    cores = session.sparkContext.defaultParallelism
    session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", str(cores))


def session_with(session: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """A session of its own on the same context, in UTC, with ``settings`` of SQL."""
    own: SparkSession = session.newSession()
    for key, value in {"spark.sql.session.timeZone": "UTC", **settings}.items():
        own.conf.set(key, value)
    look_up_by_cores(own)
    return own
