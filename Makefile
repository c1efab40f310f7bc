# SPDX-License-Identifier: Apache-2.0
# make check | test | test-all | doctest | lint | demo | bench | torture | release-check | clean - each creates $(VENV) if it is missing.
PYTHON ?= python3
VENV ?= .venv
# An exact JAX version such as 0.10.2, or nightly; empty means the newest that PYTHON can run.
JAX ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
# For example --short, or crashes --seconds 60.
TORTURE_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-jax$(JAX)

# Keep bytecode: otherwise each run of the tests, and each process that they start, compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help venv check test test-all test-tpu doctest docs lint demo bench torture release-check clean

help:
	@echo "make check    lint, types and the quick tests (a minute): what to run while you work"
	@echo "make test     all tests, with samples of large matrices; PYTHON=, JAX=, VENV= and PYTEST_ARGS= choose what runs"
	@echo "make test-all every case of all tests, and whole spaces"
	@echo "make test-tpu the kernels for TPUs, compiled by Google's compiler for v5e, v5p and v6e (JAX 0.11.2, Python 3.12)"
	@echo "make doctest  the examples in README.md, docs/ and docstrings"
	@echo "make docs     the documentation site, in build/site"
	@echo "make lint     ruff and mypy"
	@echo "make demo     tune a small training program and compare it with plain JAX (about 4 minutes, after the installation)"
	@echo "make bench    the benchmarks; BENCH_ARGS= goes to them"
	@echo "make torture  faults, damage, bombs and fuzzing for an hour; TORTURE_ARGS=--short for a minute"
	@echo "make release-check  builds wheel and sdist, checks metadata and README, tries the wheel in a new environment"
	@echo "make clean    remove environments, caches and builds"

$(STAMP): pyproject.toml scripts/setup_venv.sh scripts/install.sh
	@rm -f $(VENV)/.installed-jax*
	@scripts/setup_venv.sh "$(PYTHON)" "$(VENV)" "$(JAX)"
	@touch $@

venv: $(STAMP)

check: lint
	$(BIN)/python -m pytest -q -m 'not slow' $(PYTEST_ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest --whole $(PYTEST_ARGS)

test-tpu: $(STAMP)
	scripts/install.sh $(BIN)/python -e '.[tpu]'
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-4 \
		ALLOW_MULTIPLE_LIBTPU_LOAD=1 $(BIN)/python -m pytest tests/tpu $(PYTEST_ARGS)

doctest: $(STAMP)
	cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	EJKERNEL_CACHE_DIR="$$cache" $(BIN)/python -m pytest -p tests.quick --doctest-modules --doctest-glob='*.md' --ignore-glob='*/__main__.py' \
		$(wildcard README.md docs) src/ejkernel

docs: $(STAMP)
	scripts/install.sh $(BIN)/python -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

lint: $(STAMP)
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy examples/data_parallel/*.py
	$(BIN)/python -m mypy examples/mixture_of_experts/*.py
	$(BIN)/python -m mypy examples/language_model_head/*.py examples/before_after.py

demo: $(STAMP)
	$(BIN)/python examples/demo/demo.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

torture: $(STAMP)
	$(BIN)/python -m benchmarks.torture $(TORTURE_ARGS)

release-check: $(STAMP)
	$(BIN)/python scripts/release_check.py

clean:
	rm -rf .venv .venv-* build dist .demo-cache .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
