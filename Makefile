# `make demo` runs the main job, `make test` the tests; each sets up all it needs in .venv.
# `make fit` compiles a model of real size for a TPU topology; FLAGS="--topology=..." changes which.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo fit test test-long lint clean

demo: $(VENV)/ready
	$(RUN) -m bench.demo

fit: $(VENV)/ready
	$(RUN) -m bench.fit $(FLAGS)

test: $(VENV)/ready lint
	$(RUN) -m pytest -m "not long" -n 2 --dist worksteal

test-long: $(VENV)/ready
	$(RUN) -m pytest -m long

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(VENV)/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[test,tpu,bench]'
	touch $@

clean:
	rm -rf $(VENV) build
