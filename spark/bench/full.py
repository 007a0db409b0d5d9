"""The whole pipeline as users run it, watched from outside."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from bench.shape import Task
from bench.stages import stage


def main(arguments: list[str]) -> None:
    """Run ``python -m dmsg_logs run`` and pass its summary on."""
    task = Task.from_arguments(arguments)
    task.out.mkdir(parents=True)
    key = task.out / "operator.key"
    _write_key(key)
    command = [sys.executable, "-m", "dmsg_logs", "run", "--json", "--quiet", "--master", f"local[{task.cores}]"]
    command += ["--landing", str(task.zone), "--tables", task.part("tables"), "--report", task.part("report")]
    command += ["--ranks", task.part("relay_ranks.json"), "--key", str(key)]
    with stage("start"):
        pass
    with stage("full") as results:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        results.update(json.loads(done.stdout.splitlines()[-1]))


def _write_key(path: Path) -> None:
    """A secret key for this run alone, in the form of dmsg's key files."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.randbits(255) | 1:064x}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
