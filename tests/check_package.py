"""Checks an installed spccl: its files and tags, that it works, and that it works without torch.

Run it with the Python of an environment in which spccl and numpy are installed.
    --cuda in|absent   whether the library must have been built with CUDA
    --glue             the package must hold the glue for one torch, and have a platform tag of auditwheel
    --torch            torch is installed too: make a group of two ranks with the glue of the package, without
                       a compiler. Without this flag torch must be absent."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

import spccl

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent
FILES = (
    "_ext.abi3.so",
    "libspccl.so",
    "include/spccl.h",
    "include/spccl_channel.h",
    "include/spccl_experimental.h",
    "include/spccl_device.cuh",
    "py.typed",
)
GLUE = "spccl/c10d_src"  # sources of the torch glue, which is compiled on first use


RANK_CODE = """
import datetime, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
wait = datetime.timedelta(seconds=60)
dist.init_process_group("spccl", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2, timeout=wait)
x = torch.zeros(1000)
x[rank] = rank + 1
dist.all_reduce(x)
assert x[:3].tolist() == [1, 2, 0], x[:3]
dist.destroy_process_group()
from spccl import _torch_glue
print(_torch_glue.load())
"""


def git_names(folder: str, *suffixes: str) -> set[str]:
    """Names relative to `folder` of the files that git tracks; without a repository, of all that are there."""
    listing = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        paths = (ROOT / folder).rglob("*")
        return {p.relative_to(ROOT / folder).as_posix() for p in paths if p.name.endswith(suffixes)}
    return {n.removeprefix(f"{folder}/") for n in listing.stdout.split("\n") if n.endswith(suffixes)}


def check_files(glue: bool) -> None:
    names = {str(f) for f in metadata.files("spccl") or ()}
    missing = [f for f in FILES if f"spccl/{f}" not in names]
    assert not missing, f"not installed: {missing}"
    sources = {p.name for p in (ROOT / "csrc/c10d_backend").rglob("*") if p.suffix in (".cpp", ".hpp")}
    unseen = {Path(n).name for n in git_names("csrc/c10d_backend", ".cpp", ".hpp")} - sources
    unseen |= git_names("python/spccl", ".py") - {
        p.relative_to(ROOT / "python/spccl").as_posix() for p in (ROOT / "python/spccl").rglob("*.py")
    }
    assert not unseen, f"git tracks files that this check did not find: {unseen}"
    shipped = {Path(n).name for n in names if n.startswith(GLUE + "/")}
    assert sources and sources <= shipped, f"{GLUE}: missing {sorted(sources - shipped)}"
    python = {f"spccl/{p.relative_to(ROOT / 'python/spccl')}" for p in (ROOT / "python/spccl").rglob("*.py")}
    assert python <= names, f"not installed: {sorted(python - names)}"
    inside = [n for n in names if not n.startswith(("spccl/include/", GLUE))]
    found = [n for n in inside if "libspccl_torch" in n]
    assert len(found) == glue, f"wanted {int(glue)} prebuilt glue, found {found}"
    strays = [n for n in inside if re.search(r"\.[ch]$|\.o$", n)]
    assert not strays, f"files that must not be in a package: {strays}"


def check_metadata(glue: bool) -> None:
    wheel = metadata.distribution("spccl").read_text("WHEEL") or ""
    assert f"Tag: cp311-abi3-{'manylinux' if glue else 'linux'}_" in wheel, wheel
    header = (ROOT / "csrc/spccl.h").read_text()
    found = re.search(r'SPCCL_VERSION_TEXT "([^"]+)"', header)
    versions = {metadata.version("spccl"), spccl.__version__, found.group(1) if found else "none"}
    assert len(versions) == 1, f"versions differ: {versions}"
    always = [r for r in metadata.requires("spccl") or () if "extra" not in r]
    assert {re.split(r"\W", r)[0] for r in always} == {"click", "rich"}, always
    hooks = metadata.entry_points(group="torch.backends", name="spccl")
    assert len(hooks) == 1
    (hook,) = hooks
    hook.load()()  # must not raise, with or without torch
    needed = needed_by(Path(spccl._ext.__file__))
    assert "libspccl.so" in needed and not any("python" in n or "torch" in n for n in needed), needed


def needed_by(library: Path) -> list[str]:
    """The shared libraries that the dynamic linker needs to load `library`."""
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", dynamic)


def check_cuda(wanted: str) -> None:
    """The library must load on a machine without CUDA and without a GPU."""
    library = Path(spccl.__file__).parent / "libspccl.so"
    of_cuda = [n for n in needed_by(library) if re.match(r"lib(cu|nv)", n)]
    assert not of_cuda, f"{library.name} does not load without {of_cuda}"
    words = [str(SCRIPTS / "spccl"), "info", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=True)
    (entry,) = (e for e in json.loads(done.stdout) if (e["kind"], e["name"]) == ("part", "cuda"))
    assert entry["value"] == wanted, f"wanted cuda {wanted}: {entry}"
    n_gpus = ctypes.CDLL(str(library)).spccl_cuda_device_count()
    if wanted == "absent" or not Path("/dev/nvidiactl").exists():
        assert n_gpus == 0, f"{n_gpus} GPUs, wanted 0: no CUDA in the library or no driver"
    print(f"     cuda {entry['value']}: {entry['why']}; {n_gpus} GPUs")


def check_codec() -> None:
    x = np.zeros(1_000_003, np.float32)
    x[::101] = np.arange(x[::101].size)
    x[7] = -0.0
    encoded = spccl.encode(x)
    assert len(encoded) < x.nbytes / 20, f"{len(encoded)} bytes for {x.nbytes}"
    back = spccl.decode(encoded)
    assert back.dtype == x.dtype and back.tobytes() == x.tobytes()
    damaged = bytearray(encoded)
    damaged[0] ^= 0xFF
    try:
        spccl.decode(bytes(damaged))
    except spccl.Error as err:
        assert str(err)
    else:
        raise AssertionError("a damaged encoded array was accepted")


def check_commands() -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.spccl")
        frame.write_bytes(spccl.encode(np.eye(64, dtype=np.float32)))
        for words in (["--version"], ["info"], ["inspect", str(frame)]):
            command = [str(SCRIPTS / "spccl"), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0 and done.stdout.strip(), f"{words}: {done.returncode}\n{done.stderr}"


def check_torch() -> None:
    """Run two ranks on backend "spccl" with the glue in the package."""
    env = dict(os.environ, SPCCL_TORCH_GLUE="prebuilt", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RANK_CODE]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks = [subprocess.Popen([*command, str(r), f"{folder}/store"], env=env, **pipes) for r in range(2)]
        try:
            outputs = [rank.communicate(timeout=500)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, text in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, text
        assert str(Path(spccl.__file__).parent) in text, f"the glue is not the package's own: {text}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", choices=["in", "absent"], required=True)
    parser.add_argument("--glue", action="store_true")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    has_torch = importlib.util.find_spec("torch") is not None
    assert has_torch == args.torch, f"torch is {'installed' if has_torch else 'absent'}, wanted the opposite"
    init_file = Path(spccl.__file__).resolve()
    assert ROOT / "python" not in init_file.parents, f"{init_file} is the source tree, not the installed package"
    compilers = [name for name in ("gcc", "cc", "g++", "c++", "clang", "nvcc") if shutil.which(name)]
    assert not (args.glue and compilers), f"--glue tests a machine without compilers, found {compilers}"
    checks = {
        "check_files": lambda: check_files(args.glue),
        "check_metadata": lambda: check_metadata(args.glue),
        "check_codec": check_codec,
        "check_commands": check_commands,
        "check_cuda": lambda: check_cuda(args.cuda),
        **({"check_torch": check_torch} if args.torch else {}),
    }
    for name, check in checks.items():
        check()
        print(f"ok   {name}")
    print(f"check_package: {len(checks)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
