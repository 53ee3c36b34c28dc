# make demo and make test need nothing but Python 3.11 or 3.12 and a network: the virtual environment is made
# on the first call and reused after that.
#
#   PYTHON=python3.12   the interpreter to build the environment from (default: the first suitable one found)
#   TORCH=cpu|cuda|host which torch to install; host = use the one PYTHON already imports
#                       (default: host where PYTHON has a CUDA torch and a GPU is there, cuda with a GPU, else cpu)
#   PYTEST_ARGS=...     passed on to pytest
#   WORKERS=...         processes that make test divides the files of tests among (default: a CPU each, 8 at most)

VENV  ?= .venv
TORCH ?= auto
PYTEST_ARGS ?=
WORKERS ?= auto
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1 && echo $$p && break; done)

STAMP := $(VENV)/.cutegemm-ready
PY    := $(VENV)/bin/python
export PYTHONUNBUFFERED = 1
# Tests start hundreds of Python processes: none should have to parse the package again.
export PYTHONDONTWRITEBYTECODE =
export CUTEGEMM_EVERY_TEST

.PHONY: demo test test-every test-gpu lint format bench fuzz doctor setup clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@echo "make demo      compile a GEMM, show what came out, run it on a GPU or an emulator, check it"
	@echo "make test      lint, types, and every test that needs no GPU"
	@echo "make test-every   the same with every parameter of tests that make test takes a sample of"
	@echo "make test-gpu  the tests that need a GPU"
	@echo "make bench     measure against cuBLAS on the GPU"
	@echo "make fuzz      random products on the GPU until one is wrong;  FUZZ_ARGS='--target sm_90a' in the emulator"
	@echo "make doctor    what can this machine do, and what is missing"
	@echo "make lint      lint and types only;  make format  rewrite the formatting"
	@echo "make clean     remove the virtual environment and every cache inside this folder"

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup_venv.py
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) tools/setup_venv.py --venv $(VENV) --torch $(TORCH)
	@touch $@

demo: $(STAMP)
	@$(PY) examples/demo.py

doctor: $(STAMP)
	@$(PY) -m cutegemm doctor

lint: $(STAMP)
	@echo "== ruff check";  $(PY) -m ruff check .
	@echo "== ruff format"; $(PY) -m ruff format --check .
	@echo "== mypy";        $(PY) -m mypy

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

test: lint
	@echo "== pytest"; $(PY) -m pytest -m "not gpu" -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		--durations 12 $(PYTEST_ARGS)

# Of some tests, make test runs a sample of the parameters.
test-every:
	@$(MAKE) test CUTEGEMM_EVERY_TEST=1

test-gpu: $(STAMP)
	@$(PY) -m pytest -m gpu $(PYTEST_ARGS)

bench: $(STAMP)
	@$(PY) -m cutegemm bench $(BENCH_ARGS)

fuzz: $(STAMP)
	@$(PY) -m cutegemm fuzz $(FUZZ_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
