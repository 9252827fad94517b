#!/usr/bin/env bash
# Compares GPU collectives between hosts with NCCL over sockets, on one machine: the ranks count as on different hosts,
# and all that goes between these passes TCP on loopback, NCCL's data too.
#   bench/between_hosts.sh [RANKS [RANKS_PER_HOST [ARGUMENTS OF spccl bench...]]]      default: 4 1
#   bench/between_hosts.sh RANKS RANKS_PER_HOST -- PROGRAM.py [ARGUMENTS...]           that program, for example
#       examples/gpt2/measure.py --size xl --variant graph --modes tuned,pruned --csv gpt2-between-hosts.csv
# Needs an installed spccl with CUDA, torch and as many GPUs as ranks. With RANKS_PER_HOST above 1, both use NVLink inside
# a host.
# SPCCL_TRANSPORTS=ncclnet with SPCCL_NET_PLUGIN, or SPCCL_TRANSPORTS=ib, puts spccl on another network than tcp.
# SPCCL_TEST_SHARE_GPUS=1: with fewer GPUs than ranks these share them. Start `nvidia-cuda-mps-control -d` before: else
# the GPU runs one rank's kernels at a time, and every message waits for a time slice.
# CSV: bench/results/gpu/between-hosts-RANKS-RANKS_PER_HOST.csv (OUT: another folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${1:-4} per_host=${2:-1}
shift $(($# < 2 ? $# : 2))
out=${OUT:-bench/results/gpu}
mkdir -p "$out"
export SPCCL_CUDA_ROUTE=spccl PER_HOST=$per_host SHARE=${SPCCL_TEST_SHARE_GPUS:-0}
export NCCL_NET=Socket NCCL_NVLS_ENABLE=0
((per_host > 1)) || export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
# Threads and sockets of NCCL, tuned for one machine: at most 64 in all per pair.
export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4} NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4}
if [[ ${1:-} == -- ]]; then
    shift
else
    (($# > 0)) || set -- --sizes 4K,64M,512M --sparsity 0,90%,99%
    set -- -m spccl bench --device cuda "$@" --csv "$out/between-hosts-$ranks-$per_host.csv"
fi
exec torchrun --nproc-per-node "$ranks" --no-python bash -c \
    'export SPCCL_HOST_ID="host $((RANK / PER_HOST))"
     ((PER_HOST == 1)) || export NCCL_HOSTID="$SPCCL_HOST_ID"
     ((SHARE == 0)) || export NCCL_HOSTID="rank $RANK" # NCCL refuses two ranks on one GPU of one host
     exec python3 "$@"' python "$@"
