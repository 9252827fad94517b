"""The stages of `make test` and `make check`."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from env import (
    BUILD,
    ROOT,
    VENV,
    EnvError,
    apt_install,
    child_env,
    cuda_here,
    ensure_frameworks,
    ensure_spccl,
    files_under,
    has_gpu,
    must_run,
    run,
    say,
)
from packages import isolated, wheel_stage, with_cuda
from softroce import GPU_PROGRAMS, run_ib_tests
from stages import Skip, Stage

T = TypeVar("T")
PYTHON = VENV / "bin/python"
JOBS = str(os.cpu_count() or 1)
TEST_JOBS = str(2 * (os.cpu_count() or 1))  # of ctest: many tests wait for deadlines and use no CPU meanwhile

AARCH64_ROOT = "/usr/aarch64-linux-gnu"
AARCH64_PACKAGES = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"]

# Line numbers are all that reports of sanitizers need; names of variables (-g) take a third of the compiler's time.
SANITIZED = [
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -g1 -DNDEBUG",
]
# name -> (compiler, CMake options). Only the stage "cuda" compiles CUDA; with a GPU, "gcc" does too.
C_BUILDS = {
    "gcc": ("gcc", [f"-DSPCCL_CUDA={cuda_here()}"]),
    # As if the machine had no nvcc.
    "clang": ("clang", ["-DSPCCL_CUDA=AUTO", "-DSPCCL_NVCC=0", "-DCMAKE_CUDA_COMPILER=NOTFOUND"]),
    "asan": ("gcc", [*SANITIZED, "-DSPCCL_SANITIZE=address+undefined"]),
    "tsan": ("gcc", [*SANITIZED, "-DSPCCL_SANITIZE=thread"]),
    "gpusim": ("gcc", ["-DSPCCL_CUDA=SIM", "-DCMAKE_CXX_COMPILER=g++"]),
    "gpusim-asan": (
        "gcc",
        ["-DSPCCL_CUDA=SIM", "-DCMAKE_CXX_COMPILER=g++", *SANITIZED, "-DSPCCL_SANITIZE=address+undefined"],
    ),
    "aarch64": (
        "aarch64-linux-gnu-gcc",
        [
            "-DSPCCL_CUDA=OFF",
            "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            f"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;{AARCH64_ROOT}",
        ],
    ),
    "fuzz": ("clang", [*SANITIZED, "-DSPCCL_FUZZ=ON", "-DSPCCL_BUILD_TESTS=OFF"]),
}
# Stages that repeat what the stage "gcc" runs whole take about one in four of the random cases (tests/c/test.h).
# `SPCCL_TEST_SHARE=1 make test` runs all cases in all stages.
SHARE = {"SPCCL_TEST_SHARE": os.environ.get("SPCCL_TEST_SHARE", "4")}
SANITIZER_ENV = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
# Tests with one thread have no races, and the thread sanitizer makes them ten times slower. test_mean and
# test_plan_cost have threads, but they compare results and bytes of collectives that test_collectives runs too.
ONE_THREAD = (
    r"test_(kernels|kernels_codec|kernels_reduce|format|format_mutated|golden|mean|sched|plan_cost|codec|array_codec|"
    r"prune|prune_bf16|prune_bound|prune_kernels|tune_format|tune_gpu|weights|weights_chunk)$|"
    r"replay_"
)
# Tests that do not depend on the kernels: one instruction set is enough. test_plan_cost compares bytes of schedules.
NO_KERNELS = (
    r"test_(abi|atfork|auth|completion|create_fails|descriptors|disagree|fault_injection|faults|fork|gpu_group|"
    r"gpu_channels|gpu_direct|gpu_none|gpu_order|gpu_watchdog|ib_wire|link_rate|local_socket|ncclnet|ncclnet_load|"
    r"ncclnet_ring|nics|nvlink|plan_cost|proxy_wire|rendezvous|sched|secret|settings|startup|tcp_drain|tcp_endings|"
    r"tcp_priority|tcp_window|threads|transport|transport_faults|transport_forks|tune_gpu)$|"
    r"example_(installed|pkg_config)$"
)
# Tests that run every instruction set of the machine themselves, whatever SPCCL_CPU_ISA says.
EVERY_ISA = r"test_(kernels|kernels_codec|kernels_reduce|mean|prune_kernels)$"
# These tests take minutes under emulation. Only kernels and base depend on the architecture, and other tests run
# them. Of the collectives, test_collectives_nan and test_mean run. test_sched and test_plan_cost compute with integers.
# Eight tests cannot run in qemu's user mode. test_local_socket needs surplus descriptors of a message closed, which
# qemu does not do. test_descriptors limits the number of descriptors, and qemu needs some of them itself.
# test_tcp_window and test_tcp_drain read TCP_INFO, and one sets SO_BUF_LOCK: qemu does not pass these on.
# test_link_rate needs SIOCETHTOOL, which qemu does not know.
# example_installed, example_pkg_config and test_ib_library start a program without the emulator.
NOT_EMULATED = (
    r"(test_(collectives|descriptors|fault_injection|faults|ib_library|link_rate|local_socket|ncclnet|ncclnet_put|"
    r"plan_cost|sched|sum_order|tcp_drain|tcp_window|transport|transport_faults)|example_installed|example_pkg_config)$"
)
# Tests that `make check` does not run: they wait for time-outs, or have many cases.
SLOW_TESTS = r"test_(collectives|faults|transport|transport_faults)$"
ISA_CPU_FLAGS = {
    "scalar": set(),
    "avx2": {"avx2", "bmi1", "bmi2", "popcnt", "abm", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2"},
}


# ---- building and running C ------------------------------------------------------------------------------


_probe_lock = threading.RLock()  # stages that run at the same time probe for the same tools


def once(fn: Callable[..., T]) -> Callable[..., T]:
    """Call `fn` once for each set of arguments, in one thread at a time. A Skip is remembered like a result."""
    results: dict[tuple[object, ...], tuple[bool, object]] = {}

    @functools.wraps(fn)
    def wrapper(*args: object) -> T:
        with _probe_lock:
            if args not in results:
                try:
                    results[args] = True, fn(*args)
                except Skip as skip:
                    results[args] = False, skip
            good, value = results[args]
        if not good:
            raise value  # type: ignore[misc]
        return value  # type: ignore[return-value]

    return wrapper


@once
def need_clang() -> None:
    """Install clang and its sanitizer runtime if they are missing. Raises Skip if that fails."""
    probe = BUILD / "probe" / "fuzzer"
    probe.parent.mkdir(parents=True, exist_ok=True)
    source = probe.with_suffix(".c")
    source.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return n && !*d; }\n")
    cmd = ["clang", "-w", "-fsanitize=fuzzer,address,undefined", source, "-o", probe]
    for install in (False, True):
        if install and not apt_install(["clang", "libclang-rt-dev"], "clang builds and fuzzers"):
            break
        if shutil.which("clang") and run(cmd, "probe")[0] == 0:
            return
    raise Skip("no clang with libFuzzer (Debian: apt-get install clang libclang-rt-dev)")


@once
def need_aarch64() -> None:
    """Install the cross-compiler and the emulator if they are missing. Raises Skip if that fails."""
    if platform.machine() == "aarch64":
        raise Skip("this machine is aarch64: the other stages run the tests on it")
    probe = BUILD / "probe" / "aarch64"
    probe.parent.mkdir(parents=True, exist_ok=True)
    source = probe.with_suffix(".c")
    source.write_text("#include <pthread.h>\nint main(void) { return 0; }\n")
    build = ["aarch64-linux-gnu-gcc", "-pthread", source, "-o", probe]
    start = ["qemu-aarch64", "-L", AARCH64_ROOT, probe]
    for install in (False, True):
        if install and not apt_install(AARCH64_PACKAGES, "cross-build and tests for aarch64"):
            break
        found = shutil.which(build[0]) and shutil.which(start[0])
        if found and run(build, "probe")[0] == 0 and run(start, "probe")[0] == 0:
            return
    raise Skip(f"no cross-compiler or emulator for aarch64 (Debian: apt-get install {' '.join(AARCH64_PACKAGES)})")


@once
def install_pkg_config() -> None:
    """Install pkg-config if it is missing. Without it the test example_pkg_config is skipped, and says so."""
    if not any(map(shutil.which, ("pkg-config", "pkgconf"))):
        apt_install(["pkgconf"], "no pkg-config")


@once
def install_verbs_headers() -> None:
    """Install the header of libibverbs if it is missing. Without it transport ib is left out, and the stage ib too."""
    if not Path("/usr/include/infiniband/verbs.h").exists():
        apt_install(["libibverbs-dev"], "no infiniband/verbs.h")


@once
def install_iproute2() -> None:
    """Install `ip` and `tc` if they are missing. Without them the tests of emulated hosts are skipped, and say so."""
    if os.geteuid() == 0 and not all(map(shutil.which, ("ip", "tc"))):
        apt_install(["iproute2"], "emulated hosts: no ip and tc")


@once
def install_launchers() -> None:
    """Install OpenMPI and Slurm if they are missing. Without them tests of docs/CLUSTER.md are skipped, and say so."""
    packages = {"mpicc": ["openmpi-bin", "libopenmpi-dev"], "srun": ["slurmd", "slurmctld", "slurm-client", "munge"]}
    missing = [p for command, names in packages.items() if not shutil.which(command) for p in names]
    if missing and os.geteuid() == 0:
        apt_install(missing, "docs/CLUSTER.md: mpirun and srun")


@once
def c_build(name: str, *targets: str) -> Path:
    """Configure the build `name` of C_BUILDS and compile it, or only these targets. Returns its folder."""
    compiler, options = C_BUILDS[name]
    install_verbs_headers()
    if compiler == "clang":
        need_clang()
    if name == "aarch64":
        need_aarch64()
    folder = BUILD / name
    cache = folder / "CMakeCache.txt"
    # If the compiler of a folder changes, CMake configures again and forgets the other options of this command.
    if cache.exists() and not re.search(rf"^CMAKE_C_COMPILER:\w+=(.*/)?{compiler}$", cache.read_text(), re.MULTILINE):
        say(f"{name}: {folder} was configured for another compiler: made again")
        shutil.rmtree(folder)
    generator = [] if cache.exists() else ["-G", "Ninja"]
    options = [f"-DCMAKE_C_COMPILER={compiler}", "-DSPCCL_WERROR=ON", *options]
    configure = ["cmake", "-S", ROOT, "-B", folder, *generator, *options]
    must_run(f"configuring {name}", configure, f"build-{name}")
    only = ["--target", *targets] if targets else []
    must_run(f"compiling {name}", ["cmake", "--build", folder, "-j", JOBS, *only], f"build-{name}")
    return folder


def ctest(name: str, prefix: tuple[str, ...] = (), leave_out: str = "", only: str = "", **extra_env: str) -> str:
    """Build `name` and run its C tests: those that match `only` and not `leave_out`. Returns ctest's count."""
    folder = c_build(name)
    log = f"ctest-{name}" + (f"-{extra_env['SPCCL_CPU_ISA']}" if "SPCCL_CPU_ISA" in extra_env else "")
    cmd = [*prefix, "ctest", "--test-dir", folder, "-j", TEST_JOBS, "--output-on-failure", "--no-tests=error"]
    cmd += ["-E", leave_out] if leave_out else []
    cmd += ["-R", only] if only else []
    env = child_env(**{**SANITIZER_ENV, **extra_env})
    status, lines = run(cmd, log, show=True, env=env)
    share = extra_env.get("SPCCL_TEST_SHARE", "1")
    totals = [line for line in lines if "tests passed" in line]
    if status != 0:
        raise EnvError(f"ctest: {totals[0] if totals else f'exit status {status}'}; see build/logs/{log}.log")
    skipped = sum("***Skipped" in line for line in lines)
    few = f", 1 in {share} of the random cases" if share != "1" else ""
    return totals[0] + (f", {skipped} skipped" if skipped else "") + few


@once
def sanitizer_prefix(flag: str) -> tuple[str, ...]:
    """The words to put before a command so that the sanitizer's addresses are free.

    Kernels with vm.mmap_rnd_bits above 28 may map memory at the addresses that older sanitizer runtimes need.
    `setarch -R` turns the random addresses off for one process tree.
    """
    probe = BUILD / "probe" / flag
    probe.parent.mkdir(parents=True, exist_ok=True)
    source = probe.with_suffix(".c")
    source.write_text("int main(void) { return 0; }\n")
    if run(["gcc", f"-fsanitize={flag}", source, "-o", probe], "probe")[0] != 0:
        raise Skip(f"this gcc has no -fsanitize={flag} runtime (Debian: apt-get install gcc libgcc-12-dev)")
    # The addresses are random, so one success proves nothing.
    for prefix in ((), ("setarch", platform.machine(), "-R")):
        if all(run([*prefix, probe], "probe")[0] == 0 for _ in range(20)):
            return prefix
    raise Skip(f"-fsanitize={flag} programs do not start on this kernel (root: sysctl vm.mmap_rnd_bits=28)")


# ---- stages ----------------------------------------------------------------------------------------------


def style() -> str:
    install_verbs_headers()
    for script in ("check_style", "check_layers", "check_headers", "check_platform"):
        must_run(script, [PYTHON, ROOT / "tests" / f"{script}.py"], script, show=True)
    return "sizes, words, documents, include order, each header alone"


def lint() -> str:
    must_run("ruff", [VENV / "bin/ruff", "check", "."], "lint", show=True)
    sources = [p for p in files_under(["csrc", "python/ext", "tests", "bench", "examples"]) if _is_c(p)]
    must_run("clang-format", [VENV / "bin/clang-format", "--dry-run", "-Werror", *sources], "lint", show=True)
    return f"ruff; clang-format on {len(sources)} files"


def _is_c(path: Path) -> bool:
    return path.suffix in (".c", ".h", ".inc", ".cpp", ".hpp", ".cu", ".cuh")


def c_gcc() -> str:
    install_pkg_config()
    count = ctest("gcc")
    library = BUILD / "gcc" / "libspccl.so"
    must_run("check_symbols", [PYTHON, ROOT / "tests/check_symbols.py", library], "symbols", show=True)
    return count


def c_ib() -> str:
    build = c_build("gcc")
    has_verbs = (build / "tests/c/ib_transport").exists()
    return run_ib_tests(build, c_build("gpusim", *GPU_PROGRAMS) if has_verbs else build)


def c_isa(isa: str) -> str:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(found.group(1).split() if found else [])
    missing = ISA_CPU_FLAGS[isa] - flags
    if missing:
        raise Skip(f"this CPU has no {', '.join(sorted(missing))}")
    here = [name for name, needed in ISA_CPU_FLAGS.items() if needed <= flags]
    if isa != here[-1]:
        return ctest("gcc", leave_out=f"{NO_KERNELS}|{EVERY_ISA}", SPCCL_CPU_ISA=isa, **SHARE)
    # SPCCL_CPU_ISA=auto takes this set, so the stage "gcc" runs all tests with it.
    count = ctest("gcc", only=r"test_(array_codec|choose|codec|collectives_nan|prune)$", SPCCL_CPU_ISA=isa)
    return f"{count}; the others: stage gcc"


def c_aarch64() -> str:
    """Cross-compile, and run the tests that depend on the architecture under qemu's user emulation."""
    return ctest("aarch64", leave_out=NOT_EMULATED, **SHARE)


def fuzz_targets() -> list[Path]:
    folder = c_build("fuzz") / "tests/fuzz"
    targets = [p for p in sorted(folder.glob("fuzz_*")) if p.is_file() and os.access(p, os.X_OK)]
    if not targets:
        raise EnvError(f"no fuzz_* program in {folder}")
    return targets


def seeds(target: Path) -> Path:
    """The folder of the committed inputs of one fuzzer."""
    folder = ROOT / "tests/fuzz/corpus" / target.name
    if not folder.is_dir() or not any(folder.iterdir()):
        raise EnvError(f"no corpus for {target.name}: {folder} is empty")
    return folder


def fuzz_corpus() -> str:
    """Replay every committed input under ASan and UBSan."""
    notes = []
    for target in fuzz_targets():
        files = [p for p in sorted(seeds(target).rglob("*")) if p.is_file()]
        cmd = [*sanitizer_prefix("address"), target, *files]
        must_run(target.name, cmd, f"corpus-{target.name}", env=child_env(**SANITIZER_ENV))
        notes.append(f"{target.name} {len(files)}")
        say(f"{target.name}: {len(files)} inputs replayed")
    return "inputs: " + ", ".join(notes)


def run_fuzz(seconds: int) -> None:
    """Search for new inputs. They go to build/corpus, and crashes to build/crashes."""
    try:
        targets = fuzz_targets()
    except Skip as skip:
        raise EnvError(str(skip)) from skip
    for target in targets:
        say(f"\n==== {target.name}: {seconds} s")
        found, crashes = BUILD / "corpus" / target.name, BUILD / "crashes" / target.name
        for folder in (found, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={crashes}/", "-print_final_stats=1"]
        cmd = [*sanitizer_prefix("address"), target, *options, found, seeds(target)]
        env = child_env(**SANITIZER_ENV)
        must_run(target.name, cmd, f"fuzz-{target.name}", show=True, env=env, timeout_s=seconds + 600)


def cuda() -> str:
    note = with_cuda()
    if note is None:
        raise Skip("no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda")
    return note


def python_tests(*options: str) -> str:
    ensure_spccl()
    install_iproute2()
    env = child_env(SPCCL_TEST_CACHE=str(BUILD / "test-cache"))
    if not options:  # the whole suite
        install_launchers()
        env["SPCCL_TEST_FRAMEWORKS"] = ensure_frameworks() or ""
    # A test waits for other processes half of its time, so two files of tests run at the same time. They would share
    # the GPUs, so on a machine with GPUs they do not.
    workers = [] if has_gpu() else ["-n", "2", "--dist", "loadfile"]
    status, lines = run([VENV / "bin/pytest", *workers, *options], "pytest", show=True, env=env, timeout_s=3600)
    last = lines[-1].strip("= ") if lines else "no output"
    if status != 0:
        raise EnvError(f"pytest: {last}; see build/logs/pytest.log")
    return last


def c_asan() -> str:
    return ctest("asan", sanitizer_prefix("address"), **SHARE)


def c_tsan() -> str:
    return ctest("tsan", sanitizer_prefix("thread"), leave_out=ONE_THREAD, **SHARE)


def gpusim_asan() -> str:
    # The tests make many fibers, each with a stack. A fake stack for each would be searched at every switch.
    options = SANITIZER_ENV["ASAN_OPTIONS"].replace("stack_use_after_return=1", "stack_use_after_return=0")
    return ctest("gpusim-asan", sanitizer_prefix("address"), ASAN_OPTIONS=options)


# Long stages are first: two stages run at the same time, and the last one should not run alone for long.
STAGES = [
    Stage("style", style, "tests/check_*.py"),
    Stage("lint", lint, "ruff and clang-format"),
    Stage("gcc", c_gcc, "C tests, gcc, release; exported names", uses="build/gcc"),
    Stage("pytest", python_tests, "Python and multi-process tests", uses=".venv"),
    Stage("tsan", c_tsan, "C tests with threads, thread sanitizer"),
    Stage("asan", c_asan, "C tests, address and undefined-behaviour sanitizers"),
    Stage("cuda", cuda, "the package with CUDA, one architecture"),
    Stage("gpusim", functools.partial(ctest, "gpusim"), "GPU kernels and tests on GPUs in software"),
    Stage("gpusim-asan", gpusim_asan, "GPU tests in software, address and undefined-behaviour sanitizers"),
    Stage("ib", c_ib, "transport ib over software RoCE, in a virtual machine"),
    Stage("clang", functools.partial(ctest, "clang", **SHARE), "C tests, clang, release"),
    Stage("wheel", wheel_stage, "the wheel in environments without compilers", uses=".venv"),
    Stage("aarch64", c_aarch64, "C tests for aarch64 under qemu"),
    *(
        Stage(isa, functools.partial(c_isa, isa), f"C tests of kernels, SPCCL_CPU_ISA={isa}", uses="build/gcc")
        for isa in ISA_CPU_FLAGS
    ),
    Stage("package", isolated, "pip install . into an empty environment"),
    Stage("fuzz", fuzz_corpus, "committed inputs of every fuzzer, clang, sanitizers"),
]
CHECK_STAGES = [
    Stage("style", style, "tests/check_*.py"),
    Stage("lint", lint, "ruff and clang-format"),
    Stage("gcc", functools.partial(ctest, "gcc", leave_out=SLOW_TESTS), "fast C tests", uses="build/gcc"),
    Stage("python", functools.partial(python_tests, "tests/py", "-m", "not slow"), "fast Python tests"),
]
