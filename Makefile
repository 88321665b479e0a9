# Two commands for a fresh machine, `make train` and `make test`: each makes .venv, installs
# and runs. They need Python 3.10 or later and a package index, nothing else.

PYTHON ?= python3
CONFIG ?= configs/fedssl_dp.yaml
# The demo may be repeated: a second plain `make train` replaces the run of the first. With a
# config or arguments of your own nothing is replaced unless you say so: the trainer refuses a
# run folder that exists, because it holds results and the record of the privacy spent.
ARGS ?= $(if $(filter file,$(origin CONFIG)),run.overwrite=true)
TESTS ?=
# Of setup.cfg: what is installed for tests.
EXTRA ?= dev
# A whole suite on all cores, a worker that is done takes tests from another; a few files in one
# process.
PARALLEL ?= $(if $(TESTS),,--numprocesses auto --dist worksteal)

# What pip reads or compiles: a change installs anew.
INSTALLS := setup.cfg setup.py pyproject.toml $(wildcard privssl/csrc/*.?pp)

VENV := .venv
RUN := $(VENV)/bin/python
INSTALLER ?= $(RUN) -m pip install
# uv installs where this says, pip where it runs.
INSTALL = VIRTUAL_ENV='$(CURDIR)/$(VENV)' $(INSTALLER)

# The networks are small: one thread each. Waiting threads that spin make several processes on a
# few cores many times slower. Both must be set before torch loads.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

# Of the thousands of modules that torch brings few are ever imported: Python compiles those when it
# does. To compile all of them is a quarter of an installation.
export PIP_NO_COMPILE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Tests start many processes: what the first one compiles no other should.
unexport PYTHONDONTWRITEBYTECODE
# Runs wait for the disk at each charge and checkpoint: tests write theirs in memory, if 4 GB are free.
# pytest keeps the folders of its last runs; other temporary files go when it ends.
SHM_KB := $(shell test -w /dev/shm && df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')
ifeq ($(shell test "$(or $(SHM_KB),0)" -gt 4000000 && echo enough),enough)
export PYTEST_DEBUG_TEMPROOT ?= /dev/shm
IN_MEMORY = made=$$(mktemp -d -p /dev/shm) && trap 'rm -rf "$$made"' EXIT INT TERM && TMPDIR="$$made"
endif

.DEFAULT_GOAL := help
.PHONY: help demo-sites docs train test test-oldest test-avx512 test-ci test-flower test-all planted-faults gpu-report check format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  make train CONFIG=configs/fedssl.yaml ARGS="algorithm.rounds=5 run.seed=1"'
	@echo '  make test TESTS=tests/experiment/test_config.py'
	@echo '  PYTHON=python3.12 chooses the Python that .venv is made with'
	@echo '  INSTALLER="uv pip install" installs with uv, in half of the time'

train: $(VENV)/.installed  ## train CONFIG with ARGS (default: the private demo on bundled digits)
	$(RUN) -m privssl.train $(CONFIG) $(ARGS)

demo-sites: $(VENV)/.installed-flower  ## a coordinator and five sites over Flower on this machine
	$(RUN) -m privssl.site.demo runs/demo-sites-$$(date +%Y%m%d-%H%M%S) $(DEMO_ARGS)

test: $(VENV)/.installed-dev  ## run the tests that take seconds
	$(IN_MEMORY) $(RUN) -m pytest $(PARALLEL) -m "not slow and not flower$(if $(TESTS),, and not ci)" $(TESTS)

test-oldest:  ## the same with the oldest packages that we support, in an environment of its own
	PIP_CONSTRAINT='$(CURDIR)/tests/oldest.txt' $(MAKE) test VENV=.venv-oldest EXTRA=test

test-avx512: $(VENV)/.installed-dev  ## test what kernels do with AVX-512, on processors with AVX2 alone
	$(RUN) tests/avx512_on_avx2.py $(TESTS)

test-ci: $(VENV)/.installed-dev  ## run what continuous integration runs beside the tests over Flower
	$(IN_MEMORY) $(RUN) -m pytest --numprocesses auto --dist loadfile -m "ci and not slow and not flower" $(TESTS)

test-flower: $(VENV)/.installed-dev  ## run the tests over Flower that take minutes together
	$(IN_MEMORY) $(RUN) -m pytest -m "flower and not slow" $(or $(TESTS),$(wildcard tests/remote/test_flower*.py) tests/docs/test_tutorials.py)

test-all: $(VENV)/.installed-dev  ## run every test
	$(IN_MEMORY) $(RUN) -m pytest $(PARALLEL) --hypothesis-profile thorough $(TESTS)

planted-faults: $(VENV)/.installed-dev  ## plant faults one at a time, and see a test catch each
	$(RUN) -m tests.planted_faults.run --jobs $$(nproc) $(FAULTS)

check: $(VENV)/.installed-dev  ## lint, check the format and the types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(VENV)/.installed-dev  ## mend what ruff can mend
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

gpu-report:  ## measure a GPU in eight minutes (results/gpu); installs nothing, needs no network
	$(PYTHON) -m benchmarks.gpu_report

docs: $(VENV)/.installed-docs  ## write the generated pages of docs/, and the site (build/site)
	$(RUN) docs/generate_reference.py
	$(RUN) docs/generate_python_reference.py
	$(RUN) docs/generate_networks.py
	$(RUN) -m privssl.reproduce --render
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

clean:  ## remove caches and build files; .venv and runs stay
	rm -rf build dist ./*.egg-info .coverage htmlcov .hypothesis
	rm -rf .mypy_cache .ruff_cache .pytest_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The stamps are written after pip has succeeded, so an interrupted installation is taken up
# again, and a changed dependency is installed.
$(VENV)/.installed: $(INSTALLS) | $(RUN)
	@echo 'Installing privssl and what it needs: torch is large, the first time takes minutes.'
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(INSTALLS) | $(RUN)
	@echo 'Installing privssl, what it needs and the tools: the first time takes minutes.'
	$(INSTALL) --editable '.[$(EXTRA)]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(INSTALLS) | $(RUN)
	$(INSTALL) --editable '.[$(EXTRA),docs]'
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

$(VENV)/.installed-flower: $(INSTALLS) | $(RUN)
	@echo 'Installing privssl and Flower: torch is large, the first time takes minutes.'
	$(INSTALL) --editable '.[flower]'
	@touch $@ $(VENV)/.installed

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "privssl needs Python 3.10 or later, and $(PYTHON) is not that. Name one that is:" >&2; \
	  echo "  make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu:" >&2; \
	  echo "  apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# A pip of some years takes minutes to choose versions.
	-$(RUN) -m pip install --quiet --upgrade pip
