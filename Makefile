# Each target sets up what it needs first (.venv and build/, in this folder) and does nothing twice.
#   make test    the test suite, 10 to 15 min.  make test ONLY="gcc pytest"   some stages of test and test-all
#   make test-all    all else too: races, other compilers and processors, soft-RoCE, CUDA builds; no stage twice
#   make check   before each commit, 2 minutes  make test AT_ONCE=1           its stages one by one
#   make wheel   dist/spccl-*.whl: CUDA for every architecture, glue for the torch in .venv (ARCHS=90-real: fewer)
#   make test-ib transport ib alone, over software RoCE in a virtual machine
#   make test-vllm spccl.sync with a real vLLM server on CPUs: 3.4 GB in build/vllm, then 10 minutes; not in test-all
#   make demo    DDP training, dense and pruned
#   make docs    build/docs/site: the documentation as a site, links checked
#   make lint    formatting and Python checks   make bench                    benchmarks
#   make fuzz SECONDS=600                       each fuzzer that long
#   make clean   removes build/                 make distclean                .venv too
# Another Python: make PYTHON=python3.12 ...     Never call apt-get: make NO_APT=1 ...
PYTHON ?= python3
SECONDS ?= 600
export NO_APT TORCH_SPEC

.PHONY: all setup test test-all test-ib test-vllm check wheel demo docs lint bench fuzz clean distclean
all: setup
setup test test-all test-ib test-vllm check wheel demo docs lint bench fuzz clean distclean:
	@$(PYTHON) tools/dev.py $(command)

setup: command = setup
test: command = test $(if $(ONLY),--only $(ONLY)) $(if $(AT_ONCE),--at-once $(AT_ONCE))
test-all: command = test-all $(if $(AT_ONCE),--at-once $(AT_ONCE))
test-ib: command = test --only ib
test-vllm: command = test-vllm
check: command = check $(if $(AT_ONCE),--at-once $(AT_ONCE))
wheel: command = wheel $(if $(ARCHS),--archs "$(ARCHS)")
demo: command = demo $(ARGS)
docs: command = docs
lint: command = lint
bench: command = bench $(ARGS)
fuzz: command = fuzz --seconds $(SECONDS)
clean: command = clean
distclean: command = clean --all
