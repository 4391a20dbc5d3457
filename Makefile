# Everything runs from .venv, which the first target makes.
.PHONY: demo serve test soak lint bench docs clean
# With nothing of other projects, whose `client` or `backend` would be imported in the place of this one's.
unexport PYTHONPATH PYTHONHOME

# What is started here ends with make, also where that is killed and can tell nobody.
demo:
	@deploy/setup.sh serve
	@setpriv --pdeathsig TERM .venv/bin/foretoken demo

# Server and gateway: when either ends, for whatever reason, so does the other, and make says that it failed.
# MODEL=smollm2: a small chat model, which is installed into .venv first; or a folder, a GGUF file, a name on the hub.
serve:
	@deploy/setup.sh serve
	@model=$$(.venv/bin/python -m deploy.sample_models '$(MODEL)') && \
	exec setpriv --pdeathsig TERM .venv/bin/foretoken serve $${model:+"$$model" --speculative-config '{"method":"ngram","num_speculative_tokens":5}' --served-model-name '$(MODEL)' foretoken} --port 8080 --http-port 8000 --grpc-port 8001 --metrics-port 8002 --status-port 8003

# Tests wait for much (processes that start, signs of life, time limits): three at a time keep two cores busy. Four of servers' were not faster.
# Bytecode is kept, whatever the environment says: tests start hundreds of processes. Idle OpenMP threads sleep at once: there are always others.
test: export PYTHONDONTWRITEBYTECODE =
test: export GOMP_SPINCOUNT = 2000
test:
	@deploy/setup.sh test
	@.venv/bin/python -m pytest tests/gpu; status=$$?; \
	.venv/bin/python -m pytest -m "not serving" --ignore=tests/gpu -n 3 --dist loadfile --no-loadscope-reorder || status=1; \
	.venv/bin/python -m pytest -m serving --ignore=tests/gpu -n 3 --dist loadfile --no-loadscope-reorder || status=1; \
	exit $$status

# MINUTES=60 for longer; other options: `.venv/bin/python -m tests.soak --help`.
soak:
	@deploy/setup.sh test
	@.venv/bin/python -m tests.soak --minutes $(or $(MINUTES),30)

lint:
	@deploy/setup.sh test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench:
	@deploy/setup.sh test
	@.venv/bin/python -m benchmarks.serve_cpu
	@.venv/bin/python -m benchmarks.speculation
	@.venv/bin/python -m benchmarks.gateway

docs:
	@deploy/setup.sh serve
	.venv/bin/python -m deploy.configuration_page

clean:
	rm -rf .venv build *.egg-info
