# make demo   convert the shipped sqlctx adapter, answer questions with it, validate every back end
#             (make demo INPUT=test.jsonl.gz: your own rows with question and context)
# make test   style check and tests
# make clean  remove what demo and test made (the virtual environment stays; `make distclean` removes it)
# Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# MLX's own matrix products on Linux are slow; the runtime loads this library when it is there.
OPENBLAS := $(wildcard /usr/lib/*-linux-gnu/openblas-pthread/libblas.so.3)

.PHONY: demo test clean distclean install blas-hint

demo: $(INSTALLED) blas-hint
	@$(BIN)/python -m ss_runtime.demo $(if $(INPUT),--input $(INPUT))

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed (make PYTHON=python3.11 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is needed (Debian: apt install python3-venv)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (several minutes the first time) ..."
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

blas-hint:
ifeq ($(shell uname -s)$(OPENBLAS),Linux)
	@echo "hint: MLX on Linux runs several times faster with OpenBLAS (apt install libopenblas0-pthread)"
endif

clean:
	rm -rf build/sqlctx build/.sqlctx.* .pytest_cache .ruff_cache
	find ss_device convert runtime tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
