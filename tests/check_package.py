"""Checks an installed spccl: its files and tags, that nothing of it wants torch, and that it works.

Run it with the Python of an environment that got `pip install .` and numpy, and has no torch.
`--cuda in` or `--cuda absent` says whether the library must have been built with CUDA."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np

import spccl

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent
FILES = ("_ext.abi3.so", "libspccl.so", "include/spccl.h", "py.typed")
GLUE = "spccl/c10d_src"  # compiled on first use, so that one package serves every torch


def check_files() -> None:
    names = {str(f) for f in metadata.files("spccl") or ()}
    missing = [f for f in FILES if f"spccl/{f}" not in names]
    assert not missing, f"not installed: {missing}"
    sources = {p.name for p in (ROOT / "csrc/c10d_backend").iterdir() if p.suffix in (".cpp", ".hpp")}
    shipped = {Path(n).name for n in names if n.startswith(GLUE + "/")}
    assert sources and sources <= shipped, f"{GLUE}: missing {sorted(sources - shipped)}"
    python = {f"spccl/{p.relative_to(ROOT / 'python/spccl')}" for p in (ROOT / "python/spccl").rglob("*.py")}
    assert python <= names, f"not installed: {sorted(python - names)}"
    inside = [n for n in names if not n.startswith(("spccl/include/", GLUE))]
    strays = [n for n in inside if re.search(r"libspccl_torch|\.[ch]$|\.o$", n)]
    assert not strays, f"does not belong into a package built without torch: {strays}"


def check_metadata() -> None:
    wheel = metadata.distribution("spccl").read_text("WHEEL") or ""
    assert "Tag: cp311-abi3-linux_" in wheel, wheel
    header = (ROOT / "csrc/spccl.h").read_text()
    found = re.search(r'SPCCL_VERSION_TEXT "([^"]+)"', header)
    versions = {metadata.version("spccl"), spccl.__version__, found.group(1) if found else "none"}
    assert len(versions) == 1, f"versions differ: {versions}"
    always = [r for r in metadata.requires("spccl") or () if "extra" not in r]
    assert {re.split(r"\W", r)[0] for r in always} == {"click", "rich"}, always
    hooks = metadata.entry_points(group="torch.backends", name="spccl")
    assert len(hooks) == 1
    (hook,) = hooks
    hook.load()()  # never raises, torch or not
    needed = needed_by(Path(spccl._ext.__file__))
    assert "libspccl.so" in needed and not any("python" in n or "torch" in n for n in needed), needed


def needed_by(library: Path) -> list[str]:
    """The shared libraries that must be there before `library` loads."""
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", dynamic)


def check_cuda(wanted: str) -> None:
    """One file for machines with and without a GPU: nothing of CUDA's must be there for it to load."""
    library = Path(spccl.__file__).parent / "libspccl.so"
    of_cuda = [n for n in needed_by(library) if re.match(r"lib(cu|nv)", n)]
    assert not of_cuda, f"{library.name} does not load without {of_cuda}"
    words = [str(SCRIPTS / "spccl"), "info", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    (entry,) = (e for e in json.loads(done.stdout) if (e["kind"], e["name"]) == ("part", "cuda"))
    assert entry["value"] == wanted, f"wanted cuda {wanted}: {entry}"
    n_gpus = ctypes.CDLL(str(library)).spccl_cuda_device_count()
    if wanted == "absent" or not Path("/dev/nvidiactl").exists():
        assert n_gpus == 0, f"{n_gpus} GPUs, where none can be used"
    print(f"     cuda {entry['value']}: {entry['why']}; {n_gpus} GPUs")


def check_codec() -> None:
    x = np.zeros(1_000_003, np.float32)
    x[::101] = np.arange(x[::101].size)
    x[7] = -0.0
    stream = spccl.encode(x)
    assert len(stream) < x.nbytes / 20, f"{len(stream)} bytes for {x.nbytes}"
    back = spccl.decode(stream)
    assert back.dtype == x.dtype and back.tobytes() == x.tobytes()
    damaged = bytearray(stream)
    damaged[0] ^= 0xFF
    try:
        spccl.decode(bytes(damaged))
    except spccl.Error as err:
        assert str(err)
    else:
        raise AssertionError("a damaged stream was accepted")


def check_commands() -> None:
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.spccl")
        frame.write_bytes(spccl.encode(np.eye(64, dtype=np.float32)))
        for words in (["--version"], ["info"], ["inspect", str(frame)]):
            command = [str(SCRIPTS / "spccl"), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0 and done.stdout.strip(), f"{words}: {done.returncode}\n{done.stderr}"


def main() -> int:
    assert importlib.util.find_spec("torch") is None, "this environment has torch: it proves nothing"
    place = Path(spccl.__file__).resolve()
    assert ROOT / "python" not in place.parents, f"{place} is the source tree, not the installed package"
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", choices=["in", "absent"], required=True)
    cuda = parser.parse_args().cuda
    for check in (check_files, check_metadata, check_codec, check_commands):
        check()
        print(f"ok   {check.__name__}")
    check_cuda(cuda)
    print("ok   check_cuda")
    print("check_package: 5 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
