#!/bin/sh
# The steps of deploy/Dockerfile that install packages. As with `make setup`, only files whose hashes are in locks/ are.
#   install.sh tools          what installs and builds, in /build, which no image keeps
#   install.sh torch cpu      torch's build for CPUs, or with `cuda` for GPUs, in /opt/bombus
#   install.sh extras NAME... -PACKAGE...  what bombus needs with these extras, less these packages, in /opt/bombus
#   install.sh wheel          bombus itself, as a wheel in /build
#   install.sh bombus         this wheel in /opt/bombus, with a list of all packages, sbom.json
# The secret `registries` may set variables of pip and uv, where packages come from elsewhere than the public registries.
set -eu
[ ! -f /run/secrets/registries ] || . /run/secrets/registries
step=$1
shift
target=/opt/bombus
locked="--quiet --no-cache-dir --disable-pip-version-check --retries 1 --require-hashes --no-deps"
uv="/build/bin/uv --quiet pip"
export UV_PYTHON=$target/bin/python UV_NO_CACHE=1 UV_SYSTEM_CERTS=1

case $step in
tools)
    python3 -m venv /build
    /build/bin/pip install $locked -r locks/build.txt
    /build/bin/uv venv --quiet --no-python-downloads --python /usr/bin/python3 $target
    touch /build/torch.txt
    ;;
wheel)
    /build/bin/python -m hatchling build -t wheel -d /build/wheels
    ;;
torch)
    /build/bin/pip --python $target/bin/python install $locked --no-compile -r "locks/$1.txt"
    grep -v '^--' "locks/$1.txt" > /build/torch.txt # uv would look for every package in the index of torch's builds
    ;;
extras)
    extras='' left_out=''
    for name in "$@"; do
        case $name in -*) left_out="$left_out ${name#-}" ;; *) extras="$extras --extra $name" ;; esac
    done
    $uv install --no-build --require-hashes -c locks/build.txt -c locks/run.txt -c /build/torch.txt \
        -r pyproject.toml $extras
    [ -z "$left_out" ] || $uv uninstall $left_out
    # 15 MB of the gateway are symbols for debuggers. Libraries that wheels of numpy and torch bring break when stripped.
    [ -s /build/torch.txt ] || find $target/lib -name '*.so' -exec strip --strip-debug {} +
    ;;
bombus)
    $uv install --offline --no-deps /build/wheels/bombus-*.whl
    install deploy/healthy $target/bin/healthy
    python3 deploy/sbom.py $target > $target/sbom.json
    # An image that is read-only can compile nothing later. Much of transformers is never imported, so it stays as it is.
    $target/bin/python -W ignore -m compileall -qq -j 0 --invalidation-mode unchecked-hash \
        -x 'transformers/models/|/tests/|/mypyc?/' $target/lib || true
    ;;
esac
