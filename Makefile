# Everything runs from .venv, which the first target makes.
.PHONY: demo serve test lint bench docs clean

demo:
	@deploy/setup.sh serve
	@.venv/bin/foretoken demo

serve:
	@deploy/setup.sh serve
	@.venv/bin/foretoken gateway & gateway=$$!; trap 'kill $$gateway 2>/dev/null' EXIT INT TERM; .venv/bin/foretoken serve

test:
	@deploy/setup.sh test
	@.venv/bin/python -m pytest -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder; beside=$$?; \
	.venv/bin/python -m pytest -m alone && exit $$beside

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
