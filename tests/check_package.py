"""Checks an installed spccl: its files and tags, that nothing of it wants torch, and that it works.

Run it with the Python of an environment that got `pip install .` and numpy, and has no torch."""

from __future__ import annotations

import importlib.util
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
    command = ["readelf", "-d", spccl._ext.__file__]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert "libspccl.so" in needed and not any("python" in n or "torch" in n for n in needed), needed


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
    for check in (check_files, check_metadata, check_codec, check_commands):
        check()
        print(f"ok   {check.__name__}")
    print("check_package: 4 passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
