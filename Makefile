# `make help` lists the targets. Python >= 3.10 and make are all that has to be there: everything else goes into .venv.

PYTHON ?= python3
VENV   ?= .venv
# Anything pip should be told besides, such as an index with CPU-only builds of torch.
PIP_FLAGS ?=
# Anything pytest should be told besides: make test PYTEST_FLAGS='-x tests/replay_core/compare'
PYTEST_FLAGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# The demo and the tests are small: two threads finish them sooner than many that wait for each other.
export OMP_NUM_THREADS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz check fmt docs site tolerances frameworks integrations bench bench-compare bench-record bench-replay bench-causes bench-diagnose bench-ui install clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## train a tiny policy, pack a micro-batch wrongly, see the first diverging tensor
	@$(BIN)/rldbg demo; code=$$?; \
	if [ $$code -eq 1 ]; then echo "make demo: it ends on a divergence (exit 1), as it should" >&2; \
	else echo "make demo: expected exit 1, a divergence found; got $$code" >&2; exit $$(( code ? code : 1 )); fi

# Three processes on two cores, since tests of the screen and of children wait now and then; a thread each.
PARALLEL := -n 3 --dist worksteal
QUICK ?= not slow and not long
test test-all check: export OMP_NUM_THREADS = 1
# Hundreds of tests start a child: where an environment forbids to keep compiled code, each child compiles rldbg anew.
test test-all check: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP)  ## the quick tests: what to run after every change
	$(BIN)/python -m pytest -m "$(QUICK)" $(PARALLEL) $(PYTEST_FLAGS)

test-all: $(STAMP)  ## all tests
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_FLAGS)

SECONDS ?= 60
fuzz: $(STAMP)  ## mutated files of every kind that is read, SECONDS=60 of them
	$(BIN)/python -m tests.fuzz $(SECONDS)

check: $(STAMP)  ## form, lint, types of code and tests, quick and long tests: what a change must pass
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "types of the code, and beside them those of the tests"
	@$(BIN)/mypy --config-file tests/mypy.ini & tests=$$!; $(BIN)/mypy; code=$$?; wait $$tests && exit $$code
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(PYTEST_FLAGS)

fmt: $(STAMP)  ## put the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## the pages and pictures that are made from the code
	$(BIN)/python -m replay_core.diagnose.catalogue > docs/diagnostics.md
	$(BIN)/python -c "from replay_core.replay.flags import page; print(page(), end='')" > docs/flags.md
	$(BIN)/python -m replay_core.documents.schema > replay_core/documents/schema.json
	$(BIN)/python docs/pictures.py

site: $(STAMP)  ## the documentation as a site, in build/site; a broken link stops it
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build

tolerances: $(STAMP)  ## docs/tolerances.md: the limits, and what was measured against them (two minutes)
	$(BIN)/python -m benchmarks.tolerances > docs/tolerances.md.new && mv docs/tolerances.md.new docs/tolerances.md

frameworks: $(STAMP)  ## docs/frameworks.md: real trainers recorded, unrecorded and replayed (half an hour; goes on where it was)
	$(BIN)/python -m benchmarks.frameworks

integrations: $(STAMP)  ## the signatures of what is hooked, against the frameworks' packages (fetches them)
	$(BIN)/python -m tests.docs.signatures
	$(BIN)/python -m tests.docs.fusions

bench: $(STAMP)  ## the speed budgets, each beside what it is measured against
	$(BIN)/python -m benchmarks

bench-compare: $(STAMP)  ## comparing: speed and the fault matrix, beside other tools
	$(BIN)/python -m benchmarks identical differing matrix

bench-record: $(STAMP)  ## what recording costs a training step, and write throughput
	$(BIN)/python -m benchmarks recording training

bench-replay: $(STAMP)  ## what capture costs a forward, and a warm flip against one
	$(BIN)/python -m benchmarks replaying

EVERY ?= 9
bench-causes: $(STAMP)  ## planted faults of models: what a replay calls them, and healthy models beside; each EVERY-th (9: half an hour)
	@$(BIN)/python -m benchmarks.replay_zoo faults --every $(EVERY)
	@$(BIN)/python -m benchmarks.replay_zoo held-back --every $(EVERY)
	@$(BIN)/python -m benchmarks.replay_zoo healthy --every $(EVERY)

bench-diagnose: $(STAMP)  ## the diagnosis on runs really trained with planted faults, and without (ten minutes)
	@$(BIN)/python -m benchmarks.diagnose

bench-ui: $(STAMP)  ## the screen: first paint, idle cost, key to paint under load
	$(BIN)/python -m benchmarks screens

install: $(STAMP)  ## only make .venv and install into it

$(STAMP): pyproject.toml constraints.txt hatch_build.py replay_core/native.c
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON); name one with make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "rldbg needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0] + "\nhint: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
	@echo "installing rldbg and what it needs into $(VENV) (once; torch is the large part)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[replay,test]'
	@touch $@

clean:  ## remove .venv and what tests and builds left
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
