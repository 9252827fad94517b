#!/bin/sh
# The tests of transport ib, over the devices rxe0 and rxe1. PROGRAMS and GPU_PROGRAMS, from the host, are the folders of
# the programs; the second are built with the GPU in software.
. /run/softroce/settings
cd "$PROGRAMS" || exit 96
export SPCCL_LOG=error SPCCL_DEBUG_IB_RAILS=1
failed=0
try() {
  echo "==== $*"
  timeout 300 "$@" || { echo "FAILED with $?: $*"; failed=1; }
}
try ./ib_transport
try ./ib_transport_faults
try ./ib_transport_forks
try ./ib_collectives
try ./ib_put
try "$GPU_PROGRAMS/ib_cuda" --small
try "$GPU_PROGRAMS/ib_cuda_direct" --small
try ./ib_startup
try ./ib_next
# A lost packet is sent again after 0.27 s, in place of 1.07 s.
export SPCCL_DEBUG_IB_TIMEOUT=16
try ./ib_peers '' va
# More rails: two more pairs of virtual cables, with devices rxe2 (10.78.0.1), rxe3 (10.78.0.2), rxe4 and rxe5.
ip link add vc mtu 9000 type veth peer name vd mtu 9000 &&
  ip addr add 10.78.0.1/24 dev vc && ip addr add 10.78.0.2/24 dev vd && ip link set vc up && ip link set vd up &&
  rdma link add rxe2 type rxe netdev vc && rdma link add rxe3 type rxe netdev vd || failed=1
ip link add ve mtu 9000 type veth peer name vg mtu 9000 &&
  ip addr add 10.79.0.1/24 dev ve && ip addr add 10.79.0.2/24 dev vg && ip link set ve up && ip link set vg up &&
  rdma link add rxe4 type rxe netdev ve && rdma link add rxe5 type rxe netdev vg || failed=1
for u in /sys/class/infiniband_verbs/uverbs*; do
  [ -e "/dev/infiniband/${u##*/}" ] || mknod "/dev/infiniband/${u##*/}" c $(tr : ' ' < "$u/dev")
done
chmod 666 /dev/infiniband/uverbs*
try ./ib_peers rails vc
# Four rails, each from a device to itself.
try env SPCCL_DEBUG_IB_RAILS=4 ./ib_transport exchange
try env SPCCL_DEBUG_IB_RAILS=4 ./ib_put exchange
try env SPCCL_DEBUG_IB_RAILS=4 ./ib_collectives random
# Several queue pairs per device; with four devices all sixteen places of a ring are on queue pairs of their own.
try env SPCCL_DEBUG_IB_QPS=2 SPCCL_IB_DEVICE=rxe0,rxe1 ./ib_transport exchange
try env SPCCL_DEBUG_IB_QPS=4 SPCCL_DEBUG_IB_RAILS=4 ./ib_transport exchange
export SPCCL_IB_DEVICE=rxe0,rxe1
echo "==== 1% of the packets are lost"
tc qdisc add dev va root netem loss 1% && tc qdisc add dev vb root netem loss 1% || failed=1
try ./ib_transport exchange
try ./ib_collectives random
try env SPCCL_DEBUG_IB_QPS=4 ./ib_put few
echo "retransmissions: $(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/completer_retry_err)" \
  "sequence errors: $(cat /sys/class/infiniband/rxe1/ports/1/hw_counters/out_of_seq_request)"
exit $failed
