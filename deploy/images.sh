#!/usr/bin/env bash
# `make images`: builds the targets of deploy/Dockerfile with buildah, without a running engine, and prints their sizes.
#   deploy/images.sh [TARGET...]    BASE=image TORCH=cpu|cuda IMAGES=folder for what buildah keeps
# Without BASE, debootstrap makes one of Debian's packages. Where pip has settings in variables, the builds get them.
set -euo pipefail
cd "$(dirname "$0")/.."
images=$(realpath -m "${IMAGES:-.images}")
torch=${TORCH:-cpu}
base=${BASE:-localhost/debian:bookworm}
targets=("$@")
[ $# -gt 0 ] || targets=(coordinator gateway environment trainer inference all)
export BUILDAH_ISOLATION=chroot
b() { buildah --root "$images/storage" --runroot "$images/run" "$@"; }

for program in buildah $([ -n "${BASE:-}" ] || echo debootstrap); do
    command -v "$program" > /dev/null || { echo "images.sh: install $program: apt-get install $program" >&2; exit 2; }
done
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
mkdir -p "$images"

if [ -z "${BASE:-}" ] && ! b inspect --type image "$base" > "$work/found" 2>&1; then
    debootstrap --variant=minbase bookworm "$work/base" > "$images/debootstrap.log"
    echo "deb http://deb.debian.org/debian-security bookworm-security main" >> "$work/base/etc/apt/sources.list"
    rm -rf "$work"/base/var/{cache,lib}/apt/* "$work"/base/usr/share/{locale,doc,man}/*
    from=$(b from scratch)
    b copy --quiet "$from" "$work/base" /
    b commit --quiet --rm "$from" "$base"
    rm -rf "$work/base"
fi

flags=()
: > "$work/registries"
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS UV_DEFAULT_INDEX; do
    [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}" >> "$work/registries"
done
for folder in ${PIP_FIND_LINKS:-}; do
    [ ! -d "$folder" ] || flags+=(--volume "$folder:$folder:ro")
done
if [ -f "${SSL_CERT_FILE:-}" ]; then
    echo "export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca" >> "$work/registries"
    flags+=(--secret "id=ca,src=$SSL_CERT_FILE")
fi
flags+=(--secret "id=registries,src=$work/registries")

for target in "${targets[@]}"; do
    b bud --quiet --layers --format docker --build-arg "BASE=$base" --build-arg "TORCH=$torch" \
        --ignorefile .dockerignore "${flags[@]}" --target "$target" --tag "localhost/bombus-$target" -f deploy/Dockerfile .
done
b images | grep ^localhost
