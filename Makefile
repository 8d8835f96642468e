# `make demo` trains the example job on this machine; `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard api/emberscale_api/rpc/*.proto)

.PHONY: help install demo test lint protos clean

help:
	@echo "make demo      train deploy/examples/criteo-dlrm.yaml here, end to end, on a million synthetic rows"
	@echo "make test      lint, types, import contracts and the whole test suite"
	@echo "make lint      only the first three"
	@echo "make protos    regenerate the gRPC stubs after a change to a .proto"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

protos: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=api --python_out=api --grpc_python_out=api --mypy_out=api --mypy_grpc_out=api $(PROTOS)
