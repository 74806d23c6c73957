# Runs a command in a task's sandbox, inside new namespaces (see sandbox.py):
# sandbox.sh FOLDER OUTPUTS WORKSPACE WORKDIR HIDDEN PRINTED JUDGED USER_HOME PRIVATE COMMAND...
# It sees this machine's files, which it cannot change, WORKSPACE as WORKDIR, and folders of the episode as /tmp, /logs
# and $HOME. HIDDEN is empty, and so are each `.git` above it, PRINTED, where other episodes have their output, and what
# the lines of PRIVATE name: the data folders and keys of hives.
# JUDGED is empty for an agent; for tests it is the folder with `tests` and `verifier`, and PRINTED is empty.
# Where programs keep keys in USER_HOME, nothing is seen.
# No agent sees OUTPUTS, nor the folders of FOLDER themselves: so that it cannot put links in their places.
set -e
PATH=/usr/sbin:/sbin:/usr/bin:/bin:$PATH
folder=$1 outputs=$2 workspace=$3 workdir=$4 hidden=$5 printed=$6 judged=$7 user_home=$8 private=$9
shift 9
root=$outputs/root
run=${folder%/*}
first=${workdir#/}
first=${first%%/*}
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root"
for entry in /* /.[!.]*; do
    name=${entry#/}
    case $name in dev | logs | proc | run | tests | tmp | "$first") continue ;; esac
    if [ -L "$entry" ]; then
        cp -P "$entry" "$root/$name"
    elif [ -d "$entry" ]; then
        mkdir "$root/$name"
        mount --rbind "$entry" "$root/$name"
    fi
done
if [ -d /run/systemd/resolve ]; then # to which /etc/resolv.conf may lead
    mkdir -p "$root/run/systemd/resolve"
    mount --rbind /run/systemd/resolve "$root/run/systemd/resolve"
fi
# A mount keeps its other options, which may not be changed from in here.
while read -r _ _ _ _ point options _; do
    case $point in *\\*) point=$(printf %b "$(printf %s "$point" | sed 's/\\\([0-7]\{3\}\)/\\0\1/g')") ;; esac
    case $point in
    "$root"/*) mount -o "remount,bind,ro${options#r[ow]}" "$point" ;;
    esac
done < /proc/self/mountinfo
if [ -w "$root/usr" ]; then
    echo "the files of this machine could not be made read-only" >&2
    exit 126
fi
mkdir -p "$root/run" "$root/dev/shm" "$root/dev/pts" "$root/proc" "$root/tmp" "$root/old" "$root$workdir"
mkdir -p "$root/logs/agent" "$root/logs/artifacts" "$root/logs/verifier"
for device in null zero full random urandom tty; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t tmpfs -o size=256m,mode=1777 tmpfs "$root/dev/shm"
if mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"; then ln -s pts/ptmx "$root/dev/ptmx"; fi
ln -s /proc/self/fd "$root/dev/fd"
mount -t proc -o nosuid,noexec,nodev proc "$root/proc"
# Settings of the kernel belong to uid 0 whatever powers it has given up, and where root makes this, it is that in here.
settings=$(cd "$root/proc" && find . -mindepth 1 -maxdepth 1 ! -name '[0-9]*' '(' -type d -o -type f -perm /222 ')')
for name in $settings; do
    mount --bind "$root/proc/$name" "$root/proc/$name"
    mount -o remount,bind,ro,nosuid,noexec,nodev "$root/proc/$name"
done
secrets=".ssh .gnupg .aws .azure .kube .docker .oci .netrc .git-credentials .pypirc .npmrc .pgpass .my.cnf .vault-token
.password-store .terraform.d .databrickscfg .huggingface .kaggle .gemini .claude/.credentials.json .codex/auth.json
.cache/huggingface/token .cache/huggingface/stored_tokens .config/gcloud .config/gh .config/hub .config/rclone .config/op
.local/share/keyrings .bash_history .zsh_history .python_history .psql_history"
for name in $secrets; do
    secret=$root$(readlink -f -- "$user_home/$name" || true)
    case $secret in "$root" | "$root/") continue ;; esac
    if [ -d "$secret" ]; then
        mount -t tmpfs -o size=1m,mode=755 tmpfs "$secret"
    elif [ -f "$secret" ]; then
        mount --bind /dev/null "$secret"
    fi
done
own() { # own SOURCE TARGET: show a folder, which may be written to
    mount --bind "$1" "$root$2"
    mount -o remount,bind,nosuid,nodev "$root$2"
}
case $run in /tmp/*)
    below=${run#/tmp/}
    rm -rf -- "$folder/tmp/${below%%/*}" # which an agent may have made
    ;;
esac
hide() { # hide PATH
    if [ -d "$root$1" ]; then
        mount -t tmpfs -o size=1m tmpfs "$root$1"
    elif [ -f "$root$1" ]; then
        mount --bind /dev/null "$root$1"
    fi
}
for each in "$hidden" "$run" "$printed"; do [ -z "$each" ] || hide "$each"; done
while read -r each; do [ -z "$each" ] || hide "$each"; done << END
$private
END
above=$hidden # what is hidden may be in the history of a repository, too
while [ -n "$above" ]; do
    above=${above%/*}
    hide "$above/.git"
done
# After all that is hidden: in this folder an agent may have put links where something would be.
own "$folder/tmp" /tmp
mkdir -p "$root$folder/home" "$root$folder/tmp" "$root$workspace"
own "$folder/home" "$folder/home"
own "$folder/tmp" "$folder/tmp"
own "$workspace" "$workspace"
own "$workspace" "$workdir"
own "$folder/agent" /logs/agent
own "$folder/artifacts" /logs/artifacts
if [ -n "$judged" ]; then
    mkdir "$root/tests"
    own "$judged/tests" /tests
    own "$judged/verifier" /logs/verifier
fi
export HOME="$folder/home" TMPDIR=/tmp
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
cd "$workdir"
# Not by `exec`: this shell is the first process, with which all others end. A command in its place could leave the session
# that is killed, and do without the signal that comes when `unshare` dies.
setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all "$@" || exit $?
