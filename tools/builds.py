"""Compiles C with one of several compilers and sanitizers, runs its tests, and installs what that needs."""

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

from env import BUILD, ROOT, EnvError, apt_install, child_env, cuda_here, must_run, run, say
from stages import Skip

T = TypeVar("T")
JOBS = str(os.cpu_count() or 1)
TEST_JOBS = str(2 * (os.cpu_count() or 1))  # of ctest: many tests wait for deadlines and use no CPU meanwhile

AARCH64_ROOT = "/usr/aarch64-linux-gnu"
AARCH64_PACKAGES = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"]

# Tests with one thread have no races, and the thread sanitizer makes them ten times slower. test_mean and
# test_plan_cost have threads, but they compare results and bytes of collectives that test_collectives runs too.
# test_sum_order and test_negative_zero compare the bits of sums, in threads as test_collectives has them. The first
# took a fifth of the stage's time, the second more than 5 minutes.
NO_NEW_RACES = (
    r"test_(kernels|kernels_codec|kernels_reduce|format|format_mutated|golden|mean|sched|plan_cost|codec|array_codec|"
    r"delta|prune|prune_bf16|prune_bound|prune_kernels|tune_format|tune_gpu|weights|weights_chunk|sum_order|negative_zero)$|"
    r"replay_"
)
# These tests take minutes under emulation. Only kernels and base depend on the architecture, and other tests run
# them. Of the collectives, test_collectives_nan and test_mean run. test_sched and test_plan_cost compute with integers.
# Seven tests cannot run in qemu's user mode. test_local_socket needs surplus descriptors of a message closed, which
# qemu does not do. test_descriptors limits the number of descriptors, and qemu needs some of them itself.
# test_tcp_window and test_tcp_drain read TCP_INFO, and one sets SO_BUF_LOCK: qemu does not pass these on.
# test_link_rate needs SIOCETHTOOL, which qemu does not know.
# test_ib_library and test_settings start a program without the emulator.
NOT_EMULATED = (
    r"test_(collectives|completion|descriptors|fault_injection|faults|ib_library|link_rate|local_socket|ncclnet|"
    r"plan_cost|sched|settings|sum_order|tcp_drain|tcp_window|transport|transport_faults)$"
)

# Line numbers are all that reports of sanitizers need; names of variables (-g) take a third of the compiler's time.
SANITIZED = [
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG",
]
# name -> (compiler, CMake options). Only the stage "cuda" compiles CUDA; with a GPU, "gcc" does too.
C_BUILDS = {
    "gcc": ("gcc", [f"-DSPCCL_CUDA={cuda_here()}"]),
    "asan": ("gcc", [*SANITIZED, "-DSPCCL_SANITIZE=address+undefined"]),
    # As if the machine had no nvcc. clang_asan_options() has further options.
    "asan-clang": (
        "clang",
        [
            *("-DSPCCL_CUDA=AUTO", "-DSPCCL_NVCC=0", "-DCMAKE_CUDA_COMPILER=NOTFOUND"),
            *SANITIZED,
            "-DSPCCL_SANITIZE=address+undefined",
        ],
    ),
    "tsan": ("gcc", [*SANITIZED, "-DSPCCL_SANITIZE=thread", f"-DSPCCL_TESTS_LEFT_OUT={NO_NEW_RACES}"]),
    # Kernels with bulk copies, as for sm_90 and later.
    "gpusim": ("gcc", ["-DSPCCL_CUDA=SIM", "-DSPCCL_GPUSIM_BULK=1", "-DCMAKE_CXX_COMPILER=g++"]),
    # Kernels as for older GPUs. Apart from how they copy, these are the same code.
    "gpusim-asan": (
        "gcc",
        [
            *("-DSPCCL_CUDA=SIM", "-DSPCCL_GPUSIM_BULK=0", "-DCMAKE_CXX_COMPILER=g++"),
            *SANITIZED,
            "-DSPCCL_SANITIZE=address+undefined",
        ],
    ),
    "aarch64": (
        "aarch64-linux-gnu-gcc",
        [
            "-DSPCCL_CUDA=OFF",
            "-DCMAKE_SYSTEM_NAME=Linux",
            "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
            f"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;{AARCH64_ROOT}",
            f"-DSPCCL_TESTS_LEFT_OUT={NOT_EMULATED}",
        ],
    ),
    "fuzz": ("clang", [*SANITIZED, "-DSPCCL_FUZZ=ON", "-DSPCCL_BUILD_TESTS=OFF"]),
}
# About one in four of the random cases (tests/c/test.h). The stage "random" runs the others.
# `SPCCL_TEST_SHARE=1 make test` runs all cases in all stages.
SHARE = {"SPCCL_TEST_SHARE": os.environ.get("SPCCL_TEST_SHARE", "4")}
SANITIZER_ENV = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
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


def clang_runtime() -> str:
    """The CMake option that links clang's sanitizer as a shared library, as gcc does. In a static one the linker's
    option --wrap, which tests use, would also change what the sanitizer calls before main."""
    name = f"libclang_rt.asan-{platform.machine()}.so"
    found = must_run("clang", ["clang", f"-print-file-name={name}"], "probe")[0]
    return f"-DCMAKE_EXE_LINKER_FLAGS=-shared-libasan -Wl,-rpath,{Path(found).parent}"


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
    if name == "asan-clang":
        options = [*options, clang_runtime()]
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


def ctest(
    name: str,
    prefix: tuple[str, ...] = (),
    leave_out: str = "",
    only: str = "",
    jobs: str = TEST_JOBS,
    **extra_env: str,
) -> str:
    """Build `name` and run its C tests: those that match `only` and not `leave_out`. Returns ctest's count."""
    folder = c_build(name)
    log = f"ctest-{name}" + (f"-{extra_env['SPCCL_DEBUG_CPU_ISA']}" if "SPCCL_DEBUG_CPU_ISA" in extra_env else "")
    cmd = [*prefix, "ctest", "--test-dir", folder, "-j", jobs, "--output-on-failure", "--no-tests=error"]
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
