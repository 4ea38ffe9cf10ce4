# make demo    install what this Python can have into .venv and run the main job
# make test    install what is missing and run the tests that find different bugs, on both stacks
# make test-rest    run what `make test` leaves out (SLOW=1: all of it; LIMIT=300: for 5 minutes a stack)
# make test-flower    run all tests of Flower with real processes, in an environment of their own
# make test-ray    run all tests of Ray with two nodes on this machine, in an environment of their own
# make test-peers    run peers' own tests on private classes: passed, refused in words, or different
# make test-changed    run the tests of what was changed since SINCE, and of what imports it
# make mutants    plant bugs one at a time and see the tests notice (ONLY=word: those named so)
# make test PYTHON=python3.12    the same with another Python, in environments of its own
# make test-fast PYTHON=python3.12    the part of the tests that notices another Python
# make test-engines    run the most important tests of Flower and Ray, for some minutes
# make ci    lint, docs, test, test-fast on a newer Python, test-engines, test-rest for 150 s a stack
# make lint    check style, imports, types and the subjects of the last 50 commits
# make docs    build the pages into build/site
# make wheel   build the wheel and the source distribution into dist, and check what an index reads
# make notebooks    run the notebooks of colabs/ again and keep what they show
# make recipes   run the programs of examples/recipes/ again and keep what they print
# make bench   measure all tables of speed (QUICK=1: a row of each): bench-{clipping,users,edges,federated}
# make bench-peers    install what the benchmarks compare with into build/peers (Python 3.11)
# make audit-table    audit every optimizer, plant bugs into each, and write docs/audit.md
# make accounting-table    compare 1,000 epsilons with an independent accountant, docs/accounting.md
# make independence-table    try every mixing model and every honest one, docs/independence.md
# make lock    resolve requirements/*.lock again (LOCK_FLAGS=--upgrade for newer versions)

SHELL = /bin/sh
# Unless modules are kept compiled, every process takes five seconds more to import TensorFlow.
unexport PYTHONDONTWRITEBYTECODE
SLOW =
LIMIT =
COMMITS = $(shell git rev-list --count HEAD 2>/dev/null)
RUN = TF_CPP_MIN_LOG_LEVEL=2 PYTHONUNBUFFERED=1
JOBS = 2
PYTEST = -m pytest -n $(JOBS) --dist worksteal -q --color=no $(if $(SLOW),--slow) \
  $(if $(LIMIT),--limit=$(LIMIT) --shuffle=$(or $(COMMITS),0))

# The first interpreter that really starts, is 3.9 to 3.13 and can make environments; one that
# TensorFlow Federated runs on (3.9 to 3.11) comes first.
PYTHON := $(shell for python in python3.11 python3.10 python3.9 python3.12 python3.13 python3; do \
  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 13))' \
    >/dev/null 2>&1; then echo $$python; break; fi; done)
VERSION := $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))

NO_PYTHON = No usable Python 3.9 to 3.13 was found. \
  Debian 12: apt install python3.11-venv. Other Debian and Ubuntu: apt install python3-venv. \
  Elsewhere: put python3.11 (with its venv module) on PATH, or call make PYTHON=/path/to/python3.11.

# A Python that is named gets environments of its own.
SUFFIX := $(if $(filter command% environment%,$(origin PYTHON)),-$(VERSION))
CURRENT = .venv-keras3$(SUFFIX)
# .venv has all that this Python can have: there is no TensorFlow Federated for 3.12 and later.
FULL = .venv$(SUFFIX)
HAS_TFF := $(filter 3.9 3.10 3.11,$(VERSION))
FULL_LOCK = requirements/$(if $(HAS_TFF),federated,current).lock

# What a new Python breaks first: installation, imports, examples, the mathematics; two minutes.
FAST = tests/build_deps_test.py tests/documents_test.py tests/layers_test.py \
  tests/mechanisms/storage_test.py tests/packaging_test.py tests/privacy/plan_test.py \
  tests/public_names_test.py tests/rules/rules_contract_test.py

.PHONY: help demo wheel test test-federated test-current test-rest test-peers test-some-of-rest test-changed mutants test-fast test-newer test-a-newer ci lint docs notebooks recipes bench bench-clipping bench-users bench-edges bench-federated bench-peers audit-table accounting-table independence-table lock test-flower test-ray test-engines test-sign

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(FULL)/installed
	$(RUN) $(FULL)/bin/tfdp demo

PART = half
test: test-federated test-current

test-rest:
	$(MAKE) PART=rest test

PEERS =
test-peers: build/peers/tests/installed $(FULL)/installed
	$(RUN) build/peers/tests/bin/python tests/peers/run.py $(PEERS)
ifneq ($(HAS_TFF),)
	$(RUN) $(FULL)/bin/python tests/peers/run.py tensorflow_privacy
endif

ifneq ($(HAS_TFF),)
test-federated: $(FULL)/installed
	$(RUN) $(FULL)/bin/python $(PYTEST) --part=$(PART) tests
else
test-federated:
	@echo "Without the federated stack: TensorFlow Federated runs on Python 3.9 to 3.11," \
	  "and this is $(VERSION)."
endif

test-current: $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python $(PYTEST) --part=$(PART) tests

SINCE =
test-changed: $(FULL)/installed $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python tests/changed.py $(CURRENT)/bin/python $(FULL)/bin/python $(SINCE)

mutants: $(FULL)/installed $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python tests/mutants/plant.py --jobs $(JOBS) $(ONLY)
	$(if $(HAS_TFF),$(RUN) $(FULL)/bin/python tests/mutants/plant.py --federated --jobs $(JOBS) $(ONLY))

test-fast: $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python $(PYTEST) $(FAST)

NEWER = 3.12 3.13
test-newer:
	@status=0; for version in $(NEWER); do \
	  found=; for python in python$$version $$(pyenv root 2>/dev/null)/versions/$$version.*/bin/python; do \
	    if $$python -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" \
	      >/dev/null 2>&1; then found=$$python; break; fi; done; \
	  if test -n "$$found"; then $(MAKE) test-fast PYTHON=$$found || status=1; \
	  else echo "Skipped: no Python $$version with venv and ensurepip is installed here."; fi; \
	done; exit $$status

# The newer Pythons take turns, by the number of commits.
test-a-newer:
	$(MAKE) NEWER=3.1$$((2 + $(or $(COMMITS),0) % 2)) test-newer

ci: lint docs test test-a-newer test-engines test-some-of-rest

# On a fast machine, all of it.
test-some-of-rest:
	$(MAKE) LIMIT=150 test-rest

# NumPy's types are those of the current stack.
lint: build/lint/installed $(CURRENT)/installed
	build/lint/bin/ruff check .
	build/lint/bin/mypy --python-executable $(CURRENT)/bin/python
	@git log -n 50 --no-merges --format=%s 2>/dev/null | awk 'length > 72 { long = 1; print "over 72 characters: " $$0 } END { exit long }'

build/lint/installed: requirements/lint.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

$(FULL)/installed: LOCK = $(FULL_LOCK)
$(CURRENT)/installed: LOCK = requirements/current.lock
$(FULL)/installed: $(FULL_LOCK)
$(CURRENT)/installed: requirements/current.lock
$(FULL)/installed $(CURRENT)/installed: setup.py pyproject.toml

# --no-deps: the lock is complete, and pip would refuse TFF's withdrawn pins.
# --no-compile: most modules are never imported, and those that are get compiled then.
$(FULL)/installed $(CURRENT)/installed:
	@test -n "$(filter 3.9 3.10 3.11 3.12 3.13,$(VERSION))" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -r $(LOCK)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# From the sources alone: it needs neither TensorFlow nor, once installed, any network.
docs: build/docs-env/installed
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

# The wheel is built from the source distribution: no stale file of this folder gets in.
wheel: build/wheel-env/installed
	rm -rf dist
	build/wheel-env/bin/python -m build --no-isolation --outdir dist .
	build/wheel-env/bin/python -m twine check --strict dist/*

build/wheel-env/installed: requirements/wheel.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

# Flower with real processes on loopback, in an environment of its own.
test-flower: build/flower/installed
	build/flower/bin/python -m pytest -q tests/federated/flower_processes_test.py \
	  tests/federated/flower_test.py tests/federated/engines_test.py $(TEST_FLAGS)

# Ray with two nodes on this machine, in an environment of its own.
test-ray: build/ray/installed
	build/ray/bin/python -m pytest -q tests/federated/ray_test.py $(TEST_FLAGS)

# TensorFlow is installed once: the packages of the current stack follow those of the environment.
build/flower/installed build/ray/installed: build/%/installed: requirements/%.lock \
  $(CURRENT)/installed setup.py pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	echo $(abspath $(CURRENT))/lib/python$(VERSION)/site-packages \
	  > $(@D)/lib/python$(VERSION)/site-packages/current.pth
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --no-compile -r $<
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# Flower without its network, whose processes fail on a busy machine; rounds on two nodes of Ray, lost
# actors, and a resumed run.
# No test begins after the first limit. The second one is for a test that hangs.
FLOWER_MOST = flower_test
RAY_MOST = in_process or actors
test-engines: $(CURRENT)/installed
	@run() { \
	  if $(MAKE) build/$$1/installed; then \
	    $(CURRENT)/bin/python tests/bounded.py 600 \
	      $(MAKE) test-$$1 TEST_FLAGS="--limit=$$2 --color=no -k '$$3'"; \
	  else echo "Skipped: $$1 cannot be installed here with Python $(VERSION)."; fi; }; \
	status=0; run flower 120 '$(FLOWER_MOST)' || status=1; run ray 120 '$(RAY_MOST)' || status=1; \
	exit $$status

# Signatures: the packages of build/sign follow those of the current stack.
test-sign: build/sign/installed $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python -m pytest -q tests/report/signing_test.py $(TEST_FLAGS)

build/sign/installed: requirements/sign.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

build/docs-env/installed: requirements/docs.lock
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

# Notebook 5 runs in the environment that has KerasHub.
notebooks: $(CURRENT)/installed build/peers/hub/installed
	$(RUN) $(CURRENT)/bin/python colabs/run.py $(filter-out colabs/5_%,$(wildcard colabs/*.ipynb))
	$(RUN) PYTHONPATH=$(CURDIR) build/peers/hub/bin/python colabs/run.py $(wildcard colabs/5_*.ipynb)

recipes: $(CURRENT)/installed
	@mkdir -p build/recipes
	@set -e; for path in examples/recipes/*.py; do \
	  name=$$(basename $$path .py); echo $$name; \
	  $(RUN) $(CURRENT)/bin/python -W ignore docs/site/recipes.py $$path > build/recipes/$$name.txt; \
	  mv build/recipes/$$name.txt benchmarks/results/recipes/; \
	done

audit-table: $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python tests/audit/audit_table.py

accounting-table: $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python tests/accounting/accounting_table.py

independence-table: $(CURRENT)/installed
	$(RUN) $(CURRENT)/bin/python tests/independence/independence_table.py

# A table is what its program prints, kept once it is whole: $(call table,NAME,COMMAND)
define table
@mkdir -p build/bench
$(RUN) $(2) > build/bench/$(1).txt
$(if $(QUICK),cat,mv) build/bench/$(1).txt $(if $(QUICK),,benchmarks/results/$(1).txt)
endef

bench: bench-peers
	@set -e; for part in clipping users edges federated; do $(MAKE) bench-$$part; done

# Gradients and whole steps beside every peer's, and how they grow.
bench-clipping: $(FULL)/installed $(CURRENT)/installed build/peers/jax/installed \
  build/peers/torch/installed
	$(RUN) $(FULL)/bin/python benchmarks/speed/clipping_table.py --seconds 0.3 \
	  $(if $(QUICK),--models mlp) --out $(if $(QUICK),build,benchmarks/results)/clipping_speed.txt
	$(RUN) $(CURRENT)/bin/python benchmarks/speed/scale.py \
	  --out $(if $(QUICK),build,benchmarks/results)/scale.txt --plot $(if $(QUICK),build,docs)/scale.png

# What users run: plans with losses of their own, KerasHub's models with LoRA, large tables.
bench-users: $(CURRENT)/installed build/peers/hub/installed
	$(call table,plans,$(CURRENT)/bin/python benchmarks/speed/plans.py $(if $(QUICK),demo))
	$(call table,keras_hub,PYTHONPATH=. build/peers/hub/bin/python \
	  benchmarks/speed/keras_hub_table.py $(if $(QUICK),bert))
	$(call table,table_pass,$(CURRENT)/bin/python benchmarks/speed/table_pass.py)

# Whole trainings, start-up, and the design of mechanisms at the ends of what can be asked for.
bench-edges: $(FULL)/installed $(CURRENT)/installed
	$(call table,guides,$(CURRENT)/bin/python benchmarks/speed/guides.py --python $(CURRENT)/bin/python \
	  --python $(FULL)/bin/python $(if $(QUICK),'structured data'))
	$(call table,start_up,$(CURRENT)/bin/python benchmarks/speed/start_up.py \
	  $(CURRENT)/bin/python $(FULL)/bin/python)
	$(call table,mechanism_limits,$(CURRENT)/bin/python benchmarks/speed/mechanism_limits.py \
	  $(if $(QUICK),Tree))

# Rounds of clients beside pfl-research.
bench-federated: $(CURRENT)/installed build/peers/pfl/installed
	$(call table,federated_pfl,$(CURRENT)/bin/python benchmarks/speed/federated_pfl.py \
	  --pfl build/peers/pfl/bin/python $(if $(QUICK),--rows 2))
	$(call table,federated_pfl_wall,$(CURRENT)/bin/python benchmarks/speed/federated_pfl.py \
	  --pfl build/peers/pfl/bin/python --wall --rounds 10 $(if $(QUICK),--rows 2))
	$(call table,federated_reading,$(CURRENT)/bin/python benchmarks/speed/federated_reading.py \
	  $(if $(QUICK),--users 1000 --turns 1))

bench-peers: $(FULL)/installed $(foreach peer,jax torch pfl hub,build/peers/$(peer)/installed)

# --no-deps: PyTorch's CPU build needs none of the GPU libraries its index entry names.
build/peers/%/installed: requirements/peers-%.lock
	test -x $(@D)/bin/python || python3.11 -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

lock:
	@test -n "$(filter 3.9 3.10 3.11 3.12 3.13,$(VERSION))" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -q --disable-pip-version-check uv
	@set -e; for stack in federated current; do \
	  echo "resolving requirements/$$stack.lock"; \
	  mkdir build/lock/$$stack; \
	  cp requirements/$$stack.toml build/lock/$$stack/pyproject.toml; \
	  cp requirements/$$stack.lock build/lock/$$stack/lock.txt 2>/dev/null || true; \
	  (cd build/lock/$$stack && ../bin/uv pip compile -q --universal --python-version 3.9 \
	    --no-header --no-annotate --no-emit-index-url --no-emit-find-links $(LOCK_FLAGS) \
	    -o lock.txt pyproject.toml); \
	  { echo "# Made by 'make lock' from $$stack.toml; install with: pip install --no-deps -r"; \
	    cat build/lock/$$stack/lock.txt; } > build/lock/$$stack.lock; \
	  if grep -n '://' build/lock/$$stack.lock; then exit 1; fi; \
	  mv build/lock/$$stack.lock requirements/$$stack.lock; \
	done
	@set -e; for list in docs flower jupyter ray lint sign wheel \
	  peers-hub peers-jax peers-torch peers-pfl peers-tests; do \
	  echo "resolving requirements/$$list.lock"; \
	  cp requirements/$$list.lock build/lock/list.txt 2>/dev/null || : > build/lock/list.txt; \
	  build/lock/bin/uv pip compile -q --python-version 3.11 --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links $(LOCK_FLAGS) \
	    -o build/lock/list.txt requirements/$$list.in; \
	  { echo "# Made by 'make lock' from $$list.in; install with: pip install --no-deps -r"; \
	    grep -vE '^(nvidia|cuda|triton)' build/lock/list.txt; } > build/lock/list.lock; \
	  if grep -n '://' build/lock/list.lock; then exit 1; fi; \
	  mv build/lock/list.lock requirements/$$list.lock; \
	done
