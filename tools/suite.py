"""The stages of `make test`, `make test-all` and `make check`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from builds import (
    JOBS,
    SANITIZER_ENV,
    SHARE,
    c_build,
    ctest,
    install_iproute2,
    install_launchers,
    install_pkg_config,
    install_verbs_headers,
    need_clang,
    sanitizer_prefix,
)
from env import (
    BUILD,
    ROOT,
    VENV,
    EnvError,
    build_wheel,
    child_env,
    ensure_frameworks,
    ensure_spccl,
    ensure_venv,
    files_under,
    has_gpu,
    must_run,
    requirements,
    run,
    say,
)
from packages import isolated, wheel_stage, with_cuda
from softroce import run_ib_tests
from stages import Skip, Stage

PYTHON = VENV / "bin/python"

# The tests with random cases, and those that run all of them in the stage "random".
RANDOM = r"test_(codec|collectives|kernels_codec|mean|negative_zero|sum_order|transport)$"
# What the stage "pytest-asan" runs: the extension alone, and the glue in ranks that exchange data.
SANITIZED_PYTHON_TESTS = [
    *("tests/py/test_ext.py", "tests/py/test_frame.py", "tests/py/test_comm.py"),
    "tests/dist/test_collectives.py",
]
# Tests that `make check` does not run: they wait for time-outs, or have many cases.
SLOW_TESTS = r"test_(collectives|faults|transport|transport_faults)$"
AVX2_CPU_FLAGS = {"avx2", "bmi1", "bmi2", "popcnt", "abm", "f16c"}


def setup() -> str:
    ensure_venv()
    return f"{len(requirements())} requirements"


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
    count = ctest("gcc", **SHARE)
    library = BUILD / "gcc" / "libspccl.so"
    must_run("check_symbols", [sys.executable, ROOT / "tests/check_symbols.py", library], "symbols", show=True)
    return count


def c_ib() -> str:
    return run_ib_tests(c_build("gcc", "ib_programs"), c_build("gpusim", "ib_programs"))


def fuzz_targets() -> list[Path]:
    folder = c_build("fuzz") / "tests/fuzz"
    targets = [p for p in sorted(folder.glob("fuzz_*")) if p.is_file() and os.access(p, os.X_OK)]
    if not targets:
        raise EnvError(f"no fuzz_* program in {folder}")
    return targets


def seeds(target: Path) -> Path:
    """The folder of the committed inputs of one fuzzer, made from tests/fuzz/corpus/<target>.hex."""
    folder = BUILD / "seeds" / target.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for line in (ROOT / f"tests/fuzz/corpus/{target.name}.hex").read_text().splitlines():
        name, data = line.split(" ")
        (folder / name).write_bytes(bytes.fromhex(data))
    return folder


def fuzzers() -> str:
    """Each fuzzer links and starts. The stage "asan" replays the committed inputs (replay_*)."""
    targets = fuzz_targets()
    for target in targets:
        must_run(target.name, [*sanitizer_prefix("address"), target, "-runs=1"], f"fuzz-{target.name}")
    return ", ".join(target.name for target in targets)


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


def python_tests(*options: str) -> str:
    ensure_spccl()
    install_iproute2()
    # Threads of torch that poll for work would take the other file's core.
    env = child_env(SPCCL_TEST_CACHE=str(BUILD / "test-cache"), OMP_NUM_THREADS="1")
    # A test waits for other processes half of its time, so three files of tests run at the same time. They would share
    # the GPUs, so on a machine with GPUs they do not.
    workers = [] if has_gpu() else ["-n", "3", "--dist", "loadfile"]
    return run_pytest("pytest", [*workers, *options], env)


def run_pytest(log: str, options: Sequence[object], env: dict[str, str], prefix: Sequence[str] = ()) -> str:
    """Run pytest. Returns its last line: how many tests passed."""
    status, lines = run([*prefix, VENV / "bin/pytest", *options], log, show=True, env=env, timeout_s=3600)
    last = lines[-1].strip("= ") if lines else "no output"
    if status != 0:
        raise EnvError(f"pytest: {last}; see build/logs/{log}.log")
    return last


def python_slow() -> str:
    install_launchers()
    failed = ensure_frameworks()
    if failed and os.environ.get("CI"):
        raise EnvError(failed)  # its tests would be skipped
    os.environ["SPCCL_TEST_FRAMEWORKS"] = failed or ""
    return python_tests("-m", "slow")


def c_asan() -> str:
    """With clang, or with gcc where there is no clang. With the AVX2 kernels, where the CPU has them: the stage "gcc"
    takes the best set, "aarch64" the scalar one."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    isa = {"SPCCL_DEBUG_CPU_ISA": "avx2"} if found and set(found.group(1).split()) >= AVX2_CPU_FLAGS else {}
    try:
        need_clang()
        compiler = "clang"
    except Skip:
        if os.environ.get("CI"):
            raise
        compiler = "gcc"
    name = "asan-clang" if compiler == "clang" else "asan"
    return f"{compiler}: {ctest(name, sanitizer_prefix('address'), **SHARE, **isa)}"


def c_tsan() -> str:
    # Its threads poll ten times as long as elsewhere. Of four tests at once some ran into their deadlines.
    return ctest("tsan", sanitizer_prefix("thread"), jobs=JOBS, **SHARE)


def python_asan() -> str:
    """The extension and the torch glue, built with the sanitizers, in Python programs that exchange data."""
    ensure_spccl()
    python, folder = VENV / "bin/python", BUILD / "sanitized-package"
    defines = ["SPCCL_PREBUILD_TORCH=ON", "SPCCL_CUDA=OFF", "SPCCL_SANITIZE=address+undefined"]
    defines += [f"CMAKE_{language}_FLAGS_RELEASE=-O1 -DNDEBUG" for language in ("C", "CXX")]
    wheel = build_wheel(python, "wheel-asan", defines, BUILD / "dist-asan")
    shutil.rmtree(folder, ignore_errors=True)
    must_run("pip install", [python, "-m", "pip", "install", "--no-deps", "--target", folder, wheel], "wheel-asan")
    libraries = [must_run("gcc", ["gcc", f"-print-file-name={n}"], "probe")[0] for n in ("libasan.so", "libubsan.so")]
    # CPython keeps memory until the process ends. libstdc++ must be there before the runtime looks for __cxa_throw.
    libraries.append(must_run("gcc", ["gcc", "-print-file-name=libstdc++.so"], "probe")[0])
    env = child_env(
        LD_PRELOAD=" ".join(libraries),
        PYTHONPATH=str(folder),
        PYTHONMALLOC="malloc",
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=1",
        UBSAN_OPTIONS=SANITIZER_ENV["UBSAN_OPTIONS"],
    )
    return run_pytest("pytest-asan", SANITIZED_PYTHON_TESTS, env, sanitizer_prefix("address"))


def gpusim_asan() -> str:
    # The tests make many fibers, each with a stack. A fake stack for each would be searched at every switch.
    options = SANITIZER_ENV["ASAN_OPTIONS"].replace("stack_use_after_return=1", "stack_use_after_return=0")
    return ctest("gpusim-asan", sanitizer_prefix("address"), ASAN_OPTIONS=options)


def stages(*names: str) -> list[Stage]:
    return [ALL[name] for name in names]


ALL = {
    stage.name: stage
    for stage in (
        Stage("set-up", setup, ".venv with torch and the test tools, once", uses=".venv"),
        Stage("style", style, "tests/check_*.py", after="set-up"),
        Stage("lint", lint, "ruff and clang-format", after="set-up"),
        Stage("gcc", c_gcc, "C tests, gcc, release, 1 in 4 of the random cases; exported names", uses="build/gcc"),
        Stage("asan", c_asan, "C tests, clang, address and undefined-behaviour sanitizers"),
        Stage("gpusim", partial(ctest, "gpusim", leave_out="_slow$"), "GPU kernels, in software", uses="build/gpusim"),
        Stage("pytest", partial(python_tests, "-m", "not slow"), "Python and multi-process tests", uses=".venv"),
        # What follows is for `make test-all` alone.
        Stage("pytest-slow", python_slow, "slow Python tests, and those of the frameworks", uses=".venv"),
        Stage("pytest-asan", python_asan, "extension and torch glue, address and undefined-behaviour sanitizers"),
        Stage("random", partial(ctest, "gcc", only=RANDOM), "C tests with random cases, all of them", uses="build/gcc"),
        Stage("tsan", c_tsan, "C tests with threads, thread sanitizer"),
        Stage("gpusim-slow", partial(ctest, "gpusim", only="_slow$"), "the same, larger arrays", uses="build/gpusim"),
        Stage("gpusim-asan", gpusim_asan, "GPU tests in software as for older GPUs, sanitizers"),
        Stage("ib", c_ib, "transport ib over software RoCE, in a virtual machine", uses="build/gpusim"),
        Stage("cuda", with_cuda, "the package with CUDA, one architecture"),
        Stage("wheel", wheel_stage, "the wheel in environments without compilers", uses=".venv"),
        Stage("aarch64", partial(ctest, "aarch64", **SHARE), "C tests for aarch64 under qemu, scalar kernels"),
        Stage("package", isolated, "pip install . into an empty environment"),
        Stage("fuzz", fuzzers, "libFuzzer targets, clang, sanitizers"),
    )
}
# Long stages are first: the last one should not run alone for long.
TEST_STAGES = stages("set-up", "gcc", "pytest", "asan", "gpusim", "style", "lint")
TEST_ALL_STAGES = [*TEST_STAGES, *(stage for stage in ALL.values() if stage not in TEST_STAGES)]
CHECK_STAGES = [
    *stages("style", "lint"),
    Stage("gcc", partial(ctest, "gcc", leave_out=SLOW_TESTS, **SHARE), "fast C tests", uses="build/gcc"),
    Stage("python", partial(python_tests, "tests/py", "-m", "not slow"), "fast Python tests"),
]
