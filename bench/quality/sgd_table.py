"""Reads what gpu_sgd.sh wrote: the best learning rate of each setting, or the differences to dense.

    python bench/quality/sgd_table.py --best quality-sgd-4-ranks.csv    names of recipes, with commas between them
    python bench/quality/sgd_table.py quality-sgd-*-ranks.csv           a line per file and setting
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from pathlib import Path

TUNING_SEED = 9
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # of Student's t, by the number of seeds


def last_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [row for row in rows if row["step"] == row["steps"]]


def best(path: Path) -> dict[str, str]:
    """Name of the recipe with the least loss of the tuning seed, by setting (the name before its last comma)."""
    found: dict[str, tuple[float, str]] = {}
    for row in last_rows(path):
        loss = float(row["loss"])
        if int(row["seed"]) == TUNING_SEED and math.isfinite(loss):
            setting = row["name"].rpartition(", ")[0]
            found[setting] = min(found.get(setting, (math.inf, "")), (loss, row["name"]))
    return {setting: name for setting, (_, name) in found.items()}


def table(path: Path) -> None:
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    saving = {}
    for row in last_rows(path):
        if int(row["seed"]) != TUNING_SEED:
            losses[row["name"]][row["seed"]], saving[row["name"]] = float(row["loss"]), row["saving"]
    chosen = best(path)
    dense = losses[chosen["dense"]]
    for name in chosen.values():
        more = [loss - dense[seed] for seed, loss in losses[name].items() if seed in dense]
        if len(more) < 2:
            print(f"{path.name}: {name}: {len(more)} seeds, wanted at least 2")
            continue
        half = T_95[len(more)] * statistics.stdev(more) / math.sqrt(len(more))
        mean = statistics.mean(losses[name].values())
        print(f"{path.name}: {name}: loss {mean:.4f}, {statistics.mean(more):+.4f} +- {half:.4f} to dense, "
              f"{len(more)} seeds, saving {saving[name]}")  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", type=Path)
    p.add_argument("--best", action="store_true", help="of one file")
    args = p.parse_args()
    if args.best:
        print(",".join(best(args.files[0]).values()))
        return
    for path in args.files:
        table(path)


if __name__ == "__main__":
    main()
