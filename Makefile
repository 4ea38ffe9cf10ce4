# make demo    install the federated stack into .venv and run the main job
# make test    install what is missing and run the tests on both stacks
# make bench   measure clipping beside the peers (QUICK=1: fewer rounds) into benchmarks/results
# make bench-peers    install what the benchmarks compare with into build/peers (Python 3.11)
# make lock    resolve requirements/*.lock again (LOCK_FLAGS=--upgrade for newer versions)

SHELL = /bin/sh
SLOW =
RUN = TF_CPP_MIN_LOG_LEVEL=2 PYTHONUNBUFFERED=1
PYTEST = -m pytest -n 2 --dist loadfile -q -p no:cacheprovider --color=no $(if $(SLOW),--slow) tests

# The first interpreter that really starts, is 3.9 to 3.11 and can make environments.
PYTHON = $(shell for python in python3.11 python3.10 python3.9 python3; do \
  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 11))' \
    >/dev/null 2>&1; then echo $$python; break; fi; done)

NO_PYTHON = No usable Python 3.9, 3.10 or 3.11 was found. \
  Debian 12: apt install python3.11-venv. Debian 11 and Ubuntu 22.04: apt install python3-venv. \
  Elsewhere: put python3.11 (with its venv module) on PATH, or call make PYTHON=/path/to/python3.11.

.PHONY: help demo test test-federated test-current bench bench-peers lock

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: .venv/installed
	$(RUN) .venv/bin/tfdp demo

test: test-federated test-current

test-federated: .venv/installed
	$(RUN) .venv/bin/python $(PYTEST)

test-current: .venv-keras3/installed
	$(RUN) .venv-keras3/bin/python $(PYTEST)

.venv/installed: requirements/federated.lock setup.py
.venv-keras3/installed: requirements/current.lock setup.py

# --no-deps: the lock is complete, and pip would refuse TFF's withdrawn pins.
.venv/installed .venv-keras3/installed:
	@test -n "$(PYTHON)" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

bench: bench-peers .venv-keras3/installed
	$(RUN) .venv/bin/python benchmarks/clipping_table.py $(if $(QUICK),--seconds 0.3) \
	  --out benchmarks/results/clipping_speed.txt

# tensorflow_privacy is on the federated stack.
bench-peers: .venv/installed build/peers/jax/installed build/peers/torch/installed

# --no-deps: PyTorch's CPU build needs none of the GPU libraries its index entry names.
build/peers/%/installed: requirements/peers-%.lock
	test -x $(@D)/bin/python || python3.11 -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps -r $<
	touch $@

lock:
	@test -n "$(PYTHON)" || { echo "$(NO_PYTHON)" >&2; exit 1; }
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
	@set -e; for peer in jax torch; do \
	  echo "resolving requirements/peers-$$peer.lock"; \
	  cp requirements/peers-$$peer.lock build/lock/peer.txt 2>/dev/null || : > build/lock/peer.txt; \
	  build/lock/bin/uv pip compile -q --python-version 3.11 --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links $(LOCK_FLAGS) \
	    -o build/lock/peer.txt requirements/peers-$$peer.in; \
	  { echo "# Made by 'make lock' from peers-$$peer.in; install with: pip install --no-deps -r"; \
	    grep -vE '^(nvidia|cuda|triton)' build/lock/peer.txt; } > build/lock/peer.lock; \
	  if grep -n '://' build/lock/peer.lock; then exit 1; fi; \
	  mv build/lock/peer.lock requirements/peers-$$peer.lock; \
	done
