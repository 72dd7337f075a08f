# Each target sets up what it needs: dev/setup-venv.sh makes .venv on the first call and returns at
# once on later ones. PYTHON=... names the interpreter to make it with.

setup  := @sh dev/setup-venv.sh
python := .venv/bin/python
pytest := $(python) -m pytest -n auto --maxprocesses 4 --dist worksteal -ra --durations=10

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-deep lint docs notebooks clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo:  ## continue a Python file with the shipped model: speed, cache bytes, held-out loss
	$(setup)
	.venv/bin/snapmla demo

test:  ## run every test, with the same draws each time
	$(setup) test
	@sh dev/setup-triton.sh
	SNAPMLA_HYPOTHESIS_PROFILE=ci $(pytest)

test-deep:  ## run every test with many more random draws (long)
	$(setup) test
	@sh dev/setup-triton.sh
	SNAPMLA_HYPOTHESIS_PROFILE=deep $(pytest)

lint:  ## check style, format and types
	$(setup) test dev
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy stage[0-9]_* tests

# Runs every chapter; then looks at every link, and in Chromium, if there is one, at every page.
docs:  ## build the course as a static site in build/site, and check it
	$(setup) test docs
	$(python) -m sphinx -W --keep-going -q -b html docs build/site
	SNAPMLA_SITE=build/site $(python) -m pytest -q -ra tests/docs/test_site.py

notebooks:  ## write the chapters' notebooks anew from their scripts
	$(setup) test docs
	$(python) -m jupytext --quiet --to ipynb --update docs/[0-9][0-9]_*.py

clean:  ## remove .venv and everything that tools and tests left behind
	rm -rf .venv .hypothesis .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
