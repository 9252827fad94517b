#!/usr/bin/env bash
# Builds spccl on a machine with GPUs and runs stages there. Needs CUDA 12+ (nvcc), gcc, cmake, ninja, and python3 with
# torch for CUDA, pytest, click and rich. Downloads and installs nothing: the package is in BUILD/site, on PYTHONPATH.
#   bench/gpu.sh [OPTIONS] STAGE...
# Stages. Each has a time limit; a stage that fails does not stop the others:
#   ctest     the C tests                           sanitize  tests/c/test_cuda_* under compute-sanitizer
#   pytest    pytest -m gpu tests/gpu               bench     spccl bench --device cuda
#   soak      tests/gpu/soak.py                     figure    spccl plot of the bench's CSV
#   verify    spccl verify --device cuda            micro     rates of memory and links; bench/micro/*.cu
#   delta     deltas of 14 GB of weights on one GPU
#   pruned    a captured DDP step, then bench/ddp_exchange.py: dense, pruned, momentum in 5 turns, with memory
#   hosts     a step of GPT-2 XL, half of the GPUs as one host, half as another, TCP between them: pruned, dense
#   weights   deltas of 14 GB of weights from one GPU to the others, against NCCL's broadcast of all
#   packets   all-reduces of 1 to 64 KiB with packets, against NCCL: on 2, 4 or 8 GPUs
# Options:
#   --gpus G        how many, but for pytest (def.: all)   --minutes N   length of the soak (default 1)
#   --seconds S     budget of the bench (default 180)      --limit S     limit of every stage, in place of its own
#   --only WORDS    pytest -k WORDS                        --bench ARGS  more arguments for spccl bench, as in
#     --bench "--codec --dtype float32,bfloat16 --sizes 16M,64M,512M,2048M --sparsity 0,50%,90%,99%,99.9%"
# Environment: OUT (folder of logs and CSVs, default bench/results/gpu; at most 8 files), BUILD (default build-gpu),
#   ARCHS (default 90-real), PYTHON, SPCCL_COMMIT (the commit, where there is no git).
# Exit status: 0 if all stages passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
python=${PYTHON:-python3}
build=$(realpath -m "${BUILD:-build-gpu}")
site=$build/site
out=$(realpath -m "${OUT:-bench/results/gpu}")
gpus= minutes=1 seconds=180 limit= only= bench_args=
stages=()

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit "$1"
}

while (($#)); do
    case $1 in
    --gpus | --minutes | --seconds | --limit | --only | --bench)
        (($# > 1)) || { echo "gpu.sh: $1 needs a value" >&2; exit 2; }
        name=${1#--}
        [[ $name == bench ]] && name=bench_args
        printf -v "$name" %s "$2"
        shift 2
        ;;
    ctest | sanitize | pytest | bench | soak | figure | verify | micro | delta | pruned | hosts | weights | packets) stages+=("$1") && shift ;;
    -h | --help) usage 0 ;;
    *) echo "gpu.sh: $1: unknown stage or option" >&2; usage 2 >&2 ;;
    esac
done
((${#stages[@]})) || usage 2 >&2
tests=OFF # C tests and micro-benchmarks, for the stages that need them
[[ " ${stages[*]} " =~ \ (ctest|sanitize|micro|delta)\  ]] && tests=ON
mkdir -p "$out" "$build"
if [[ -z ${SPCCL_COMMIT:-} ]]; then
    SPCCL_COMMIT=$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null) || SPCCL_COMMIT=unknown
fi
export SPCCL_COMMIT

# ---- stages: each prints to its log; `note` picks the line for the table ----

run_build() {
    local version
    cmake -S . -B "$build" -G Ninja -DSPCCL_BUILD_PYTHON=ON -DSPCCL_PREBUILD_TORCH=ON -DSPCCL_CUDA=ON \
        -DSPCCL_BUILD_TESTS=$tests -DSPCCL_CUDA_ARCHS="${ARCHS:-90-real}" -DCMAKE_CUDA_FLAGS=-lineinfo \
        -DPython_EXECUTABLE="$(command -v "$python")" &&
        cmake --build "$build" -j "$(nproc)" || return 1
    rm -rf "$site" && cmake --install "$build" --prefix "$site" && cp -r python/spccl/* "$site/spccl/" || return 1
    version=$(sed -n 's/^#define SPCCL_VERSION_TEXT "\(.*\)"$/\1/p' csrc/spccl.h)
    mkdir -p "$site/spccl-$version.dist-info" || return 1
    printf 'Metadata-Version: 2.1\nName: spccl\nVersion: %s\n' "$version" >"$site/spccl-$version.dist-info/METADATA"
    printf '[torch.backends]\nspccl = spccl.backend:autoload\n' >"$site/spccl-$version.dist-info/entry_points.txt"
    PYTHONPATH=$site "$python" -c '
import torch, torch.distributed as dist, spccl
from spccl import _torch_glue
assert "SPCCL" in dist.Backend._plugins, "torch did not load the entry point torch.backends"
print(_torch_glue.load())
print(f"spccl {spccl.__version__}, torch {torch.__version__}, {torch.cuda.device_count()} GPUs")'
}

run_ctest() {
    ctest --test-dir "$build" -j "$(($(nproc) / 4 + 1))" --output-on-failure --no-tests=error
}

run_sanitize() {
    local failed=0 found=0 program tool
    for program in "$build"/tests/c/test_cuda_*; do
        [[ -f $program && -x $program ]] || continue
        found=1
        for tool in memcheck racecheck; do
            local name part="$build/sanitize.part" status
            name=$(basename "$program")
            # This test makes frames that list an element twice: a race, but the result is refused.
            [[ $tool == racecheck && $name == test_cuda_hostile ]] && continue
            echo "==== $tool $name"
            # Each program has a limit, so that one that hangs does not take the time of the others.
            timeout --foreground -k 5 150 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 100000 \
                --target-processes all "$program" --small >"$part" 2>&1
            status=$?
            if [[ $tool == racecheck && $status == 9 ]]; then
                "$python" bench/races.py csrc/kernels/cuda/ptx.cuh <"$part" && status=0
            fi
            if ((status != 0)); then # print the end of the test's output and the first errors
                grep -vE '^=====' "$part" | tail -n 40 | cut -c1-400
                grep -E '^=====' "$part" | sed -n '1,60p' | cut -c1-400
            fi
            tail -n 4 "$part" | cut -c1-400
            # 77 means that the test skipped itself, which counts as a failure here
            if ((status != 0)); then
                echo "FAILED $tool $name: exit status $status"
                failed=1
            fi
        done
    done
    ((found)) || echo "FAILED: no program $build/tests/c/test_cuda_*"
    ((found && !failed))
}

run_pytest() {
    # If every test were skipped, the stage would pass: check for a GPU first.
    "$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU")' || return 1
    "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider --tb=short ${only:+-k "$only"}
}

run_bench() {
    # shellcheck disable=SC2086  # bench_args holds several words
    "$python" -m spccl bench --device cuda ${gpus:+--ranks "$gpus"} --seconds "$seconds" --timeout "$1" \
        --csv "$out/bench.csv" --codec-csv "$out/codec.csv" $bench_args
}

run_micro() {
    "$build/bench/micro/spccl_bench_hbm" --csv "$out/hbm.csv" &&
        "$build/bench/micro/spccl_bench_fused" && "$build/bench/micro/spccl_bench_fused" --dtype bfloat16
}

run_delta() {
    "$build/bench/micro/spccl_bench_delta_cuda" --csv "$out/delta.csv" &&
        "$build/bench/micro/spccl_bench_delta_apply_cuda"
}

n_gpus() {
    echo "${gpus:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}"
}

# Both parts run even if the first fails. With the build this fits into 10 minutes.
run_pruned() {
    local failed=0
    timeout 120 "$python" -m pytest -m gpu tests/gpu/test_gpu_pruned.py -k ddp_step_in_a_graph -rs -p no:cacheprovider \
        --tb=short || failed=1
    timeout 150 "$python" -m torch.distributed.run --standalone --nproc-per-node "$(n_gpus)" bench/ddp_exchange.py \
        dense,pruned,pruned:32,momentum,momentum:32 --rounds 5 || failed=1
    return "$failed"
}

run_hosts() {
    local n per_host
    n=$(n_gpus) && ((n >= 4 && n % 2 == 0)) || { echo "wanted an even number of GPUs, 4 or more; got $n"; return 1; }
    per_host=$((n / 2))
    OUT=$out bash bench/between_hosts.sh "$n" "$per_host" -- examples/gpt2/measure.py --size xl --variant graph \
        --modes tuned,pruned --buckets 128,512 --rounds 3 --prune-rounds 1 --csv "$out/gpt2-between-hosts.csv"
}

run_weights() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$(n_gpus)" bench/weight_sync_gpu.py \
        --csv "$out/weights.csv"
}

run_packets() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$(n_gpus)" bench/packets.py \
        --csv "$out/packets.csv"
}

run_verify() {
    "$python" -m spccl verify --device cuda ${gpus:+--ranks "$gpus"}
}

run_soak() {
    "$python" tests/gpu/soak.py --minutes "$minutes" --gpus "$(n_gpus)"
}

run_figure() {
    "$python" -m spccl plot "$out/bench.csv" -o "$out/gpu-speedup.png"
}

# ---- running the stages ----

own_limit() {
    case $1 in
    build) echo 300 ;;
    ctest | sanitize) echo 400 ;;
    pytest) echo 560 ;;
    bench) echo $((${seconds%.*} + 90)) ;;
    soak) "$python" -c "print(int(60 * $minutes) + 240)" ;;
    figure) echo 60 ;;
    verify) echo 300 ;;
    micro) echo 60 ;;
    delta) echo 240 ;;
    pruned) echo 290 ;;
    hosts | weights) echo 240 ;;
    packets) echo 120 ;;
    esac
}

# One line about a stage, from its log.
note() {
    case $1 in
    ctest) grep -E 'tests passed' "$2" | tail -1 ;;
    sanitize) grep -cE '^====' "$2" | sed 's/$/ runs/'; grep -E '^FAILED' "$2" | head -3 | tr '\n' ';' ;;
    pytest) grep -E '(passed|failed|skipped|error).* in ' "$2" | tail -1 | tr -d '=' ;;
    pruned) grep -E '^round .*(dense|pruned), ' "$2" | tail -2 | cut -c1-95 | tr '\n' ';' ;;
    delta) grep -E '^(encode|base update) .* 1\.00%' "$2" | sed -E 's/ +/ /g' | tr '\n' ';' ;;
    weights) grep ' ms (' "$2" | sed -E 's/ +/ /g' | tr '\n' ';' ;;
    packets) grep -E '^ *(1024|65536) B, graph' "$2" | sed -E 's/ \(.*//; s/, graph,//; s/ +/ /g' | tr '\n' ';' ;;
    micro) grep 'GB/s' "$2" | sed -E 's/ +[0-9.]+ us +/ /' | tr '\n' ';' ;;
    *) tail -1 "$2" ;;
    esac | tr '\n' ' ' | cut -c1-200
}

table=()
status_of_all=0
run_stage() {
    local stage=$1 log="$out/$1.log" seconds_limit=${limit:-$(own_limit "$1")} start=$SECONDS status outcome
    echo "==== $stage (at most $seconds_limit s)"
    (
        # In a new shell, so that `timeout` covers functions and ends the whole process group.
        export -f "run_$stage" n_gpus
        export python build site out gpus minutes seconds only bench_args tests
        [[ $stage == build ]] || export PYTHONPATH=$site
        exec timeout -k 15 "$seconds_limit" bash -uo pipefail -c 'run_"$0" "$1"' "$stage" "$((seconds_limit > 30 ? seconds_limit - 15 : seconds_limit))"
    ) >"$log" 2>&1 </dev/null
    status=$?
    outcome=passed
    if ((status != 0)); then
        outcome=FAILED
        ((status == 124 || status == 137)) && outcome="TIMED OUT"
        status_of_all=1
        echo "---- $stage: exit status $status; $log ends:"
        tail -n 40 "$log" | cut -c1-300 | tail -c 3500
    fi
    table+=("$(printf '%-9s %-9s %5d s  %s' "$stage" "$outcome" "$((SECONDS - start))" "$(note "$stage" "$log")")")
    return "$status"
}

if run_stage build; then
    for stage in "${stages[@]}"; do
        run_stage "$stage"
    done
fi
echo
printf '%s\n' "commit $SPCCL_COMMIT" "${table[@]}"
if [[ " ${stages[*]} " == *" bench "* && -f $out/bench.log ]]; then
    echo
    sed -n '/^# summary/,$p' "$out/bench.log"
fi
# Some ways to copy results from a machine take few files, so join the logs.
if (($(find "$out" -type f | wc -l) > 8)); then
    for log in "$out"/*.log; do
        printf '######## %s\n' "$(basename "$log")" && cat "$log"
    done >"$out/logs.txt" && rm "$out"/*.log
fi
exit "$status_of_all"
