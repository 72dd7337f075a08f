#!/bin/sh
# Make .venv with this project and the named extras in it:   dev/setup-venv.sh [extra ...]
#
# Returns at once when there is nothing to do. PYTHON names another interpreter than the one that
# would be chosen, TORCH another requirement than torch==2.13.0; both count when .venv is made,
# and `make clean` removes it.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
made=$venv/.made     # names this folder; written once the environment and torch are complete
ready=$venv/.ready   # one file per installed extra, holding the fingerprint it was installed under
torch=${TORCH:-torch==2.13.0}

say() { echo "setup-venv: $*" >&2; }

# What an installation depends on: the project file, the packages it installs, and this script.
fingerprint() { cat pyproject.toml dev/setup-venv.sh; ls -d stage[0-9]_*; }

is_ready() {
    for extra in base "$@"; do
        fingerprint | cmp -s - "$ready/$extra" 2>/dev/null || return 1
    done
}

# Candidates are run, not only looked up: a version manager's shim may exist and yet refuse.
choose_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    say "needs Python 3.11 or newer; tried ${PYTHON:-python3, python3.13, python3.12 and python3.11}."
    say "Install one, or name one: make test PYTHON=/path/to/python3"
    return 1
}

has_cuda_torch() {
    "$1" -c '
import sys, torch
release = tuple(int(part) for part in torch.__version__.split(".")[:2])
sys.exit(not (torch.version.cuda and release >= (2, 11)))' >/dev/null 2>&1
}

make_venv() {
    python=$(choose_python)
    if [ -e "$venv" ]; then say "$venv was not made here, or is incomplete: making it anew"; fi
    rm -rf "$venv"
    site=
    if has_cuda_torch "$python"; then site=--system-site-packages; fi
    say "making $venv with $("$python" --version) $site"
    # Debian ships Python without ensurepip; then the machine's own pip puts pip into the environment.
    "$python" -m venv $site "$venv" >/dev/null 2>&1 || {
        rm -rf "$venv"
        "$python" -m venv --without-pip $site "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet --ignore-installed pip
    }
    if has_cuda_torch "$venv/bin/python"; then
        say "keeping the machine's own torch"
    else
        say "installing $torch (a large download, once)"
        "$venv/bin/python" -m pip install "$torch"
    fi
    pwd >"$made"
}

install() {
    # What was there before comes along. Without its files under .ready an interrupted installation
    # is repeated in full.
    extras=$({ printf '%s\n' "$@"; ls "$ready" 2>/dev/null; } | grep -v '^base$' | sort -u | xargs)
    list=$(echo "$extras" | tr ' ' ,)
    target=.${list:+[$list]}
    rm -rf "$ready" "$ready.new"
    say "installing $target (minutes the first time)"
    # The build's warnings concern the packager; some are given for every editable installation.
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --editable "$target"
    mkdir "$ready.new"
    for extra in base $extras; do fingerprint >"$ready.new/$extra"; done
    mv "$ready.new" "$ready"
}

if [ "$(cat "$made" 2>/dev/null)" != "$(pwd)" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
    make_venv
fi
if ! is_ready "$@"; then
    install "$@"
fi
