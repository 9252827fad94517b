"""The examples of README.md and docs/OWN_RULE.md, run as the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples use torch.distributed")

from launch import torchrun

ROOT = Path(__file__).resolve().parents[2]


def slow(*values):
    """torchrun and two ranks that import torch take 20 to 30 s of CPU."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "page, example, wanted",
    [
        ("README.md", "example.py", [r"rank 0: 167773 nonzeros, each 2", r"rank 1: 167773 nonzeros, each 2"]),
        slow("docs/OWN_RULE.md", "own_rule.py", [r"(sent 1[0-3]\d kB a step; dense 4000 kB\s*){2}"]),
        slow("docs/OWN_RULE.md", "own_hook.py", [r"(3000 of 30000 gradients came\s*){2}"]),
    ],
)
def test_example_prints_what_its_page_says(page, example, wanted, tmp_path):
    code = re.search(rf"```python\n(# {re.escape(example)}: .*?)```", (ROOT / page).read_text(), re.S)
    assert code is not None, f"{page} has no {example}"
    (tmp_path / example).write_text(code[1])
    status, output = torchrun(str(tmp_path / example))
    assert status == 0, output
    for pattern in wanted:
        assert re.search(pattern, output), output
