# `make demo` runs the main job, `make test` the tests; each sets up all it needs in .venv.
# `make suite` is the tests without lint and bench-check, SHARE=newest or default a part of them.
# `make test-long` is all tests, those that take minutes too, compiled as users compile; SEED is that
# of the sampled ones, another one every time unless it is given.
# `make fit` compiles a model of real size for a TPU topology; FLAGS="--topology=..." changes which,
# FLAGS=--pipeline=1F1B makes it stages of a pipeline, FLAGS=--ways=stash_host keeps rows at the host.
# `make plan` is arithmetic: which residuals to keep where, for a model, a mesh and their memory.
# `make pipeline` trains the demo's model through pipeline schedules, beside the unpipelined program.
# `make chip` is what to run first on a TPU: see docs/on-a-tpu.md.
# `make parity` trains a small model in five ways of spreading its experts, with the stash and without.
# `make bench` and `make traffic` need the one jax and libtpu whose estimator follows manual DMAs, in .venv-bench.
# `make maxtext` trains a tiny model by MaxText itself, in .venv-maxtext: see docs/maxtext.md.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
BENCH_PYTHON ?= $(shell .ci/newest-python)
BENCH_VENV ?= .venv-bench
BENCH_RUN = $(BENCH_VENV)/bin/python
MAXTEXT_VENV ?= .venv-maxtext
MAXTEXT_RUN = $(MAXTEXT_VENV)/bin/python
WORKERS ?= 2
SEED ?= $(shell $(PYTHON) -c 'import secrets; print(secrets.randbelow(2**32))')

# What pip would install with the package and these extras, but not the package.
REQUIREMENTS = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = map(project["optional-dependencies"].get, ("test", "tpu", "bench")); \
  print(*project["dependencies"], *sum(extras, []))

# What MaxText imports to train and to compile.
MAXTEXT_NEEDS = "jax[tpu]==0.12.0.1" flax==0.12.12 absl-py aqtp drjax etils grain jaxtyping jinja2 \
  ml_collections omegaconf optax orbax-checkpoint pathwaysutils pillow psutil pydantic qwix \
  sentencepiece sympy tensorboardX tiktoken tokamax transformers

# What is imported is compiled then.
INSTALL = install --quiet --disable-pip-version-check --no-compile

.PHONY: chip demo fit plan parity pipeline bench bench-check traffic maxtext test suite test-long lint \
  dependencies ready clean

demo: $(VENV)/ready
	$(RUN) -m bench.demo

fit: $(VENV)/ready
	$(RUN) -m bench.fit $(FLAGS)

plan: $(VENV)/ready
	$(RUN) -m bench.plan $(FLAGS)

test: lint bench-check suite

suite: $(VENV)/ready
	$(RUN) -m pytest -m "not long" $(addprefix --share=,$(SHARE)) -n $(WORKERS) --dist worksteal

test-long: $(VENV)/ready
	XLA_FLAGS=--xla_backend_optimization_level=3 $(RUN) -m pytest --hypothesis-seed=$(SEED)

parity: $(VENV)/ready
	$(RUN) -m bench.parity

pipeline: $(VENV)/ready
	$(RUN) -m bench.pipeline $(FLAGS)

chip: $(VENV)/ready
	$(RUN) -m bench.chip $(FLAGS)

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: $(BENCH_VENV)/bench
	$(BENCH_RUN) -m bench.kernels $(FLAGS)

traffic: $(BENCH_VENV)/bench
	$(BENCH_RUN) -m bench.traffic $(FLAGS)

maxtext: $(MAXTEXT_VENV)/ready
	$(MAXTEXT_RUN) -m bench.maxtext $(FLAGS)

# Without a Python for it there is nothing to compare: said aloud, not a failure of the tests.
bench-check:
	@if $(BENCH_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then \
	  $(MAKE) --no-print-directory $(BENCH_VENV)/bench && $(BENCH_RUN) -m bench.kernels --check; \
	else echo "bench-check NOT RUN: jax 0.12.0.1 needs Python 3.12 or newer, the newest here is $(BENCH_PYTHON)"; fi

$(BENCH_VENV)/bench: pyproject.toml
	@$(BENCH_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "make bench needs Python 3.12 or newer (jax 0.12.0.1), the newest here is " + sys.version.split()[0])'
	$(BENCH_PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_RUN) -m pip $(INSTALL) jax==0.12.0.1 libtpu==0.0.52 absl-py matplotlib
	touch $@

# MaxText alone asks for nothing, and its extra "tpu" for a hundred packages more than these.
$(MAXTEXT_VENV)/ready:
	@$(BENCH_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "MaxText needs Python 3.12 or newer, the newest here is " + sys.version.split()[0])'
	$(BENCH_PYTHON) -m venv $(MAXTEXT_VENV)
	$(MAXTEXT_RUN) -m pip $(INSTALL) --no-deps maxtext==0.2.5
	$(MAXTEXT_RUN) -m pip $(INSTALL) $(MAXTEXT_NEEDS)
	touch $@

dependencies: $(VENV)/dependencies

ready: $(VENV)/ready

$(VENV)/dependencies: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip $(INSTALL) $$($(RUN) -c '$(REQUIREMENTS)')
	touch $@

# Alone: this writes into the folder of the sources.
$(VENV)/ready: $(VENV)/dependencies
	$(RUN) -m pip $(INSTALL) --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(MAXTEXT_VENV) build
