"""Tests which races of a racecheck report bench/races.py counts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "csrc/kernels/cuda/ptx.cuh"


def summary(shown: int, seen: int) -> str:
    words = "hazard" if shown == 1 else "hazards", "error" if seen == 1 else "errors"
    return f"========= RACECHECK SUMMARY: {shown} {words[0]} displayed ({seen} {words[1]}, 0 warnings)"


def line_of(text: str) -> int:
    """The number of the first line of ptx.cuh that contains `text`."""
    return next(n for n, line in enumerate(HEADER.read_text().splitlines(), 1) if text in line)


STORE, LOAD = line_of("st.release.cta.shared"), line_of("ld.acquire.cta.shared")


def race(*accesses: str, second: str = "Read") -> str:
    kernel = "void sp_reduce_kernel<(int)1>(sp_fused_args)"
    lines = [f"========= Error: Race reported between Write access at {kernel}+0x5e740{accesses[0]}"]
    lines += [f"=========     and {second} access at {kernel}+0x5f970{access} [16 hazards]" for access in accesses[1:]]
    return "\n".join(lines)


def judged(*report: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "bench/races.py", HEADER],
        input="\n".join(report),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout


def test_flags_between_warps_are_left_out() -> None:
    flags = race(f" in /x/csrc/kernels/cuda/ptx.cuh:{STORE}", f" in /x/csrc/kernels/cuda/ptx.cuh:{LOAD}")
    assert judged(flags, flags, summary(2, 2)) == (
        0,
        "races: 2 reported, 2 of flags between warps, 0 that matter\n",
    )
    assert judged(summary(0, 0))[0] == 0


@pytest.mark.parametrize(
    "accesses",
    [
        (f" in ptx.cuh:{STORE}", " in decode.cuh:12"),  # one access is to data
        (f" in ptx.cuh:{STORE}", f" in ptx.cuh:{LOAD}", " in slice.cuh:9"),  # one of three accesses is to data
        (f" in ptx.cuh:{STORE}", " in ptx.cuh:1"),  # another line of the same header
        (f" in ptx.cuh:{STORE}", f" in other.cuh:{LOAD}"),
        ("", ""),  # no line numbers
        (f" in ptx.cuh:{STORE}",),  # the second access is missing
    ],
)
def test_other_races_matter(accesses: tuple[str, ...]) -> None:
    status, output = judged(race(*accesses), summary(1, 1))
    assert status == 1 and output.endswith("races: 1 reported, 0 of flags between warps, 1 that matter\n")


def test_two_writers_of_a_flag_matter() -> None:
    both = race(f" in ptx.cuh:{STORE}", f" in ptx.cuh:{STORE}", second="Write")
    assert judged(both, summary(1, 1))[0] == 1


@pytest.mark.parametrize(
    "report",
    [
        [race(f" in ptx.cuh:{STORE}", f" in ptx.cuh:{LOAD}")],  # no summary
        [race(f" in ptx.cuh:{STORE}", f" in ptx.cuh:{LOAD}"), summary(1, 2)],  # a limit left out a race
        [summary(3, 3)],  # races in a form that is not known
        ["========= RACECHECK SUMMARY: fine"],
        ["========= Warning: Maximum number of hazards reached.", summary(0, 0)],
    ],
)
def test_half_a_report_is_no_pass(report: list[str]) -> None:
    assert judged(*report)[0] == 1
