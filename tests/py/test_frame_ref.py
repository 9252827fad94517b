"""Compares the second decoder (tests/ref/frame_ref.py) with the golden files and FORMAT.md. Needs no library."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).resolve().parent.parent


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


ref = load(TESTS / "ref" / "frame_ref.py")
make = load(TESTS / "golden" / "make.py")
delta_ref = make.delta_ref
FILES = ("good.hex", "bad.hex", "delta_good.hex", "delta_bad.hex")
GOOD, BAD, DELTA_GOOD, DELTA_BAD = (make.read(TESTS / "golden" / name) for name in FILES)
RULES = range(1, 32)
DELTA_RULES = range(1, 21)


def test_golden_files_are_what_make_writes() -> None:
    wanted = make.wanted()
    assert list(GOOD) == list(wanted["good.hex"]) and list(BAD) == list(wanted["bad.hex"])
    assert wanted == dict(zip(FILES, (GOOD, BAD, DELTA_GOOD, DELTA_BAD), strict=True))


def test_every_rule_has_a_bad_file() -> None:
    assert {int(name[1:3]) for name in BAD} == set(RULES)
    assert {int(name[1:3]) for name in DELTA_BAD} == set(DELTA_RULES)


def test_document_lists_the_same_rules() -> None:
    text = (TESTS.parent / "docs" / "FORMAT.md").read_text("utf-8")
    for begin, end, rules in (("\n## 4.", "\n## 5.", RULES), ("\n### 11.3", "\n### 11.4", DELTA_RULES)):
        section = text.split(begin)[1].split(end)[0]
        assert [int(m) for m in re.findall(r"^(\d+)\. ", section, re.M)] == list(rules)


@pytest.mark.parametrize("name", [name for name in GOOD if "." not in name])
def test_good(name: str) -> None:
    frames = ref.read_array(GOOD[name])
    dtype = frames[0].dtype
    n_bytes = sum(f.n_elems for f in frames) * ref.DTYPES[ref.DTYPE_NUMBERS[dtype]][1]
    verbs = [verb for verb in ref.VERBS if f"{name}.{verb}" in GOOD]
    assert "overwrite" in verbs
    for verb in verbs:
        assert ref.decode(GOOD[name], verb, make.pattern(n_bytes), dtype) == GOOD[f"{name}.{verb}"]


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    with pytest.raises(ref.Refused) as refused:
        ref.decode(BAD[name], "set", bytes(40), "float32")
    assert refused.value.rule == int(name[1:3])


@pytest.mark.parametrize("name", DELTA_BAD)
def test_bad_delta(name: str) -> None:
    with pytest.raises(delta_ref.Refused) as refused:
        delta_ref.read_frame(DELTA_BAD[name])
    assert refused.value.rule == int(name[1:3])


def undump(text: str) -> bytes:
    """The bytes of a hex dump of docs/FORMAT.md, section 7."""
    out = b""
    starred = False
    for line in text.splitlines():
        offset, _, rest = line.partition("  ")
        if offset == "*":
            starred = True
            continue
        while starred and len(out) < int(offset, 16):
            out += out[-16:]
        starred = False
        assert len(out) == int(offset, 16)
        out += bytes.fromhex(rest)
    return out


def test_examples_in_the_document() -> None:
    text = (TESTS.parent / "docs" / "FORMAT.md").read_text("utf-8")
    examples = {name: undump(dump) for name, dump in re.findall(r"```hex (\w+)\n(.*?)```", text, re.S)}
    assert sorted(examples) == sorted([*ref.FORMATS, "delta", "version2"])
    assert examples["version2"] == DELTA_GOOD["example"]
    sums = [f"{delta_ref.checksum(x, 'bfloat16', 1):016x}" for x in (make.DELTA_BASE, make.DELTA_NEW)]
    assert f"the checksum was\n{sums[0]} and is {sums[1]}." in text
    for fmt in ref.FORMATS[1:]:
        assert examples[fmt] == ref.encode(fmt, "float32", make.EXAMPLE)
        assert ref.decode(examples[fmt], "set", make.pattern(1200), "float32") == make.EXAMPLE
    assert examples["empty"] == ref.encode("empty", "float32", bytes(1200))
    assert examples["delta"] == ref.encode("coo", "float32", make.EXAMPLE_NEW, make.EXAMPLE_BASE)
    assert ref.decode(examples["delta"], "overwrite", make.EXAMPLE_BASE, "float32") == make.EXAMPLE_NEW


def test_add_rounds_once_to_even() -> None:
    def bf16(a: int, b: int) -> int:
        return int.from_bytes(ref.add(a.to_bytes(2, "little"), b.to_bytes(2, "little"), "bfloat16"), "little")

    assert bf16(0x3F80, 0x3B80) == 0x3F80  # 1 + 2^-8 ties down to even
    assert bf16(0x3F81, 0x3B80) == 0x3F82  # (1 + 2^-7) + 2^-8 ties up to even
    assert ref.add(b"\xff\x7b", b"\xff\x7b", "float16") == b"\x00\x7c"  # 65504 + 65504 is infinity
    assert ref.add(b"\xff", b"\x02", "uint8") == b"\x01"
