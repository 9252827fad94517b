#!/usr/bin/env bash
# Every number of the README and of docs/PERFORMANCE.md, in one call: CSVs into OUT (default bench/results).
#   bench/run.sh NAME [OUT]       NAME names the machine in the files: bench/run.sh epyc-2c
# PYTHON, PREFIX and CODEC override what is run: PREFIX="taskset -c 0,1" pins everything to two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
name=$1
out=${2:-bench/results}
python=${PYTHON:-.venv/bin/python}
codec=${CODEC:-build/gcc/bench/micro/spccl_bench_codec}
prefix=${PREFIX:-}
mkdir -p "$out"
export OMP_NUM_THREADS=1
for ranks in 2 4; do
    $prefix "$python" -m spccl bench --via torch --ranks "$ranks" --min 64M --max 64M --sparsity 0.99,0.9,0.5,0 \
        --collective all_gather,reduce_scatter,all_reduce --iters 15 --csv "$out/$name-cpu-$ranks-ranks-64MiB.csv"
    $prefix "$python" -m spccl bench --via torch --ranks "$ranks" --min 4K --max 1M --factor 16 --sparsity 0.99,0 \
        --collective all_reduce --iters 100 --csv "$out/$name-cpu-$ranks-ranks-small.csv"
done
$prefix "$codec" --csv "$out/$name-codec.csv"
