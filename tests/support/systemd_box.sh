#!/bin/bash
# Boots systemd as PID 1 over a private copy of the root file system. Run as root by systemd_box.py, in new mount, pid,
# uts, ipc and net namespaces:
#
#   systemd_box.sh BASE NAME FOLDER...
#
# BASE: an empty folder, over which a tmpfs is mounted that only this namespace sees. NAME: of its own cgroup, or "" once
# the cgroup namespace has been made. FOLDER: what must be seen inside, and by every user: it may lie on another mount.
#
# Nothing of the host can be changed from inside: / is an overlay whose changes go to the tmpfs; /run, /tmp, /var/tmp,
# /dev and /dev/shm are new (systemd's own services empty temporary folders); of /dev only harmless nodes are there; the
# kernel's settings can be read only (systemd changes some at its start), and clock and modules not be touched.
set -eu
base=$1 name=$2
shift 2

if [ -n "$name" ]; then
  # A cgroup of our own becomes the root of what systemd sees: the groups that it makes go with it, see systemd_box.py.
  mount --make-rprivate /
  mount -t cgroup2 none "$base"
  path=$(sed -n 's/^0:://p' /proc/self/cgroup)
  mkdir "$base$path/$name"
  echo 0 >"$base$path/$name/cgroup.procs"
  umount "$base"
  exec unshare --cgroup -- bash "$0" "$base" "" "$@"
fi

mount -t tmpfs -o size=2g,mode=755 tmpfs "$base"
mkdir "$base/up" "$base/work" "$base/root"
root=$base/root
mount -t overlay -o "lowerdir=/,upperdir=$base/up,workdir=$base/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
for tree in proc/sys sys; do
  mount --bind "$root/$tree" "$root/$tree"
  mount -o remount,bind,ro "$root/$tree"
done
mount -t cgroup2 none "$root/sys/fs/cgroup"
for folder in run tmp var/tmp dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$folder"; done
chmod 1777 "$root/tmp" "$root/var/tmp"
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"

for folder; do
  top=$folder
  covered=yes
  case $folder/ in
    /tmp/* | /run/* | /var/tmp/*) ;;
    *) [ "$(findmnt -nfo TARGET -T "$folder")" != / ] || covered=no ;;
  esac
  if [ "$covered" = yes ]; then
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    top=$(dirname "$folder") # the folder itself is the host's
  fi
  while [ "$top" != / ]; do
    chmod go+rx "$root$top"
    top=$(dirname "$top")
  done
done

# Only what is asked for is started: no service of the host, no mount of its fstab, nothing that a generator finds.
units=$root/usr/lib/systemd/system
[ -d "$units" ] || units=$root/lib/systemd/system
rm -rf "$root/etc/systemd/system" "$root/etc/fstab" "$root/etc/crypttab" "${units%/*}/system-generators" \
  "$units"/*.wants "$units"/*.requires
mkdir -p "$root/etc/systemd/system" "$units/sysinit.target.wants" "$units/sockets.target.wants"
ln -s ../systemd-journald.service "$units/sysinit.target.wants/"
ln -s ../systemd-journald.socket ../systemd-journald-dev-log.socket "$units/sockets.target.wants/"

systemd=/usr/lib/systemd/systemd
[ -x "$systemd" ] || systemd=/lib/systemd/systemd
cd "$root"
exec setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio chroot . /usr/bin/env -i container=stratad-box PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  "$systemd" --system --unit=basic.target --show-status=no --log-target=journal
