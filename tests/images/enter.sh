#!/usr/bin/env bash
# Makes a folder the root of this mount namespace, starts dockerd there, and runs a command: enter.sh ROOT COMMAND...
# A chroot is not enough: containers that `docker exec` enters would see the outer root.
set -euo pipefail
root="$1"
shift
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mountpoint -q sys/fs/cgroup || mount -t cgroup2 cgroup2 sys/fs/cgroup
mkdir -p old
pivot_root . old
cd /
umount --lazy /old
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
options=(--storage-driver overlay2 --log-level warn)
if [[ $(ip -o link | wc -l) -gt 1 ]]; then
    options+=(--iptables=false --ip6tables=false --bridge=none)
else
    ip link set lo up
fi
dockerd "${options[@]}" > /work/dockerd.log 2>&1 &
for _ in $(seq 60); do
    docker info > /dev/null 2>&1 && break
    sleep 1
done
docker info > /dev/null || { tail -n 20 /work/dockerd.log >&2; exit 1; }
cd /work
"$@"
