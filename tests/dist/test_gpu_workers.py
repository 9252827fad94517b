"""The workers of tests/gpu load without a GPU: a wrong import in one would show on a GPU only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).resolve().parent
WORKERS = HERE.parent / "gpu" / "workers"

LOAD = """
import importlib, pathlib, sys
names = sorted(path.stem for path in pathlib.Path(sys.argv[1]).glob("*.py"))
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_all_load(tmp_path: Path):
    path = os.pathsep.join([str(WORKERS), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "RANK": "0", "WORLD_SIZE": "4", "SPCCL_TEST_FOLDER": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(WORKERS)], env=env, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list(WORKERS.glob("*.py"))) > 1
