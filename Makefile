# Everything starts here: "make test" from nothing, "make demo" to see it work.
# PYTHON chooses the interpreter (3.10 or newer) the virtual environment is made of: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
ANALYTICS_STAMP := $(VENV)/.analytics-installed
FUZZ_STAMP := $(VENV)/.fuzz-installed
# CPU seconds for each target, those of all earlier runs included; a minute more of each when it is empty. How many targets
# run at the same time.
FUZZ_SECONDS ?=
FUZZ_JOBS ?= 2

# The seeds that are simulated: FIRST:END.
SIMULATE_SEEDS ?= 1000:2000

# The lock files are of this version of Python on Linux; with another one pip chooses, within the bounds of setup.cfg.
LOCKED := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info[:2] == (3, 11) and sys.platform == "linux" else "")' 2>/dev/null)
LOCKING := --quiet --upgrade --strip-extras --allow-unsafe --generate-hashes --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install
# A lock file is complete, so pip resolves nothing: asked to, it takes a newer version than the locked one of a package that
# another one wants with an extra (coverage[toml]), has no hash for it and stops. "pip check" says if something is missing.
PIP_LOCKED := $(PIP) --no-deps --require-hashes
PIP_CHECK := $(BIN)/python -m pip --quiet --disable-pip-version-check check

# Tests, demos and benches start some hundred processes, each of which would compile every module anew, a third of its start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv lock demo test test-core test-analytics lint format bench soak fuzz analytics-demo bench-analytics docs news clean
.PHONY: bench-wan bench-others simulate proof system-packages redis-package analytics-packages proof-packages

help:
	@echo "make demo    relays, discovery and clients on this machine, end to end"
	@echo "make test    install what is missing, then all gates: ruff, mypy, pytest"
	@echo "make test-core, make test-analytics: one half, with what takes long; the second with kills and a cluster, too"
	@echo "make lint    the gates without the tests;  make format repairs what it can"
	@echo "make bench   the figures of docs/performance.rst;  make soak  two hours under load and faults"
	@echo "make bench-wan   the same far away: 10 to 200 ms, 10 to 1,000 Mbit/s"
	@echo "make bench-others  ours beside relays, tunnels and senders of files of others, those that are installed"
	@echo "make proof   the models of the protocol, checked with Spin"
	@echo "make fuzz    search for inputs that break a promise: make fuzz FUZZ_SECONDS=3600 until each has had an hour"
	@echo "make simulate   whole networks in virtual time, with faults: SIMULATE_SEEDS=1000:2000"
	@echo "make analytics-demo   real traffic, its event logs shipped, tables, report and ranks made of them"
	@echo "make bench-analytics  the log pipeline beside DuckDB and Polars"
	@echo "make docs    the documentation as HTML;    make news  a preview of NEWS.rst"
	@echo "make venv    only the virtual environment; make clean removes all of it"
	@echo "make lock    the lock files anew, with the newest versions within the bounds"

venv: $(STAMP)

# Made anew when setup.cfg changes, so that it never holds what is no longer asked for. Each file that is installed is one
# whose hash is in requirements.lock; our own package is built with what came from there.
$(STAMP): setup.cfg requirements.lock | system-packages
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),yes)
	$(PIP_LOCKED) --only-binary :all: -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	$(PIP_CHECK)
else
	$(PIP) -e '.[test,lint,bench]'
endif
	touch $@

# The log pipeline brings Spark, several hundred megabytes: only what needs it installs it.
$(ANALYTICS_STAMP): $(STAMP) spark/pyproject.toml requirements-analytics.lock | analytics-packages
ifeq ($(LOCKED),yes)
	$(PIP_LOCKED) -r requirements-analytics.lock
	$(PIP) --no-deps --no-build-isolation -e ./spark
	$(PIP_CHECK)
else
	$(PIP) -e '.[ship,s3]' -e './spark[test,bench]'
endif
	touch $@

$(FUZZ_STAMP): $(ANALYTICS_STAMP) requirements-fuzz.lock
ifeq ($(LOCKED),yes)
	$(PIP_LOCKED) -r requirements-fuzz.lock
	$(PIP_CHECK)
else
	$(PIP) -e '.[fuzz]'
endif
	touch $@

$(DOCS_STAMP): $(STAMP)
ifneq ($(LOCKED),yes)
	$(PIP) -e '.[docs]'
endif
	touch $@

# Newer versions, within the bounds: the lock files are written anew, with a venv of its own. Look at what changes.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	.venv-lock/bin/pip-compile $(LOCKING) --extra all -o requirements.lock setup.cfg
	.venv-lock/bin/pip-compile $(LOCKING) --extra test --extra bench -c requirements.lock \
	    -o requirements-analytics.lock spark/pyproject.toml
	.venv-lock/bin/pip-compile $(LOCKING) --extra fuzz -c requirements.lock -o requirements-fuzz.lock setup.cfg
	sed -i '/^#/d; /^$$/d' requirements*.lock
	rm -rf .venv-lock

# What pip cannot install: venv itself (Debian's python3 comes without); for tests and benchmarks a Redis; for the log pipeline
# a Java to run Spark, and a Chromium in which its report is looked at; for the proofs Spin and a C compiler. Nothing happens
# where all are there.
system-packages:
	@set -e; missing=""; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "Python 3.10 or newer is needed: make PYTHON=..." >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	$(INSTALL_MISSING)

redis-package:
	@set -e; missing=""; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	$(INSTALL_MISSING)

analytics-packages:
	@set -e; missing=""; \
	command -v java >/dev/null || missing="$$missing default-jre-headless"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	$(INSTALL_MISSING)

proof-packages:
	@set -e; missing=""; \
	command -v spin >/dev/null || missing="$$missing spin"; \
	command -v cc >/dev/null || missing="$$missing gcc libc6-dev"; \
	$(INSTALL_MISSING)

define INSTALL_MISSING
	test -n "$$missing" || exit 0; \
	echo "installing:$$missing"; \
	command -v apt-get >/dev/null \
	    || { echo "please install$$missing: apt-get is not here to do it" >&2; exit 1; }; \
	if [ "$$(id -u)" = 0 ]; then sudo=""; elif command -v sudo >/dev/null; then sudo="sudo"; \
	else echo "please install$$missing: neither root nor sudo is available" >&2; exit 1; fi; \
	$$sudo env DEBIAN_FRONTEND=noninteractive sh -c \
	    "apt-get update -qq && apt-get install -y -qq --no-install-recommends$$missing" </dev/null >/dev/null \
	    || { echo "please install$$missing: apt-get could not" >&2; exit 1; }
endef

demo: venv
	$(BIN)/python -m demos.network

# The tests of the core come last: their closing line is the last line of all. Each file stays in one process, because its
# tests share fixtures that take long to make. A quarter of the time tests wait for something, so there is a process more for
# every two cores.
TEST_PROCESSES ?= $(shell $(BIN)/python -c 'import os; print(os.cpu_count() * 3 // 2)')
CORE_TESTS = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile

# Programs run on a reactor of ours, and so may the programs of users; tests run on Twisted's own. Here it is the other way
# round, for what is close to the reactor.
SWAPPED_TESTS = $(CORE_TESTS) --swap-reactors tests/glue tests/taps/test_signals.py tests/cli/test_ping.py \
    tests/system/test_chat.py tests/system/test_tunnels.py

test: lint redis-package
	cd spark && ../$(BIN)/python -m pytest -m "not cluster and not process"
	$(SWAPPED_TESTS) -m "not long"
	$(CORE_TESTS) -m "not long"

test-core: $(ANALYTICS_STAMP) redis-package
	$(SWAPPED_TESTS)
	$(CORE_TESTS)

# A process of its own, with one Spark session for all of its tests; here with a
# standalone cluster, and with the tests that start and kill Spark in processes of their own, which take minutes.
test-analytics: $(ANALYTICS_STAMP)
	cd spark && ../$(BIN)/python -m pytest

lint: venv $(ANALYTICS_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd spark && ../$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv redis-package
	$(BIN)/python -m benchmarks

# Twelve paths, half a minute each and more where they are slow.
bench-wan: venv
	$(BIN)/python -m benchmarks wan

# Looked for in PATH and BENCH_OTHERS=DIR:DIR; docs/performance.rst has how to get them.
bench-others: venv
	$(BIN)/python -m benchmarks beside

proof: proof-packages
	$(PYTHON) proofs/check.py

# Two hours; make soak SOAK_SECONDS=600 for a shorter one. The table is the documentation's.
SOAK_SECONDS ?= 7200
SOAK_TABLE ?= docs/soak.txt

soak: venv
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS) --table $(SOAK_TABLE)

fuzz: $(FUZZ_STAMP)
	$(BIN)/python -m fuzz $(if $(FUZZ_SECONDS),--seconds $(FUZZ_SECONDS)) --jobs $(FUZZ_JOBS) --table docs/explanation/fuzzing.txt

simulate: venv
	$(BIN)/python -m tests.simulation --seeds $(SIMULATE_SEEDS)
	$(BIN)/python -m tests.simulation --dishonest --seeds $(SIMULATE_SEEDS)
	$(BIN)/python -m tests.simulation_rmb --seeds $(SIMULATE_SEEDS)

analytics-demo: $(ANALYTICS_STAMP)
	rm -rf analytics-run
	$(BIN)/python -m demos.analytics --dir analytics-run

bench-analytics: $(ANALYTICS_STAMP)
	cd spark && ../$(BIN)/python -m bench

docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

news: $(DOCS_STAMP)
	$(BIN)/towncrier build --draft

clean:
	rm -rf $(VENV) build dist *.egg-info spark/build spark/*.egg-info analytics-run docs/_build .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	rm -f twisted/plugins/dropin.cache
	find dmsg twisted tests spark -name __pycache__ -type d -prune -exec rm -rf {} +
