#!/bin/bash
# SGD of a small GPT, dense and pruned, on 4, 16 and 32 ranks with the same global batch, on one GPU. A seed of its own chooses
# each learning rate; then four seeds give the difference to dense with its 95% interval. CSVs go to $OUT (default: .).
#   bash bench/quality/gpu_sgd.sh                                       540 s on a GPU
#   bash bench/quality/gpu_sgd.sh --size tiny --steps 64 --text-mb 2    on a CPU
# RANKS: numbers of ranks with spaces between them. LIMIT_S: seconds, after which nothing is started.
set -u
here=$(dirname "$0")
state=${QUALITY_STATE:-/tmp/quality}
mkdir -p "$state"
out=${OUT:-.} limit=${LIMIT_S:-540} status=0
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
queue() { # RANKS SEEDS NAMES [OPTIONS]
    "$python" "$here/run.py" --recipes "$here/recipes-sgd.txt" --size half --steps 1000 --evaluate-every 500 --workers "$1" \
        --batch $((32 / $1)) --seeds "$2" --only "$3" --at-once 6 --seconds $((limit - SECONDS)) \
        --text-cache "$state/text.pt" --out "$out/quality-sgd-$1-ranks.csv" "${@:4}" || status=$?
}
for ranks in ${RANKS:-4 16 32}; do
    [[ $ranks -gt 32 ]] && { echo "gpu_sgd.sh: RANKS: $ranks, wanted at most 32, the global batch" >&2; exit 2; }
    queue "$ranks" 9 "" "$@"
    best=$("$python" "$here/sgd_table.py" --best "$out/quality-sgd-$ranks-ranks.csv") && queue "$ranks" 0,1,2,3 "$best" "$@"
done
"$python" "$here/sgd_table.py" "$out"/quality-sgd-*-ranks.csv
exit $status
