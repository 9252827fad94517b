#!/bin/sh
# Rate of transport ib against ib_write_bw (Debian package perftest), five turns. One rail: from rxe0 to rxe1. Two rails:
# rxe0 and rxe2, each to itself, against two ib_write_bw at once. rxe computes packets on the processor that posts them:
# a rank posts both rails from one thread, so two ib_write_bw on one processor are measured too.
# Prints MB/s (1e6 bytes). Neither program touches the payload.
. /run/softroce/settings
cd "$PROGRAMS/../../bench/micro" || exit 96
export SPCCL_LOG=error
ip link add vc mtu 9000 type veth peer name vd mtu 9000 &&
  ip addr add 10.78.0.1/24 dev vc && ip link set vc up && ip link set vd up &&
  rdma link add rxe2 type rxe netdev vc || exit 95
for u in /sys/class/infiniband_verbs/uverbs*; do
  [ -e "/dev/infiniband/${u##*/}" ] || mknod "/dev/infiniband/${u##*/}" c $(tr : ' ' < "$u/dev")
done
chmod 666 /dev/infiniband/uverbs*

# write_bw SERVER CLIENT ADDRESS BYTES PORT: 50 MB. $on: a command before each ib_write_bw.
on=
write_bw() {
  n=$((50000000 / $4))
  timeout 100 $on ib_write_bw -d "$1" -s "$4" -n $n -F -p "$5" > /dev/null 2>&1 &
  sleep 2
  timeout 100 $on ib_write_bw -d "$2" -s "$4" -n $n -F -p "$5" "$3" 2>&1 |
    awk -v bytes="$4" '$1 == bytes { printf "%.1f\n", $4 * 1.048576 }'
  wait $!
}
# transport RAILS DEVICES: its rates of 64 and 256 KiB
transport() {
  SPCCL_DEBUG_IB_RAILS=$1 SPCCL_IB_DEVICE=$2 timeout 200 ./spccl_bench_transport --transport ib --megabytes 16 --untouched 1 2>&1
}
for turn in 1 2 3 4 5; do
  for bytes in 65536 262144; do
    echo "turn $turn: ib_write_bw, $bytes bytes: $(write_bw rxe0 rxe1 10.77.0.1 $bytes 18515) MB/s"
  done
  echo "turn $turn: transport ib, one rail, GB/s:"
  transport 1 rxe0,rxe1
  for on in "" "taskset 1"; do
    write_bw rxe0 rxe0 10.77.0.1 65536 18515 > /tmp/first &
    second=$(write_bw rxe2 rxe2 10.78.0.1 65536 18516)
    wait
    echo "turn $turn: two ib_write_bw at once ${on:+on one processor}, 65536 bytes: $(cat /tmp/first) and $second MB/s"
  done
  on=
  echo "turn $turn: transport ib, two rails, GB/s:"
  transport 2 rxe0,rxe2
done
