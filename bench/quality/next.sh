#!/bin/bash
# The runs with local steps, 2.45% and raw gradients, on one GPU, in pieces of less than 9 minutes. Run it again until it says
# "the queue is done". What is left goes on from $QUALITY_STATE, with the same bits; the CSV is copied to $OUT as well.
#
#   bash bench/quality/next.sh                                        a piece on a GPU
#   QUALITY_SECONDS=20 bash bench/quality/next.sh --size tiny --steps 64 --evaluate-every 16 --text-mb 2    on a CPU
set -u
here=$(dirname "$0")
state=${QUALITY_STATE:-/tmp/quality}
mkdir -p "$state"
"${PYTHON:-python3}" "$here/run.py" --recipes "$here/recipes.txt" --out "$state/quality.csv" \
    --checkpoints "$state/checkpoints" --text-cache "$state/text.pt" --seconds "${QUALITY_SECONDS:-450}" \
    --only "${QUALITY_ONLY:-$(grep -o '^H16[^:]*\|^top 2.4%\|^raw[^:]*' "$here/recipes.txt" | paste -sd,)}" "$@"
status=$?
[ -z "${OUT:-}" ] || cp "$state/quality.csv" "$OUT/"
exit $status
