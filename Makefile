# Everything a developer does, from a fresh clone, with Python 3.11 or newer and make.
PYTHON ?= python3
PYTHON310 ?= python3.10
BIN := .venv/bin
DEMO := build/demo

.PHONY: setup demo test test-all lint scale check-310 clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"error: Python {v[0]}.{v[1]} found, 3.11 or newer needed; run: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The tiny omni model that comes with motrt: exported, shown in both modes from one process without
# torch, scored; then compared with the checkpoint through diffusers and transformers.
demo: setup
	rm -rf $(DEMO)
	$(BIN)/motrt demo -o $(DEMO)
	$(BIN)/motrt validate $(DEMO)/separate/bundle --against $(DEMO)/separate/checkpoint
	$(BIN)/motrt inspect $(DEMO)/separate/bundle

test: setup
	$(BIN)/python -m pytest -m 'not full'

# The whole product of fixtures, precisions and lowerings.
test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/python tests/lint.py

# Edge, Nano and Super from checkpoints that are holes on disk; both lowerings.
scale: setup
	$(BIN)/python tests/scale.py

# What JetPack 6 has: Python 3.10, an older ONNX Runtime, the portable lowering.
check-310: setup
	$(BIN)/python tests/check_python310.py $(PYTHON310)

clean:
	rm -rf .venv build dist
