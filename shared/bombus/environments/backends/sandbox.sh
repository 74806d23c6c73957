# Runs a command in a sandbox: sandbox.sh ROOT WORK FILE_BYTES MEMORY_BYTES COMMAND, inside new namespaces (see shell.py).
# ROOT becomes a small file system in memory with the programs of this machine, read-only, and WORK as /work.
set -e
echo 1000 > /proc/self/oom_score_adj # where memory is short all the same, the kernel ends what runs here first
# Memory of System V, which is no process's.
if [ -w /proc/sys/kernel/shmall ]; then echo $(($4 / 4096 / 4)) > /proc/sys/kernel/shmall 2> /dev/null || true; fi
PATH=/usr/sbin:/sbin:/usr/bin:/bin
mount -t tmpfs -o size=64m,mode=755 tmpfs "$1"
for folder in usr bin sbin lib lib32 lib64; do
    if [ -L "/$folder" ]; then
        cp -P "/$folder" "$1/$folder"
    elif [ -d "/$folder" ]; then
        mkdir "$1/$folder"
        mount --bind "/$folder" "$1/$folder"
        mount -o remount,bind,ro,nosuid "$1/$folder"
    fi
done
mkdir "$1/etc" "$1/dev" "$1/proc" "$1/tmp" "$1/work" "$1/old"
for file in ld.so.cache ld.so.conf localtime nsswitch.conf; do
    if [ -f "/etc/$file" ]; then cat "/etc/$file" > "$1/etc/$file"; fi
done
if [ -d /etc/alternatives ]; then cp -dR /etc/alternatives "$1/etc/"; fi
echo 'root:x:0:0:root:/work:/bin/sh' > "$1/etc/passwd"
echo 'root:x:0:' > "$1/etc/group"
for device in null zero full random urandom; do
    : > "$1/dev/$device"
    mount --bind "/dev/$device" "$1/dev/$device"
done
mount -t proc -o nosuid,noexec,nodev proc "$1/proc"
mount --bind "$2" "$1/work"
mount -o remount,bind,nosuid,nodev "$1/work"
file_bytes=$3
memory_bytes=$4
command=$5
cd "$1"
pivot_root . old
umount -l /old
rmdir /old
cd /work
export PATH=/usr/local/bin:/usr/bin:/bin
# Not by `exec`: this shell is the first process, with which all others end. The command in its place could leave the session
# that is killed, and do without the signal that comes when `unshare` dies.
prlimit --core=0 --fsize="$file_bytes" --nofile=256 --nproc=256 --as="$memory_bytes" \
    setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all /bin/sh -c "$command" || exit $?
