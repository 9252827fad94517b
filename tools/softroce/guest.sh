#!/bin/sh
# Runs in the guest: two software RoCE devices, then tests.sh. The host reads the last line: SOFTROCE_RC=<status>.
# Device rxe0 is on interface va (10.77.0.1), rxe1 on vb (10.77.0.2), and a pair of virtual cables joins the two.
# rxe of Linux 6.1 knows only the first network namespace, so both are in it.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
umask 022
mkdir -p /tmp
end() {
  echo "SOFTROCE_RC=$1"
  /bin/busybox poweroff -f
}
{
  ip link set lo up &&
  ip link add va mtu 9000 type veth peer name vb mtu 9000 &&
  ip addr add 10.77.0.1/24 dev va && ip addr add 10.77.0.2/24 dev vb &&
  ip link set va up && ip link set vb up &&
  echo 1 > /proc/sys/net/ipv4/conf/all/accept_local &&
  echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter &&
  rdma link add rxe0 type rxe netdev va && rdma link add rxe1 type rxe netdev vb
} || end 97
mkdir -p /dev/infiniband
for u in /sys/class/infiniband_verbs/uverbs*; do
  [ -e "/dev/infiniband/${u##*/}" ] || mknod "/dev/infiniband/${u##*/}" c $(tr : ' ' < "$u/dev")
done
chmod 666 /dev/infiniband/uverbs*
ulimit -l unlimited
echo SOFTROCE_UP
/bin/sh /run/softroce/tests.sh
end $?
