"""Judge a racecheck report of compute-sanitizer, read from stdin: exit status 1 if it holds a race that matters.

    compute-sanitizer --tool racecheck PROGRAM | python bench/races.py csrc/kernels/ptx.cuh

The warps of a block talk through words on chip that are written with release and read with acquire. racecheck knows
barriers only and reports each such word; what they guard it does not miss. So a race is left out if both of its
accesses lie in the functions that do this. Wants code compiled with -lineinfo: a race without lines counts.
"""

import re
import sys
from pathlib import Path

FLAG_FUNCTIONS = ("sp_store_release_cta", "sp_load_acquire_cta")
ACCESS = re.compile(r"(?:between|and) (?P<what>Read|Write) access at (?P<where>.+?)(?: \[\d+ hazards?\])?\s*$")
PLACE = re.compile(r" in (?P<file>[^ ]+):(?P<line>\d+)")
REPORTED = re.compile(r"Race reported between|hazard detected", re.IGNORECASE)


def flag_lines(header: Path) -> set[int]:
    """Lines of the bodies of FLAG_FUNCTIONS."""
    lines, inside = set(), False
    for number, text in enumerate(header.read_text().splitlines(), 1):
        inside = inside or any(f" {name}(" in text for name in FLAG_FUNCTIONS)
        if inside:
            lines.add(number)
        inside = inside and text != "}"
    if not lines:
        raise SystemExit(f"races: {header} has none of {', '.join(FLAG_FUNCTIONS)}")
    return lines


def is_flag(where: str, header: Path, lines: set[int]) -> bool:
    place = PLACE.search(where)
    return bool(place) and Path(place["file"]).name == header.name and int(place["line"]) in lines


def races(report: list[str]) -> list[list[str]]:
    """The accesses of each race: one or more lines after the one that says so."""
    found: list[list[str]] = []
    for text in report:
        access = ACCESS.search(text)
        if REPORTED.search(text):
            found.append([])
        if access and found:
            found[-1].append(access["where"])
    return found


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    header = Path(sys.argv[1])
    lines = flag_lines(header)
    report = sys.stdin.read().splitlines()
    if not any("RACECHECK SUMMARY" in text for text in report):
        print("races: no summary in the report: racecheck did not end")
        return 1
    if any("Maximum number of hazards" in text for text in report):
        print("races: racecheck left some out: raise NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS")
        return 1
    found = races(report)
    bad = [race for race in found if len(race) < 2 or not all(is_flag(where, header, lines) for where in race)]
    for race in bad[:20]:
        print("races: " + " | ".join(race or ["a race without accesses"]))
    print(f"races: {len(found)} reported, {len(found) - len(bad)} of flags between warps, {len(bad)} that matter")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
