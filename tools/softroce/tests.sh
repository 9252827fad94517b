#!/bin/sh
# The tests of transport ib, over the devices rxe0 and rxe1. PROGRAMS, from the host, is the folder of the programs.
. /run/softroce/settings
cd "$PROGRAMS" || exit 96
export SPCCL_LOG=error
failed=0
try() {
  echo "==== $*"
  timeout 180 "$@" || { echo "FAILED with $?: $*"; failed=1; }
}
try ./ib_transport
try ./ib_transport_faults
try ./ib_transport_forks
try ./ib_collectives
# A lost packet is sent again after 0.27 s, in place of 1.07 s.
export SPCCL_IB_TIMEOUT=16
try ./ib_peers '' va
echo "==== 1% of the packets are lost"
tc qdisc add dev va root netem loss 1% && tc qdisc add dev vb root netem loss 1% || failed=1
try ./ib_transport exchange
try ./ib_collectives random
echo "retransmissions: $(cat /sys/class/infiniband/rxe0/ports/1/hw_counters/completer_retry_err)" \
  "sequence errors: $(cat /sys/class/infiniband/rxe1/ports/1/hw_counters/out_of_seq_request)"
exit $failed
