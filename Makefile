# Every target sets up .venv by itself; it needs Python 3.11 or later, make, and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NOGPU := .venv-nogpu
EMPTY := .venv-wheel
READY := $(VENV)/.ready
PIP_INSTALL := $(BIN)/python -m pip install --quiet --prefer-binary --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo quick nogpu test lint wheel web web-test fuzz format bench notebooks gallery readme docs

help:
	@echo "make demo       plan llama-3-70b on 64 H100, then train small models and compare"
	@echo "make quick      the quick suite: predicted beside measured"
	@echo "make nogpu      a CUDA build of PyTorch (5 GB) beside .venv, and plans run on an H100 that is not there"
	@echo "make test       linters, types, imports, every test"
	@echo "make lint       linters, types, imports"
	@echo "make wheel      the wheel, checked and installed in an empty environment"
	@echo "make web        the planner as a page: memplan/web/dist, for any file server (needs node and npm)"
	@echo "make web-test   the page in Chromium: its bytes, its errors, its sizes"
	@echo "make fuzz       100,000 hostile inputs for every reader and command (about ten minutes)"
	@echo "make format     let ruff rewrite the code"
	@echo "make bench      how long one estimate takes, and a million plans"
	@echo "make notebooks  execute the notebooks in place"
	@echo "make docs       the documentation as pages for a browser, docs/build/html/index.html"
	@echo "make readme     what the README shows of its commands, and its pictures"
	@echo "make gallery    gallery/index.html: an example picture of each chart"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "memplan needs Python 3.11 or later, this is %d.%d; use make PYTHON=python3.11" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; torch is large)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/memplan estimate llama-3-70b --cluster 64xh100-sxm --dp 2 --tp 8 --pp 4 --zero 1 \
	    --sequence-parallel --recompute full --micro-batch 1 --global-batch 512 --seq-len 8192
	@echo
	$(BIN)/python -m validate sweep --suite quick

quick: $(READY)
	$(BIN)/python -m validate sweep --suite quick

# The version that constraints.txt pins, in its CUDA build: === is not satisfied by one with a suffix such as +cpu.
$(NOGPU)/.ready: pyproject.toml constraints.txt
	@test -x $(NOGPU)/bin/python || $(PYTHON) -m venv $(NOGPU)
	@echo "installing a CUDA build of PyTorch into $(NOGPU) (once; about 5 GB)"
	@$(NOGPU)/bin/python -m pip install --quiet --prefer-binary --disable-pip-version-check -c constraints.txt \
	    -e '.[dev]' torch===$$(sed -n 's/^torch==//p' constraints.txt)
	@touch $@

nogpu: $(NOGPU)/.ready
	$(NOGPU)/bin/python -m validate sweep --suite gpu-single --device nogpu

test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# With its dependencies as the wheel names them; tests/test_wheel.py runs the README's commands from it.
wheel: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv --clear $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[cli]"
	cd / && $(CURDIR)/$(EMPTY)/bin/memplan estimate gpt2 --cluster 8xh100-sxm --zero 3 --ledger
	cd / && $(CURDIR)/$(EMPTY)/bin/memplan search gpt2 --cluster 2xh100-sxm --global-batch 8 --keep 1

WEB := memplan/web

# Any Python will do, since an estimate needs no package.
web:
	cd $(WEB) && npm ci --no-audit --no-fund
	$(PYTHON) -m memplan.web.pack
	cd $(WEB) && npm run build
	@echo "try it: $(PYTHON) -m http.server -d $(WEB)/dist"

web-test: $(READY) web
	$(BIN)/python -m pytest -m web

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCHED := memplan.estimate('llama-3.1-405b', cluster='1152xh100-sxm', tp=8, pp=9, dp=16, zero=1, \
    sequence_parallel=True, global_batch=512, seq_len=8192)

bench: $(READY)
	@echo "llama-3.1-405b on 1152 GPUs, pp=9 x dp=16 x tp=8: one estimate"
	@$(BIN)/python -m timeit -u msec -s "import memplan" "$(BENCHED)"
	@echo "with every stage's peak, instants and collectives"
	@$(BIN)/python -m timeit -u msec -s "import memplan" "$(BENCHED).to_dict()"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.bench

notebooks: $(READY)
	$(BIN)/python -m tests.notebooks

gallery: $(READY)
	$(BIN)/python -m tests.gallery gallery

readme: $(READY)
	$(BIN)/python -m tests.readme
	$(BIN)/python -m tests.gallery notebooks/pictures step_timeline schedule front

# Two processes read the pages and run their commands; a warning is an error.
docs: $(READY)
	rm -rf docs/build
	$(BIN)/sphinx-build --builder html --fail-on-warning --keep-going --quiet --jobs auto docs docs/build/html
	@echo "docs/build/html/index.html"
