# `make demo` trains the example job on this machine; `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests of whole jobs wait for a third of their time: one process more than there are cores, and four at most.
PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
PROTOS := $(wildcard api/emberscale_api/rpc/*.proto)

.PHONY: help install demo test pytest explore test-s3 e2e lint docs release manifests protos clean

help:
	@echo "make install   everything into .venv, kernels compiled; the other targets do it first"
	@echo "make demo      train deploy/examples/criteo-dlrm.yaml here, end to end, on a million synthetic rows"
	@echo "make test      lint, types, import contracts, the documentation's links and examples, and the whole test suite"
	@echo "make lint      only the first three; types are those of the documentation's Python too"
	@echo "make pytest    only the last"
	@echo "make explore   the property tests once more, with examples that no run has tried yet"
	@echo "make docs      build the documentation site into site/; a broken link or reference fails"
	@echo "make test-s3   checkpoints in a bucket of a real S3 server (moto's) that fails, on this machine"
	@echo "make e2e       the end-to-end suite on a Kubernetes cluster (tests/kubernetes/cluster.sh says on which)"
	@echo "make manifests regenerate the CustomResourceDefinition and deploy/ from the types and the chart (needs helm)"
	@echo "make release   build the wheel, the chart and the list of components (SBOM) of one version into dist/ (needs helm)"
	@echo "make protos    regenerate the gRPC stubs after a change to a .proto"
	@echo "make clean     delete .venv, build/, runs/, data/, dist/, site/ and all caches"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing Emberscale, PyTorch and tools into $(VENV): some minutes, and about 2.5 GB on disk; several GB more with a CUDA build"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	NUMBA_CACHE_DIR="$${XDG_CACHE_HOME:-$$HOME/.cache}/emberscale/numba" $(BIN)/python -m emberscale_trainer.compile_kernels
	NUMBA_CACHE_DIR="$${XDG_CACHE_HOME:-$$HOME/.cache}/emberscale/numba" $(BIN)/python -c 'import emberscale_brain.planner.sieve'
	touch $@

demo: install
	$(BIN)/emberscale data synth data/criteo-synthetic --rows 1000000 --seed 1
	$(BIN)/emberscale run deploy/examples/criteo-dlrm.yaml --overwrite

test: install
	$(MAKE) --jobs 3 lint docs pytest

pytest: install
	$(BIN)/pytest --numprocesses $(PROCESSES) --dist worksteal

explore: install
	$(BIN)/pytest --numprocesses $(PROCESSES) --dist worksteal --hypothesis-profile explore -m hypothesis

# Beside the environment: its packages exclude some of those there.
test-s3: install
	$(BIN)/pip install --quiet --target $(VENV)/s3 --upgrade 's3fs>=2024.12' 'moto[s3]>=5.1' flask flask-cors
	PYTHONPATH=$(VENV)/s3 $(BIN)/pytest tests/trainer/checkpoint/test_s3.py

e2e: install
	tests/kubernetes/cluster.sh

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tests/support/documented_code.py build/documented
	$(BIN)/mypy api/emberscale_api brain/emberscale_brain jobmaster/emberscale_jobmaster operator/emberscale_operator sdk/emberscale simulator/emberscale_simulator trainer/emberscale_trainer tests benchmarks deploy build/documented
	$(BIN)/lint-imports

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

release: install
	deploy/release.sh

manifests: install
	$(BIN)/python -m emberscale_api.job.crd > deploy/crd/emberscale.io_trainingjobs.yaml
	deploy/render.sh

protos: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=api --python_out=api --grpc_python_out=api --mypy_out=api --mypy_grpc_out=api $(PROTOS)

clean:
	rm -rf $(VENV) build runs data dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
