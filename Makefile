# make setup | test | test-all | test-reliability | audit | demo | docs | dist | lint | format | clean
#
# VENV    the environment to fill and use: .venv, or one of yours: `make setup VENV=$CONDA_PREFIX`
# PYTHON  the Python 3.11 to 3.14 that .venv is made with (default: the first one that works; 3.13 has no fairseq)
# FAIRSEQ_WHEEL  a file that fairseq is installed from: FILE or FILE#sha256=HASH (default: the index's)
# CORPUS  text for `make demo` (default: the English prose that Python itself carries)
# OUTPUT  folder of its results (default: results/demo)
# TEST_PROCESSES  of `make test` (default "auto": one a core; 0: in this process, for a debugger)
VENV ?= .venv
PYTHON ?=
FAIRSEQ_WHEEL ?=
CORPUS ?=
OUTPUT ?=
PYTEST_ARGS ?= -m "not slow"
TEST_PROCESSES ?= auto

RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/setup.stamp

.PHONY: setup test test-all test-reliability audit demo docs dist lint format clean FORCE
.DEFAULT_GOAL := test

setup: $(STAMP)
	@:

$(STAMP): setup.py pyproject.toml scripts/setup.sh scripts/find_python.sh scripts/choose_torch.py \
		scripts/keep_fairseq.py
	@PYTHON="$(PYTHON)" FAIRSEQ_WHEEL="$(FAIRSEQ_WHEEL)" exec scripts/setup.sh "$(VENV)"
	@touch $@

# What is asked for by name is not silently what is there.
ifeq ($(origin FAIRSEQ_WHEEL),command line)
$(STAMP): FORCE
endif

# Compiled files are kept, whatever the environment says: each process would compile the tests again.
test: lint
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

test-all: PYTEST_ARGS =
test-all: test

# In full and one after the other: they kill processes, fill disks, measure memory. What they count goes to a file, a
# line a test, and from there by hand to docs/reliability.md.
RELIABILITY_COUNTS := $(CURDIR)/results/reliability_counts.jsonl
test-reliability: lint
	@rm -f "$(RELIABILITY_COUNTS)"
	@OMP_NUM_THREADS=1 LAZYFORMER_RELIABILITY_COUNTS="$(RELIABILITY_COUNTS)" \
		$(RUN) pytest --numprocesses 0 --timeout 7200 -m reliability -v
	@echo "counted: $(RELIABILITY_COUNTS)"

lint: $(STAMP)
	@$(RUN) ruff check --quiet .
	@$(RUN) ruff format --check --quiet . || { echo 'Some files are not formatted: run "make format".'; exit 1; }
	@$(RUN) mypy --no-error-summary

# pip-audit is installed on top of the environment, and asks a service on the network.
audit: $(STAMP)
	@$(RUN) pip install --quiet 'pip-audit>=2.7,<3'
	@$(RUN) pip_audit --skip-editable --progress-spinner off

format: $(STAMP)
	@$(RUN) ruff check --quiet --fix --exit-zero .
	@$(RUN) ruff format .

demo: $(STAMP)
	@$(RUN) lazyformer_fairseq.cli demo $(if $(CORPUS),--corpus "$(CORPUS)") $(if $(OUTPUT),--output "$(OUTPUT)")

# The documentation as a site. A browser shows it from a server: python -m http.server --directory build/site
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet
	@echo "Site: build/site"

# The source distribution and the wheel, in an environment of their own: they need none of the project's packages.
dist:
	@rm -rf dist build/dist
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" -m venv build/dist
	@build/dist/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.3,<2' 'twine>=6.1,<8'
	@build/dist/bin/python -m build --quiet
	@build/dist/bin/python -m twine check --strict dist/*

# What was built or cached goes; the environment and your results stay.
clean:
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find lazyformer_fairseq tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
