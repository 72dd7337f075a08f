#!/bin/sh
# Unpack Triton 3.6.0 into .venv/triton-3.6.0, beside the installed one: the tests compile every kernel
# ahead of time with both. Where it can't be had (no wheel for this system, no network), they say so
# and skip that half.
set -u
cd "$(dirname "$0")/.."

version=3.6.0
target=.venv/triton-$version
[ -d "$target/triton" ] && exit 0
[ "$(uname -s)" = Linux ] || exit 0
echo "setup-triton: unpacking triton $version for the ahead-of-time tests (once)" >&2
rm -rf "$target.new"
.venv/bin/python -m pip install --quiet --no-deps --target "$target.new" "triton==$version" &&
    mv "$target.new" "$target" ||
    echo "setup-triton: triton $version is not to be had here; its tests will be skipped" >&2
