"""The stages as jobs for spark-submit, on a real standalone master and worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyspark
import pytest
from landing_files import LandingZone, line

from dmsg_logs.runtime import class_archive

pytestmark = pytest.mark.cluster

_HOME = Path(pyspark.__file__).parent
_JOBS = Path(__file__).parent.parent / "dmsg_logs" / "jobs"
_START_S = 60.0
_JOB_S = 150.0
_SMALL = (
    *("--driver-memory", "1g", "--executor-memory", "700m", "--total-executor-cores", "1"),
    *("--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=1"),
    *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"),
    *("--conf", "spark.sql.adaptive.enabled=false", "--conf", "spark.sql.codegen.wholeStage=false"),
    *("--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN"),
)


def _java() -> str:
    """Options of every JVM. The archive of classes is used if there is one by now."""
    return f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {class_archive.java_options()}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as one file, as an operator would hand it to a cluster."""
    target, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    package = _JOBS.parent  # built from a copy, because building leaves things beside the source
    shutil.copytree(package, source / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.parent / "pyproject.toml", source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, str(target), str(source)], check=True, capture_output=True)
    (made,) = target.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a standalone master with one worker, both on loopback, each on a port of its own choice."""
    work = tmp_path_factory.mktemp("cluster")
    with contextlib.ExitStack() as stack:
        deploy = "org.apache.spark.deploy"
        options = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        url = _start(stack, [f"{deploy}.master.Master", *options], r"Starting Spark master at (spark://\S+)")
        small = ["--cores", "2", "--memory", "1400m", "--work-dir", str(work)]  # for two jobs
        _start(stack, [f"{deploy}.worker.Worker", *options, *small, url], r"Successfully registered with master (\S+)")
        yield url


def _start(stack: contextlib.ExitStack, arguments: list[str], wanted: str) -> str:
    """Start a daemon of Spark's; gives what ``wanted`` finds in its log."""
    environment = {**os.environ, "SPARK_HOME": str(_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
    environment["SPARK_DAEMON_JAVA_OPTS"] = _java()
    environment["SPARK_DAEMON_MEMORY"] = "256m"
    process = subprocess.Popen(
        [str(_HOME / "bin" / "spark-class"), *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    stack.callback(_stop, process)
    stream = process.stderr
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    log, give_up = b"", time.monotonic() + _START_S
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while time.monotonic() < give_up and process.poll() is None:
            ready.select(1.0)
            log += stream.read() or b""
            if found := re.search(wanted, log.decode(errors="replace")):
                return found.group(1)
    raise AssertionError(f"{arguments[0]} did not start:\n{log.decode(errors='replace')}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _submit(master: str, wheel: Path, job: str, *arguments: str, cwd: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(_HOME)}
    java = _java()
    done = subprocess.run(
        [
            str(_HOME / "bin" / "spark-submit"),
            *("--master", master, "--py-files", str(wheel), *_SMALL),
            *("--conf", f"spark.driver.extraJavaOptions={java}", "--conf", f"spark.executor.extraJavaOptions={java}"),
            *(str(_JOBS / job), "--json", *arguments),
        ],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_JOB_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_stages_run_on_a_standalone_cluster_from_a_wheel(master: str, wheel: Path, tmp_path: Path) -> None:
    landing, tables = tmp_path / "landing", tmp_path / "tables"
    zone = LandingZone(landing)
    lines = [line(seq=seq) for seq in range(6)]
    zone.file(lines=lines[:4])
    zone.file(lines=[*lines[3:], '{"event":'])
    first = _submit(master, wheel, "ingest.py", "--landing", str(landing), "--tables", str(tables), cwd=tmp_path)
    assert (first["in"], first["good"], first["dup"], first["corrupt"]) == (8, 6, 1, 1)
    with ThreadPoolExecutor() as pool:  # neither needs the other
        ranks = ("--tables", str(tables), "--ranks", str(tmp_path / "relay_ranks.json"), "--key", str(_key(tmp_path)))
        ranking = pool.submit(_submit, master, wheel, "ranks.py", *ranks, cwd=tmp_path)
        built = _submit(master, wheel, "tables.py", "--tables", str(tables), cwd=tmp_path)
    assert ranking.result()["ranks"] == {"relays": 0, "excluded_clients": 0}
    assert built["violations"] == {}
    assert built["tables"]["log_quality"] == 1
    zone.file(lines=[line(seq=6)], number=7)
    page, again = tmp_path / "report", ("--landing", str(landing), "--tables", str(tables))
    with ThreadPoolExecutor() as pool:  # who reads one generation does not mind that the next one is made
        making = pool.submit(_submit, master, wheel, "run.py", *again, cwd=tmp_path)
        written = _submit(master, wheel, "report.py", "--tables", str(tables), "--report", str(page), cwd=tmp_path)
    assert written["report"]["bytes"] == (page / "report.html").stat().st_size
    whole = making.result()
    assert (whole["in"], whole["good"], whole["generation"]) == (1, 1, 2)


def _key(directory: Path) -> Path:
    key = directory / "operator.key"
    key.write_text("11" * 32 + "\n")
    key.chmod(0o600)
    return key
