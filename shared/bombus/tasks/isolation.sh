# Runs a line of shell in new namespaces (see isolation.py): isolation.sh ROOT CONFIG COMMAND FOLDER...
# ROOT becomes a small file system in memory with the programs of this machine and the given folders, all read-only,
# and /bombus, which has CONFIG and an empty home. There is no network.
set -e
PATH=/usr/sbin:/sbin:/usr/bin:/bin
root=$1 config=$2 command=$3
shift 3
mount -t tmpfs -o size=1m,mode=755 tmpfs "$root"
show() {
    if [ -e "$root$1" ]; then return; fi # it is in a folder that is shown already
    mkdir -p "$root$1"
    mount --bind "$1" "$root$1"
    mount -o remount,bind,ro,nosuid,nodev "$root$1"
}
for folder in /usr /bin /sbin /lib /lib32 /lib64; do
    if [ -L "$folder" ]; then cp -P "$folder" "$root$folder"; elif [ -d "$folder" ]; then show "$folder"; fi
done
for folder in "$@"; do show "$folder"; done
mkdir -p "$root/etc" "$root/dev" "$root/proc" "$root/bombus/home" "$root/bombus/old"
cat "$config" > "$root/bombus/config"
for file in ld.so.cache ld.so.conf localtime; do
    if [ -f "/etc/$file" ]; then cat "/etc/$file" > "$root/etc/$file"; fi
done
for device in null urandom; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t proc -o ro,nosuid,nodev,noexec proc "$root/proc" # read-only: root outside could set what is in /proc/sys
mount -t tmpfs -o size=64m,mode=700,nosuid,nodev,noexec tmpfs "$root/bombus/home"
cd "$root"
pivot_root . bombus/old
umount -l /bombus/old
mount -o remount,bind,ro / # not its file system: that has the options uid and gid of an ordinary user, who is nobody here
cd /bombus/home
eval "$command"
