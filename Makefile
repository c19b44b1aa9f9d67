# make run: the default experiment on this machine, from nothing to a report.
# make test: the tests that every change must pass.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run bench fuzz test test-clusters test-faults test-flaky test-fast test-slow \
  faults-here faults-there test-local test-slurm test-pbs pbs-up pbs-down lint format lock docs \
  figures cluster-up cluster-down

PYTHON ?= python3
# Another experiment: make run CONFIG=config/digits.yaml
# A smaller installation: make run TORCH=site uses the torch that this Python finds elsewhere, such as
# a module's on PYTHONPATH.
OUTSIDE := ^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z-]+)==
# The profile last: --configfile would take a target for another file. With -m: the script of a copied
# checkout would start the Python of the other one.
SNAKEMAKE := python -m snakemake $(if $(CONFIG),--configfile "$(CONFIG)") --profile profiles/local
# pip would install elsewhere, or not at all.
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN PIP_NO_DEPS PIP_REQUIREMENT PIP_CONSTRAINT
unexport PYTHONSAFEPATH PYTHONHOME
# Whatever pip.conf says.
export PIP_USER := 0
# Snakemake keeps files in a cache, and ends with a traceback if it cannot make one, or if there is no
# room in it. A network file system may tell of a used up quota only when it has the bytes.
ifneq (0,$(shell (folder="$${XDG_CACHE_HOME:-$${HOME:?}/.cache}/snakemake"; mkdir -p "$$folder" && \
  file="$$(mktemp "$$folder/.XXXXXX")" || exit 1; trap 'rm -f "$$file"' EXIT; \
  dd if=/dev/zero of="$$file" bs=64k count=1 conv=fsync) 2>/dev/null; echo $$?))
export XDG_CACHE_HOME := $(CURDIR)/.snakemake/cache
endif
# Found by the commands below and by whatever they start.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

help:
	@echo "make run          the default experiment: fetch, stage, train, evaluate, compare, report"
	@echo "make bench        speed against peers and limits, in 14 minutes"
	@echo "make test         lint, unit tests, and whole experiments on this machine"
	@echo "make test-fast    of these, the unit tests"
	@echo "make test-slow    of these, the experiments"
	@echo "make test-clusters  on a real Slurm, OpenPBS and Grid Engine on this machine (needs root)"
	@echo "make test-slurm   of these, Slurm"
	@echo "make test-pbs     of these, OpenPBS and ssh (OPENPBS), and Grid Engine"
	@echo "make test-faults  long tests, such as chains of faults, here and, as root, on the clusters"
	@echo "make test-flaky   make test ten times and make test-clusters five times, on worse machines"
	@echo "make fuzz         thousands of hostile files for every reader"
	@echo "make lint         ruff, mypy, snakefmt, snakemake --lint"
	@echo "make format       let ruff and snakefmt rewrite the code"
	@echo "make docs         write the generated parts of the documentation (needs Graphviz)"
	@echo "make figures      also the figures, from the results of make run"
	@echo "make lock         resolve requirements*.in into requirements*.txt"
	@echo "make cluster-up   start a Slurm cluster on this machine (needs root)"
	@echo "make cluster-down stop it"
	@echo "make pbs-up       the same with OpenPBS and ssh, from the tree or tarball in OPENPBS"
	@echo "make pbs-down     stop it"

run: .venv/run.done
	$(if $(CONFIG),@python workflow/scripts/check.py "$(CONFIG)")
	$(SNAKEMAKE)
	@echo "Each experiment's report is $(CURDIR)/results/<experiment>/report.html"

bench: .venv/run.done
	$(SNAKEMAKE) results/data/cifar10/manifest.json
	python benchmarks/bench.py results/data/cifar10 results/bench

# Workers of the tests on this machine. Some tests wait: three kept two CPUs busy for 86 % of the
# time, four for 95 %.
WORKERS := 4
# -rs: tests that cannot run here say so. PYTEST_OPTIONS: more of them, such as -k NAME.
# REPORTS: an existing folder for reports in JUnit's form.
# One thread: on busy CPUs, threads that wait for each other took up to twenty times the CPU time.
PYTEST = OMP_NUM_THREADS=1 python -m pytest -rs $(PYTEST_OPTIONS) $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml) -m "$(MARK)"
# A file of tests stays on one worker: its tests share what is slow to make. The longest come first.
PARALLEL = $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Long tests, such as chains of faults, are marked `faults`.
MARK := not faults
# The clusters' long chains mostly wait: two of each kind side by side.
CHAINS = $(if $(findstring not,$(MARK)),,-n 2 --dist loadfile --no-loadscope-reorder)
# Each lane prints its time.
SINCE := $(shell date +%s)
TIME = @echo "make $@: $$(($$(date +%s) - $(SINCE))) s"

test: .venv/test.done
	@$(MAKE) --no-print-directory -j2 lint test-local
	$(TIME)

# Says what it will install before it does; the tests on clusters mostly wait.
test-clusters: .venv/test.done
	@python tests/cluster/cluster.py packages
	@$(MAKE) --no-print-directory -j2 --output-sync test-slurm test-pbs
	$(TIME)

test-faults: .venv/test.done
	@python tests/cluster/cluster.py packages || echo "make $@: without the chains on clusters"
	@$(MAKE) --no-print-directory -j2 --output-sync faults-here faults-there
	$(TIME)

faults-here: .venv/test.done
	@$(MAKE) --no-print-directory MARK=faults WORKERS=2 test-local

faults-there: .venv/test.done
	@$(MAKE) --no-print-directory -j2 --output-sync MARK=faults test-slurm test-pbs

test-flaky: .venv/test.done
	python tests/flaky.py

test-local: .venv/test.done
	$(PARALLEL) tests/unit/test_random_interruptions.py tests/workflow tests/unit/test_resume.py tests/unit/test_restart.py tests/unit
	$(TIME)

test-fast: .venv/test.done
	$(PARALLEL) tests/unit

test-slow: .venv/test.done
	$(PARALLEL) tests/workflow

test-slurm: .venv/test.done
	$(PYTEST) $(CHAINS) tests/slurm/test_interruptions.py tests/slurm
	$(TIME)

test-pbs: .venv/test.done
	$(PYTEST) $(CHAINS) tests/pbs/test_pbs_interruptions.py tests/gridengine tests/pbs
	$(TIME)

fuzz: .venv/test.done
	python tests/fuzz.py --seed 1 --cases 4000 --programs 300

lint: .venv/test.done
	ruff check .
	ruff format --check .
	mypy
	snakefmt --check Snakefile workflow/rules
	snakemake --lint
	python -m pytest --collect-only -qq tests/slurm tests/pbs tests/gridengine | tail -1

format: .venv/test.done
	ruff check --fix .
	ruff format .
	snakefmt Snakefile workflow/rules

docs: .venv/run.done
	python docs/generate.py

figures: .venv/run.done docs
	snakemake --rulegraph dot 2>/dev/null | sed 's/graph\[/graph[rankdir=LR, /' | dot -Tsvg > docs/dag.svg
	cp results/quickstart/figures/accuracy.svg docs/accuracy.svg

lock: .venv/test.done
	for name in requirements requirements-dev; do \
	  uv pip compile --universal --python-version 3.11 --no-header --no-emit-index-url --no-annotate \
	    --generate-hashes $$name.in -o $$name.txt; \
	done

# The tests on Slurm use it if it is up, and leave it up: python tests/cluster/cluster.py run sinfo
cluster-up:
	@$(PYTHON) tests/cluster/cluster.py up

cluster-down:
	@$(PYTHON) tests/cluster/cluster.py down

# OPENPBS: the tree of an OpenPBS, or a tarball with opt/pbs; without it, the one in /opt/pbs.
pbs-up:
	@CLUSTER_KIND=pbs $(PYTHON) tests/cluster/cluster.py up

pbs-down:
	@CLUSTER_KIND=pbs $(PYTHON) tests/cluster/cluster.py down

# Each of the two is a copy of the locks that were installed; of times an unpacked archive has old ones.
# flock: a second `make` waits for the first instead of installing over it.
# Others read a checkout that they cannot write to.
WRITABLE = (: >>.venv.lock) 2>/dev/null || { echo "make: $(CURDIR) cannot be written to: who has installed it runs \`make run\` once; then snakemake --snakefile $(CURDIR)/Snakefile --directory FOLDER …" >&2; exit 1; }
OTHER = $(if $(shell cat $(1) | cmp --silent - $(2) && echo same),,FORCE)
.PHONY: FORCE
.venv/run.done: $(call OTHER,requirements.txt,.venv/run.done)
	@$(WRITABLE)
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null || \
	  { echo "make: $(PYTHON) must be Python 3.11 or later with venv (Debian: apt-get install python3 python3-venv); set PYTHON=…" >&2; exit 1; }
	@flock .venv.lock $(MAKE) --no-print-directory .install STAMP=$@ LOCKS="requirements.txt"

.venv/test.done: $(call OTHER,requirements.txt requirements-dev.txt,.venv/test.done) | .venv/run.done
	@$(WRITABLE)
	@flock .venv.lock $(MAKE) --no-print-directory .install STAMP=$@ LOCKS="requirements.txt requirements-dev.txt"

.PHONY: .install
.install:
	@# Of an installation that is interrupted, nothing is known.
	@rm -f $(STAMP)
	@# Again, if that was interrupted before pip was there.
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "Installing $(LOCKS) into .venv (a few minutes the first time)"
ifeq ($(TORCH),site)
	@# A site's own wheels have other hashes.
	@sed --expression '/^ *--hash=/d' --expression 's/ \\$$//' $(LOCKS) | \
	  grep --invert-match --extended-regexp '$(OUTSIDE)' > .venv/requirements.txt
	@.venv/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -r .venv/requirements.txt
	@.venv/bin/python -c 'import torch' || \
	  { echo "make: TORCH=site: this Python finds no torch; load your site's module or set PYTHONPATH (docs/environments.md)" >&2; exit 1; }
else
	@# -E: packages on PYTHONPATH are another day's, or another machine's, not there.
	@.venv/bin/python -E -m pip install --quiet --no-compile --disable-pip-version-check --require-hashes $(foreach lock,$(LOCKS),-r $(lock)) || \
	  { echo "make: pip has not installed the locked packages into $$(.venv/bin/python --version): see its lines above; if it compiled one without a wheel (immutables for 3.14), install a compiler and Python.h (Debian: apt-get install gcc python3-dev), or set PYTHON=python3.13 and remove .venv" >&2; exit 1; }
endif
	@# pip compiles on one CPU, a third of its time; some packages have files of another Python.
	@.venv/bin/python -m compileall -qq -j 0 .venv/lib || true
	@# Snakemake finds the executor for PBS on Python's path; relative to the folder of this file.
	@.venv/bin/python -c 'import sysconfig, pathlib; \
	  pathlib.Path(sysconfig.get_path("purelib"), "executors.pth").write_text("../../../../workflow/executors\n")'
	@.venv/bin/python -c 'import snakemake, torch, yaml' || \
	  { echo "make: pip has not installed into .venv; does its configuration (pip config list) say another place?" >&2; exit 1; }
	@cat $(LOCKS) > $(STAMP)
