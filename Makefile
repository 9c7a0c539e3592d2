# make demo   convert the shipped sqlctx adapter, answer questions with it, validate every back end
#             (make demo INPUT=test.jsonl.gz: your own rows with question and context)
# make test   style check, documentation site and tests; those of the Swift package too where there is a Swift toolchain
# make site   the documentation as a website in build/site
# make test-swift   the Swift package's tests, after providing a toolchain (scripts/swift_toolchain.sh)
# make models DATA=folder [MINUTES=90] [WORK=folder]  train the whole demo: base, adapters, tables (docs/models.md)
# make families  every model family on every back end against Hugging Face (table in docs/families.md)
# make fuzz [MINUTES=10] [SEED=0]  damaged files to every command, make soak [MINUTES=10]: random models and
#             requests for long (docs/robustness.md)
# make device-check [DEVICE=cuda] [OUTPUT=file.json]  the PyTorch reference on a GPU against the CPU, and its speed there
#             (docs/reference.md)
# make faults  kill, refuse and race every command at its changes to files (docs/fault_injection.md)
# make clean  remove what demo and test made (the virtual environment stays; `make distclean` removes it)
# Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# MLX's own matrix products on Linux are slow; the runtime loads this library when it is there.
OPENBLAS := $(wildcard /usr/lib/*-linux-gnu/openblas-pthread/libblas.so.3)

MINUTES ?=
SEED ?= 0

.PHONY: demo test site device-check fuzz soak faults models families test-swift run-test-swift clean distclean install blas-hint

demo: $(INSTALLED) blas-hint
	@$(BIN)/python -m scripts.demo $(if $(INPUT),--input $(INPUT))

# One thread per worker: two workers with two threads each get in each other's way on two cores.
test: $(INSTALLED)
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory site
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
	@if scripts/swift_toolchain.sh find; then $(MAKE) --no-print-directory run-test-swift; else \
	    echo "Swift tests not run: there is no Swift toolchain here (make test-swift provides one)"; fi

# Warnings are errors: a link that leads nowhere, a page that no table of contents names.
site: $(INSTALLED)
	@$(BIN)/python -m sphinx -q -W --keep-going -n -E -c docs -d build/site-cache . build/site
	@echo "documentation: build/site/index.html"

test-swift: $(INSTALLED)
	@scripts/swift_toolchain.sh provide
	@$(MAKE) --no-print-directory run-test-swift

# Warnings are errors on Linux; on a Mac the flag would also reach the packages that ours depends on.
TINY := build/swift-tiny
run-test-swift: $(INSTALLED) $(TINY)/answers.json
	cd apps/swift && SS_PYTHON=$(CURDIR)/$(BIN)/python SS_TINY_BUNDLE=$(CURDIR)/$(TINY) SS_REPOSITORY=$(CURDIR) \
	    OMP_NUM_THREADS=1 ../../scripts/swift_toolchain.sh run swift test \
	    $(if $(filter Linux,$(shell uname -s)),-Xswiftc -warnings-as-errors)
ifeq ($(shell uname -s),Linux)
	@cd apps/swift && ../../scripts/swift_toolchain.sh run swiftc -frontend -parse \
	    Sources/SpeculativeChat/*.swift Sources/SpeculativeStreamingTokenizers/*.swift
	@echo "sources for Apple platforms only were parsed, not compiled"
endif

$(TINY)/answers.json: tests/swift/tiny_bundle.py convert/ss_convert/graph/interface.py convert/ss_convert/coreai_stage.py \
    ss_device/bundle.py | $(INSTALLED)
	@echo "converting tiny random bundles for the Swift tests ..."
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.swift.export_traces bundle --output $(TINY) >/dev/null

models: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make models needs DATA=folder (docs/models.md says what is in it)" >&2; exit 2; }
	$(BIN)/python -m scripts.train_models --data $(DATA) $(if $(MINUTES),--minutes $(MINUTES)) \
	    $(if $(WORK),--work $(WORK))

families: $(INSTALLED)
	@$(BIN)/python -m tests.families --markdown docs/families.md

device-check: $(INSTALLED)
	@$(BIN)/python -m scripts.device_check --adapter models/adapters/sqlctx --base models/base/ss-demo-base \
	    $(if $(DEVICE),--device $(DEVICE)) $(if $(OUTPUT),--output $(OUTPUT))

fuzz: $(INSTALLED)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --rebuild \
	    --minutes $(or $(MINUTES),10) --seed $(SEED)

soak: $(INSTALLED)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.soak --server \
	    --minutes $(or $(MINUTES),10) --seed $(SEED)

# One thread, as for the tests; FAULTS="races --rounds 100" for a part of it.
faults: $(INSTALLED)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.faults $(FAULTS)

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
	rm -rf build/sqlctx build/.sqlctx.* build/fuzz-inputs build/swift-tiny build/site build/site-cache apps/swift/.build .pytest_cache .ruff_cache
	find ss_device convert runtime tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
