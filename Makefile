# `make demo` shows the shim on real vLLM servers; `make test` runs everything. Both install what they need.
# SHIM_ENVS=DIR keeps the environments elsewhere (3.5 GB each); PYTHON=python3.12 chooses what they are made with.

SHIM_ENVS ?= .envs
PYTHON ?= python3
OLD := $(SHIM_ENVS)/vllm-0.28.0
NEW := $(SHIM_ENVS)/vllm-0.32.0

.PHONY: help demo test debian env envs lint format unit contract e2e soak fuzz bench clean distclean
.NOTPARALLEL:

help:
	@echo "make demo       the bug, the shim, and a loss explained, on real servers (vLLM 0.28.0)"
	@echo "make test       lint, types, and all tests on vLLM 0.28.0 and 0.32.0"
	@echo "make envs       both environments; make env for the demo's alone"
	@echo "make soak       chaos on live servers, and a real Prometheus and Alertmanager watching them (0.32.0)"
	@echo "make fuzz       100,000 scripts of params by hypothesis, as many inputs by atheris (half an hour)"
	@echo "make bench      BENCHMARKS.md anew; wants an idle machine"
	@echo "make lint       ruff and mypy;  make format  ruff's formatter"
	@echo "make unit contract e2e   one layer of the tests, on 0.32.0"
	@echo "make clean      caches, logs and models;  make distclean  the environments as well"

demo: env
	@PYTHONPATH=$(CURDIR) $(OLD)/bin/shim demo

test: envs debian
	@$(PYTHON) tests/run_all.py $(SHIM_ENVS)

debian:
	@tests/debian.sh

env: $(OLD)/.built

envs: $(OLD)/.built $(NEW)/.built

# environment.py skips what is there already, so a stale stamp costs seconds.
$(SHIM_ENVS)/vllm-%/.built: pyproject.toml shim/cli/environment.py
	@$(PYTHON) shim/cli/environment.py $* $(@D)
	@touch $@

lint: $(NEW)/.built
	$(NEW)/bin/ruff check .
	$(NEW)/bin/ruff format --check .
	$(NEW)/bin/mypy

format: $(NEW)/.built
	$(NEW)/bin/ruff format .
	$(NEW)/bin/ruff check --fix .

soak: $(NEW)/.built debian
	$(NEW)/bin/python -m pip install -q "matplotlib>=3.8"
	PYTHONPATH=$(CURDIR) $(NEW)/bin/python -m pytest tests/e2e/test_defence.py tests/e2e/test_screen.py tests/e2e/test_stopped.py

# Six fuzz tests, of which three take half as many examples as SHIM_FUZZ_EXAMPLES says.
fuzz: $(NEW)/.built
	$(NEW)/bin/python -m pip install -q "atheris>=3"
	SHIM_FUZZ_EXAMPLES=22500 PYTHONPATH=$(CURDIR) $(NEW)/bin/python -m pytest --timeout=7200 tests/contract/test_guard_schedulers.py
	for target in pull push readback mooncake; do $(NEW)/bin/python tests/fuzz/params.py $$target -runs=25000 || exit 1; done

bench: $(NEW)/.built
	PYTHONPATH=$(CURDIR) $(NEW)/bin/python tests/bench/hooks.py --write

unit contract e2e: $(NEW)/.built
	PYTHONPATH=$(CURDIR) $(NEW)/bin/python -m pytest tests/$@

clean:
	rm -rf .cache .models .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find shim tests dashboards -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(OLD) $(NEW)
