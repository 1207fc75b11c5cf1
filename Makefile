# make demo        the main job: no speculation, vLLM's chain, adaptive trees, on SmolLM2-135M or the bundled pair
# make demo-ray    the pair in a batch job of Ray Data, on a cluster of two nodes on this machine
# make test        ruff, mypy, import contracts, pytest with the coverage of the pure rooms; then Model Runner V2; then tests on Ray
# make test-next   the engine tests on the newest supported vLLM; SHORT=1: a cut of them
# make gpu-check   everything that a GPU can say, in 25 minutes; WHEELS=DIR: without network; REHEARSE=1: tiny, on a CPU
# make docs        the site, strictly: build/site
# make docs-run    README's and every page's commands in a fresh environment, a line each: an hour; ONLY=docs/index.md: one page
# make bench-short the shortest run of the benchmark that gives ratios, on the bundled pair
# make release-check TAG=v0.2.0    whether a tag may be released; make release TAG=v0.2.0: its files
# They create .venv with everything pinned; a machine without a GPU gets vLLM's CPU build.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo demo-ray test test-next docs docs-run bench-short setup clean

demo: setup
	$(BIN)/vllm-adaptive-tree demo

demo-ray: setup
	$(BIN)/python examples/ray_data.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -n 2 --dist loadfile tests/pure --cov
	$(BIN)/pytest -n 2 --dist loadfile --durations=30 --ignore=tests/pure --ignore=tests/ray
	$(BIN)/python -m tests.v2
	$(BIN)/pytest --durations=10 tests/ray

test-next: setup
	$(BIN)/python -m tests.next $(if $(SHORT),--short)

docs: setup
	$(BIN)/pip install --quiet --no-deps -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-run: setup
	$(BIN)/python -m tests.docs_run $(if $(ONLY),--only $(ONLY))

bench-short: setup
	$(BIN)/vllm-adaptive-tree bench --enlarge-to 0.5B --dtype bfloat16 --eager --chains 3 --concurrency 1 --sampled '' \
		--server '' --requests-per-slot 1 --max-tokens 32 --out $(or $(OUT),build/bench)

.PHONY: release-check
release-check:
	$(PYTHON) -m tools.release $(TAG)

.PHONY: release
release: wheels  # dist/: the wheels and an sdist; build/release/: their checksums, and the changelog's section
	$(PYTHON) -m tools.release $(TAG) --notes build/release/NOTES.md
	rm -f dist/*.tar.gz
	$(PYTHON) -m pip install --quiet build
	$(PYTHON) -m build --sdist --outdir dist .
	cd dist && sha256sum *.whl *.tar.gz > ../build/release/SHA256SUMS

.PHONY: gpu-check
gpu-check: $(if $(WHEELS),,setup)
	$(if $(WHEELS),$(PYTHON),$(BIN)/python) -m benchmarks.gpu.check $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REHEARSE),--rehearse)

setup: $(READY)

$(READY): requirements/cpu.txt requirements/dev.txt requirements/ray.txt pyproject.toml
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null; then \
		$(BIN)/pip install --quiet -e '.[cuda]'; \
	else \
		$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt || \
		$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt --extra-index-url $(TORCH_CPU_INDEX); \
	fi
	$(BIN)/pip install --quiet -r requirements/dev.txt -r requirements/ray.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	# arctic-inference has no wheel, and its build would fetch a PyTorch of its own for two files of C++.
	$(BIN)/pip install --quiet --no-warn-conflicts --target .venv/build -r requirements/suffix-build.txt && \
	PYTHONPATH="$(CURDIR)/.venv/build" PATH="$(CURDIR)/.venv/build/bin:$$PATH" \
		$(BIN)/pip install --quiet --no-deps --no-build-isolation arctic-inference==0.1.1 || \
		echo "arctic-inference could not be built here: tests of suffix trees are skipped, unless SUFFIX_TREES_REQUIRED is set"
	touch $@

.PHONY: wheels
wheels:  # dist/: the plugin, and the pair that it is tried with
	rm -rf build packaging/demo-pair/build dist/vllm_adaptive_tree*.whl
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist . ./packaging/demo-pair

clean:
	rm -rf dist packaging/demo-pair/build packaging/demo-pair/*.egg-info
	rm -rf .venv .next build *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage
