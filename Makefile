# One Model, Many GPUs. `make` lists the targets. Needed: Python 3.11 or later, git, make.

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
SITE := _build/html
# For `make gpu`: another Python, with a PyTorch with CUDA of its own, is taken as it is.
PYTHON_GPU ?= $(BIN)/python

# Exists when the environment is complete and agrees with the files it is made from.
INSTALLED := $(VENV)/.installed
# Exists when the last build ended well; book/_ext/build.py writes it.
BUILT := _build/.built

# Bytecode is kept, whatever the surroundings say: hundreds of interpreters import the same files.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup book pdf test rehearse lab serve record gpu pairs figures lint format clean distclean
.DELETE_ON_ERROR:

help: ## list the targets
	@echo "One Model, Many GPUs: a course that runs what it says. First: make book"
	@echo
	@while IFS= read -r line; do \
	  case "$$line" in \
	    [a-z]*:*'## '*) printf '  make %-10s %s\n' "$${line%%:*}" "$${line#*## }" ;; \
	  esac; \
	done < Makefile
	@echo
	@echo "ARGS=… goes to test, rehearse, record, gpu and lab; PORT=… to serve; PYTHON=… makes the environment."

setup: $(INSTALLED) ## make or update the environment in .venv (the other targets do it by themselves)

# The mark .unfinished tells the next run that this one was cut short: what pip left half-installed
# looks installed to pip, so that run starts over. Python's own pip may be years old, and then takes
# twice as long; it is kept where no newer one can be had. DeepSpeed comes as source: DS_BUILD_OPS=0
# keeps its installation free of compilers. --no-compile: each module is compiled at its first import,
# and torch, which takes longest, is imported beside pip's last step. The settings file makes JupyterLab
# open .md lessons as notebooks.
$(INSTALLED): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import os, sys; sys.exit(sys.version_info < (3, 11) or not hasattr(os, "waitid"))' 2>/dev/null || { \
	  echo "This course needs Python 3.11 or later (3.13 on macOS), and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')."; \
	  echo "Say which one to take: make book PYTHON=/path/to/python3.11"; \
	  exit 1; }
	@echo "Setting up $(VENV): once, and again when requirements.txt, constraints.txt or pyproject.toml change."
	@rm -f $@
	@if [ -e $(VENV)/.unfinished ]; then rm -rf $(VENV); fi
	@mkdir -p $(VENV) && touch $(VENV)/.unfinished
	$(PYTHON) -m venv $(VENV)
	-@$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements.txt
	@$(BIN)/python -c 'import torch._dynamo' >/dev/null 2>&1 & \
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .
	@$(BIN)/jupytext-config --settings-file $(VENV)/etc/jupyter/labconfig/default_setting_overrides.json \
	  set-default-viewer markdown
	@rm $(VENV)/.unfinished
	@touch $@

# What Sphinx keeps between builds does not notice a changed extension or other versions of packages,
# and after a build cut short it would pass over the page that was wrong. Then the next one starts from
# no state. Executed outputs live elsewhere, in _build/executed, and stay.
$(BUILT): $(wildcard book/_ext/*.py) $(INSTALLED)
	@rm -rf $(SITE) _build/.doctrees
	@mkdir -p _build && touch $@

book: $(BUILT) ## build the site into _build/html (RECORDED=0: execute every lesson here)
	$(BIN)/python book/_ext/build.py
	@test -s $(SITE)/index.html || { echo "The build made no $(SITE)/index.html."; exit 1; }
	@echo "The site: $(SITE)/index.html (make serve shows it)"

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
PDF := $(SITE)/downloads/one-model-many-gpus.pdf

pdf: book ## print the whole course into _build/html/downloads (needs Chromium or Chrome)
	@test -n "$(CHROMIUM)" || { echo "A PDF needs Chromium or Chrome. On Debian or Ubuntu: apt-get install chromium"; exit 1; }
	$(BIN)/python book/_ext/build.py singlehtml
	@mv _build/singlehtml/book/index.html _build/singlehtml/index.html # its addresses are those of the root
	"$(CHROMIUM)" --headless --no-sandbox --disable-gpu --no-pdf-header-footer --generate-pdf-document-outline \
	  --virtual-time-budget=60000 --print-to-pdf=$(PDF) "file://$(CURDIR)/_build/singlehtml/index.html?print"
	@echo "The PDF: $(PDF)"

test: $(INSTALLED) ## run every test (ARGS='-k ring' for some)
	$(BIN)/python tests/phases.py $(ARGS)

rehearse: $(INSTALLED) ## run every lesson on pretended GPUs, one and four (ARGS='zero --gpus 4')
	PYTHONPATH=tests $(BIN)/python -m rehearsal $(ARGS)

# JupyterLab starts for root only when it is told to. Over ssh no browser opens: a line says what to do.
lab: $(INSTALLED) ## write the lessons as notebooks into lab/, which git ignores, and open JupyterLab there
	$(BIN)/python -m shardlab lab
	@if [ -n "$$SSH_CONNECTION" ]; then \
	  set -- $$SSH_CONNECTION; \
	  echo "JupyterLab will run here, and your browser is elsewhere. There, in a shell of its own:"; \
	  echo "  ssh -N -L 8888:localhost:8888 $$(id -un)@$$3"; \
	  echo "Then open the last address below there. If its port is not 8888, take that port above, twice."; \
	fi
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/lab/contents.ipynb \
	  $$(test "$$(id -u)" != 0 || echo --allow-root) $${SSH_CONNECTION:+--no-browser} $(ARGS)

serve: $(INSTALLED) ## show the built site on http://127.0.0.1:8000
	@test -s $(SITE)/index.html || { echo "There is no site yet: make book"; exit 1; }
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

record: $(INSTALLED) ## execute lessons on this machine and keep their outputs (ARGS='data_parallel')
	$(BIN)/python -m shardlab record $(ARGS)

gpu: $(if $(filter $(BIN)/python,$(PYTHON_GPU)),$(INSTALLED)) ## on a machine with a GPU: test, record and measure all that needs one
	PYTHONPATH="$(CURDIR)/code$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON_GPU) -m shardlab gpu $(ARGS)

pairs: $(INSTALLED) ## after an edit: write scripts anew from lessons, contents and map from book/topics.yml
	$(BIN)/python -m shardlab pairs

figures: $(INSTALLED) ## draw the pictures anew, all or one topic's (ARGS='zero')
	for name in $(or $(ARGS),$(basename $(notdir $(wildcard figures/*.py)))); do \
	  $(BIN)/python figures/$$name.py || exit 1; \
	done

lint: $(INSTALLED) ## check format, style, spelling, imports and pairs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m shardlab pairs --check

format: $(INSTALLED) ## put the code into the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what was built and every cache, but neither .venv nor your notebooks in lab/
	rm -rf _build .pytest_cache .ruff_cache .hypothesis code/shardlab.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)
