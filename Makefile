# `make run` and `make test` need python3 (3.11, 3.12 or 3.13) and a network, nothing else. They install into .venv.
# Choose a Python: make run PYTHON=python3.12.  Pass arguments on: make test ARGS="-k core_locks"

ARGS ?=

# Settings of an activated environment, or of the user's pip, that would lead the installation elsewhere.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV __PYVENV_LAUNCHER__ PIP_PREFIX PIP_PYTHON PIP_ROOT PIP_TARGET
export PIP_USER = 0

.DEFAULT_GOAL := help
.PHONY: help run test test-all check format bench gpu docs generate results clean install install-dev .environment

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

run: install ## install if need be, then train a small federation and show what it learned
	@.venv/bin/hyperfl quickstart $(ARGS)

PYTEST = .venv/bin/python -m pytest -n 5 --dist loadscope --no-loadscope-reorder

# One thread in each process, and memory that is freed stays with it: a fifth less time on two cores. Bytecode is kept
# whatever the environment says, since the tests start hundreds of processes that import this project.
test test-all: export PYTHONDONTWRITEBYTECODE =
test test-all: export OMP_NUM_THREADS = 1
test test-all: export OPENBLAS_NUM_THREADS = 1
test test-all: export MKL_NUM_THREADS = 1
test test-all: export MALLOC_MMAP_THRESHOLD_ = 2000000000
test test-all: export MALLOC_TOP_PAD_ = 300000000
test test-all: export MALLOC_TRIM_THRESHOLD_ = 4000000000
test: install-dev ## run the tests, in five processes; ARGS chooses among all of them
	@$(PYTEST) $(or $(ARGS),-m "not extended")

test-all: install-dev ## run all tests, as continuous integration does
	@$(PYTEST) $(ARGS)

check: install-dev ## lint, formatting and types
	@.venv/bin/python -m ruff check .
	@.venv/bin/python -m ruff format --check .
	@.venv/bin/python -m mypy

format: install-dev ## format the code and mend what can be mended
	@.venv/bin/python -m ruff check --fix .
	@.venv/bin/python -m ruff format .

bench: install-dev ## measure speed and memory
	@.venv/bin/python -m benchmarks $(ARGS)

gpu: install-dev ## prove this machine's GPU: doctor, CUDA tests, goldens, a run, speed; writes build/gpu.json
	@.venv/bin/python -m benchmarks.gpu $(ARGS)

generate: install-dev ## write the settings' table and the pages that are generated from the code
	@.venv/bin/python scripts/generate_settings.py
	@.venv/bin/python scripts/generate_docs.py

results: install-dev ## write the tables and figures of the pages from the records of studies
	@.venv/bin/python scripts/generate_results.py

docs: install-dev ## build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

clean: ## remove .venv and everything that was built; keeps runs/
	@$(REMOVE_VENV)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The installation into .venv. A call continues one that was interrupted, at whatever moment:
# .venv/.install and .venv/.install-dev are written last, and hold the files that were installed from;
# .venv/.folder holds the path of this folder once the environment is made, since it cannot be moved.

VERSIONS = 3.13 3.12 3.11
IS = -E -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])'
VERSION = -E -c 'import sys; print("%d.%d" % sys.version_info[:2])'
# Looked for at its first use, and only then.
FOUND = $(eval FOUND := $(shell for python in $(or $(PYTHON),python3 $(VERSIONS:%=python%)); do \
	$$python $(IS) $(VERSIONS) && echo $$python && break; done 2>/dev/null))$(FOUND)
WANTED = $(if $(PYTHON),$(shell $(PYTHON) $(VERSION) 2>/dev/null),$(VERSIONS))
USABLE = .venv/bin/python $(IS) $(WANTED) 2>/dev/null && \
	{ [ ! -s .venv/.folder ] || [ "$$(cat .venv/.folder)" = "$$(pwd -P)" ]; }
CURRENT = $(USABLE) && [ "$$(cat pyproject.toml constraints.txt)" = "$$(cat .venv/.$@ 2>/dev/null)" ]
# Held until this shell and all that it started have ended. (macOS has no flock(1).)
LOCK = exec 9>>Makefile; $(FOUND) -E -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
# A link goes, and what it leads to stays. The Python goes first: without it, what is left is never used.
REMOVE_VENV = rm -f .venv 2>/dev/null; rm -rf .venv/bin/python .venv
PACKAGES = .venv/lib/python3*/site-packages
TORCH = $(PACKAGES)/torch-*.dist-info

define NO_PYTHON
	echo "error: Python 3.11, 3.12 or 3.13 is needed, but $(or $(PYTHON),python3) --version answers:"; \
	$(or $(PYTHON),python3) --version; \
	echo "Install one of them, then choose it, for example: make run PYTHON=python3.12"; exit 1
endef
define UNFIT_FOLDER
	echo "error: the path of this folder must have no quotation mark, dollar sign, backquote or backslash; rename it."; \
	pwd -P; exit 1
endef
define NO_VENV
	echo "error: $(FOUND) could not make a virtual environment with pip, see above."; \
	echo "On Debian and Ubuntu this may help: sudo apt install python$$($(FOUND) $(VERSION))-venv"; exit 1
endef
define NO_INSTALLATION
	echo "error: pip could not install the project, see above. Start it again: what is there is kept."; exit 1
endef

install install-dev:
	@$(CURRENT) || { [ -n "$(FOUND)" ] || { $(NO_PYTHON); } >&2; $(LOCK) || exit; \
		$(CURRENT) || $(MAKE) --no-print-directory .venv/.$@; }

.environment:
# The programs in .venv begin with this path, in quotes of the shell if it is long or has a space.
	@case $$(pwd -P) in *[\"\$$\`\\]*) { $(UNFIT_FOLDER); } >&2;; esac
	@$(USABLE) || { echo "Making .venv with $(FOUND)."; $(REMOVE_VENV); mkdir .venv && \
		echo unfinished >.venv/.folder && $(FOUND) -m venv --without-pip .venv; } || { $(NO_VENV); } >&2
	@pwd -P >.venv/.folder
	@rm -rf .venv/.install .venv/.install-dev $(PACKAGES)/~*
# pip lists INSTALLER in RECORD when a package is complete, and takes one without a record for absent.
	@for record in $(PACKAGES)/*.dist-info; do grep -qs /INSTALLER, "$$record/RECORD" || rm -rf "$$record"; done
	@.venv/bin/python -m pip show -q pip 2>/dev/null || { rm -rf $(PACKAGES)/pip-*.dist-info; \
		.venv/bin/python -m ensurepip --default-pip >/dev/null; } || { $(NO_VENV); } >&2

.venv/.install-dev: EXTRAS = [dev]
.venv/.install .venv/.install-dev: .environment
# A torch that was there before the first installation is the user's: its version takes the place of the pins, here
# and, since .venv/constraints.txt has no torch== then, ever after.
	@if grep -qs '^torch==' .venv/constraints.txt || ! ls -d $(TORCH) >/dev/null 2>&1; then cat constraints.txt; \
		else sed '/^torch[v=]/d' constraints.txt; ls -d $(TORCH) | sed 's/.*torch-\(.*\).dist-info/torch == \1/'; \
		fi >.venv/constraints.new
	@mv .venv/constraints.new .venv/constraints.txt
	@cat pyproject.toml constraints.txt >.venv/.state
	@echo "Installing into .venv; the first time this takes some minutes."
	@.venv/bin/python -m pip install --disable-pip-version-check -c .venv/constraints.txt -e '.$(EXTRAS)' || \
		{ $(NO_INSTALLATION); } >&2
	@cp .venv/.state .venv/.install && mv .venv/.state $@
