"""Read a racecheck report of compute-sanitizer from stdin; exit with status 1 if it contains a race that matters.

    compute-sanitizer --tool racecheck --print-limit 100000 PROGRAM | python bench/races.py csrc/kernels/cuda/ptx.cuh

The warps of a CTA synchronize by words in shared memory that are written with release and read with acquire. racecheck
knows only barriers, so it reports each such word as a race. This program ignores a race between a write and a read if
both are in the functions for such words. Two writes count as a race, as only one warp writes each word. Races on the
data that the words guard are still found. The code must be compiled with -lineinfo: a race without line numbers
counts. A report that is cut short, or has an unknown form, gives status 1.
"""

import re
import sys
from pathlib import Path

FLAG_FUNCTIONS = ("sp_store_release_cta", "sp_load_acquire_cta")
ACCESS = re.compile(r"(?:between|and) (?P<what>Read|Write) access at (?P<where>.+?)(?: \[\d+ hazards?\])?\s*$")
PLACE = re.compile(r" in (?P<file>[^ ]+):(?P<line>\d+)")
REPORTED = re.compile(r"Race reported between")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
Access = tuple[str, str]  # "Read" or "Write"; where it is


def flag_lines(header: Path) -> set[int]:
    """Line numbers of FLAG_FUNCTIONS in the header."""
    lines, inside = set(), False
    for number, text in enumerate(header.read_text().splitlines(), 1):
        inside = inside or any(f" {name}(" in text for name in FLAG_FUNCTIONS)
        if inside:
            lines.add(number)
        inside = inside and text != "}"
    if not lines:
        raise SystemExit(f"races: {header} has none of {', '.join(FLAG_FUNCTIONS)}")
    return lines


def is_flag(race: list[Access], header: Path, lines: set[int]) -> bool:
    places = [PLACE.search(where) for _, where in race]
    in_flags = all(p and Path(p["file"]).name == header.name and int(p["line"]) in lines for p in places)
    return in_flags and len(race) > 1 and all(what != race[0][0] for what, _ in race[1:])


def races(report: list[str]) -> list[list[Access]]:
    """The accesses of each race: the first one, then those that it conflicts with."""
    found: list[list[Access]] = []
    for text in report:
        access = ACCESS.search(text)
        if REPORTED.search(text):
            found.append([])
        if access and found:
            found[-1].append((access["what"], access["where"]))
    return found


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    header = Path(sys.argv[1])
    lines = flag_lines(header)
    report = sys.stdin.read().splitlines()
    summaries = [SUMMARY.search(text) for text in report if "RACECHECK SUMMARY" in text]
    if not summaries or None in summaries:
        print("races: the report has no summary, or one of unknown form: did racecheck end?")
        return 1
    if any("Maximum number of hazards" in text for text in report):
        print("races: racecheck left out some hazards: raise NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS")
        return 1
    found = races(report)
    shown = sum(int(s[1]) for s in summaries if s)
    seen = sum(int(s[2]) + int(s[3]) for s in summaries if s)
    if not shown == seen == len(found):
        print(f"races: racecheck found {seen}, displayed {shown}, {len(found)} were read here: raise --print-limit")
        return 1
    bad = [race for race in found if not is_flag(race, header, lines)]
    for race in bad[:20]:
        print("races: " + " | ".join(f"{what} at {where}" for what, where in race))
    print(f"races: {len(found)} reported, {len(found) - len(bad)} of flags between warps, {len(bad)} that matter")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
