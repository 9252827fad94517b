#!/bin/bash
# The recipes for 16 pruning ranks on one GPU, then dense and one bit on 4 ranks, same global batch. Each row of the CSVs is
# written to $OUT (default: .) when it is measured. No run is started that would not end within LIMIT_S seconds.
#   bash bench/quality/gpu_16.sh                                                                         540 s on a GPU
#   LIMIT_S=300 bash bench/quality/gpu_16.sh --size tiny --steps 64 --evaluate-every 32 --text-mb 2      on a CPU
# ONLY_16, ONLY_4: names of recipes with commas between them. RESERVE_4: seconds kept for 4 ranks.
set -u
here=$(dirname "$0")
state=${QUALITY_STATE:-/tmp/quality}
mkdir -p "$state"
out=${OUT:-.} limit=${LIMIT_S:-540} reserve=${RESERVE_4:-130} status=0
export PYTHONUNBUFFERED=1
queue() { # RANKS WINDOWS SECONDS RUN_SECONDS NAMES [OPTIONS]
    local ranks=$1 windows=$2 seconds=$3 run_seconds=$4 names=$5
    shift 5
    "${PYTHON:-python3}" "$here/run.py" --recipes "$here/recipes-16-ranks.txt" --only "$names" --steps 2000 \
        --evaluate-every 500 --workers "$ranks" --batch "$windows" --seconds "$seconds" --run-seconds "$run_seconds" \
        --text-cache "$state/text.pt" --out "$out/quality-25m-$ranks-ranks.csv" "$@" || status=$?
}
queue 16 2 "$((limit - reserve))" 0 "${ONLY_16:-}" "$@"
queue 4 8 "$((limit - SECONDS))" 50 "${ONLY_4:-one bit,dense}" "$@"
exit $status
