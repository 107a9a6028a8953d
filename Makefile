# `make help` lists what there is. Everything that needs Python packages makes .venv first and brings it up to date when
# pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
JOBS   ?= 2
DEMO   := .demo

# One thread a process: the tests run side by side, and the tensors are small.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test memcheck check lint types rooms rules format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Compile the small example model, verify it against its own eager code, leave dumps to read
	@TRITON_INTERPRET=1 $(BIN)/kimigraph compile examples/k31_tiny --phase decode --batch 2 --context 256 --target cpu \
		--verify --out $(DEMO)/k31_tiny --dump-passes $(DEMO)/dumps
	@echo
	@echo "Read the program:    $(DEMO)/k31_tiny/program.py"
	@echo "and its kernels:     $(DEMO)/k31_tiny/kernels/"
	@echo "What each pass did:  $(BIN)/kimigraph dumps list $(DEMO)/dumps"

test: $(READY) ## Run all tests: first with the Triton compiler, then with its interpreter
	$(PYTEST) -n $(JOBS) --ignore tests/interpreter
	TRITON_INTERPRET=1 $(PYTEST) -n $(JOBS) tests/interpreter

memcheck: $(READY) ## On a GPU: memory errors of the indexer, attention and cache writers, found by compute-sanitizer
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 \
		$(PYTEST) -p no:randomly tests/gpu/test_indexer_gpu.py tests/gpu/test_lightning_indexer_prefill_gpu.py \
		tests/gpu/test_kernels_gpu.py tests/gpu/test_cache_writers_gpu.py \
		-k "exact_sets or few_codes or short_rows or unmapped or cache_rows or own_limits or prefill or attention_at_width or many"

check: lint types rooms rules ## Check style, types, the arrows between rooms and house rules (-k: do not stop at the first)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

rooms: $(READY)
	$(BIN)/lint-imports --no-logo

rules: $(READY)
	$(BIN)/python scripts/check_sources.py

format: $(READY) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## Remove .venv and everything that was generated
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kimigraph needs Python 3.11 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (torch is large: this takes a while the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,onnx,dev]'
	@touch $@
