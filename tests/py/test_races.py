"""bench/races.py: which races of a racecheck report matter."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "csrc/kernels/ptx.cuh"
SUMMARY = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"


def line_of(text: str) -> int:
    """The number of the line of ptx.cuh that holds `text`."""
    return next(n for n, line in enumerate(HEADER.read_text().splitlines(), 1) if text in line)


STORE, LOAD = line_of("st.release.cta.shared"), line_of("ld.acquire.cta.shared")


def race(*places: str) -> str:
    kernel = "void sp_reduce_kernel<(int)1>(sp_fused_args)"
    lines = [f"========= Error: Race reported between Write access at {kernel}+0x5e740{places[0]}"]
    lines += [f"=========     and Read access at {kernel}+0x5f970{place} [16 hazards]" for place in places[1:]]
    return "\n".join(lines)


def judged(*report: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "bench/races.py", HEADER],
        input="\n".join(report),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_flags_between_warps_are_left_out() -> None:
    flags = race(f" in /x/csrc/kernels/ptx.cuh:{STORE}", f" in /x/csrc/kernels/ptx.cuh:{LOAD}")
    assert judged(flags, flags, SUMMARY) == (
        0,
        "races: 2 reported, 2 of flags between warps, 0 that matter\n",
    )
    assert judged("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")[0] == 0


@pytest.mark.parametrize(
    "places",
    [
        (f" in ptx.cuh:{STORE}", " in decode.cuh:12"),  # one side is data
        (f" in ptx.cuh:{STORE}", f" in ptx.cuh:{LOAD}", " in slice.cuh:9"),  # of three accesses one is
        (f" in ptx.cuh:{STORE}", " in ptx.cuh:1"),  # another place of the same header
        (f" in ptx.cuh:{STORE}", f" in other.cuh:{LOAD}"),
        ("", ""),  # no lines: who knows
        (f" in ptx.cuh:{STORE}",),  # cut short
    ],
)
def test_other_races_matter(places: tuple[str, ...]) -> None:
    status, told = judged(race(*places), SUMMARY)
    assert status == 1 and told.endswith("races: 1 reported, 0 of flags between warps, 1 that matter\n")


def test_half_a_report_is_no_pass() -> None:
    assert judged(race(f" in ptx.cuh:{STORE}", f" in ptx.cuh:{LOAD}"))[0] == 1
    assert judged("========= Warning: Maximum number of hazards reached.", SUMMARY)[0] == 1
