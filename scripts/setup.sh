#!/usr/bin/env bash
# Makes the Python environment of this checkout and installs megatron_ext with what its tests need.
#
#   bash scripts/setup.sh             make .venv, or do nothing when it is up to date (under a second)
#   bash scripts/setup.sh --rebuild   make it anew
#
# PYTHON=/path/to/python3.12   the Python to build it from (else: PATH, pyenv, uv)
# MEGATRON_EXT_VENV=DIR        another folder than .venv; an environment you already have is installed into
# PIP_*                        pip's own settings (index, proxy, cache) are honoured as they are
set -Eeuo pipefail
script_name=setup
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
. "$root/scripts/lib.sh"
trap fail_with_step ERR

venv=$(venv_dir)
rebuild=no
case "${1:-}" in
    "") ;;
    --rebuild) rebuild=yes ;;
    *) die "unknown argument '$1'." "The only one is --rebuild." ;;
esac

lock="$venv/.megatron_ext-lock"   # held while a setup works on this folder
made="$venv/.megatron_ext-made"   # this script made the folder, so it may clear it
stamp="$venv/.megatron_ext-setup" # what was installed, written last
needed_mb=7000

venv_runs() { [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null; }

is_ours() {
    [ ! -e "$venv" ] || [ -e "$made" ] || [ -z "$(find "$venv" -mindepth 1 ! -name "${lock##*/}" -print -quit)" ]
}

# What the installed state depends on. A moved checkout or environment has stale paths inside it.
places() { printf 'checkout %s\nenvironment %s\n' "$root" "$venv"; }
fingerprint() {
    places
    "$venv/bin/python" -c 'import sys; print("python", sys.version.split()[0])'
    (cd "$root" && sha256sum pyproject.toml setup.py constraints.txt)
}

up_to_date() {
    [ "$rebuild" = no ] && [ -f "$stamp" ] && venv_runs && [ "$(fingerprint)" = "$(cat "$stamp")" ]
}

# An environment of ours without a stamp was cut short; one with other paths in it was moved or copied.
must_be_made() {
    [ "$rebuild" = yes ] || ! venv_runs || [ "$(head -n 2 "$stamp" 2>/dev/null)" != "$(places)" ]
}

take_lock() {
    command -v flock >/dev/null || die "the command flock is missing (it keeps two setups apart)." \
        "Install util-linux, for example: sudo apt-get install util-linux"
    { mkdir -p "$venv" && exec 9>>"$lock"; } || die "cannot write into $venv." \
        "Set MEGATRON_EXT_VENV to a folder that you can write to."
    flock --nonblock 9 || {
        say "another setup is working on $venv; waiting for it"
        flock 9
    }
}

make_venv() {
    step "looking for Python 3.12 or 3.13"
    find_python
    step "making $venv with $python_found"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name "${lock##*/}" -exec rm -rf {} +
    : >"$made"
    "$python_found" -m venv "$venv" || die "$python_found could not make an environment in $venv." \
        "Its message is above. On Debian and Ubuntu the package python3-venv is needed."
}

check_space() {
    local free_mb
    free_mb=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge "$needed_mb" ] || die \
        "only $free_mb MB are free on the disk of $venv; about $needed_mb MB are needed." \
        "Free some, or set MEGATRON_EXT_VENV to a folder on a larger disk."
}

# pip says nothing for a minute while it unpacks torch, so this says how far it is.
heartbeat() {
    local nap=
    trap 'kill "$nap" 2>/dev/null; exit 0' TERM
    while :; do
        sleep 20 &
        nap=$!
        wait "$nap"
        say "still installing; $venv holds $(du -sm "$venv" 2>/dev/null | cut -f1) MB, about 5000 when done"
    done
}

install_packages() {
    local beat status=0
    step "installing torch, megatron-core and the rest (about 3 GB of downloads the first time)"
    check_space
    heartbeat 9>&- &
    beat=$!
    # shellcheck disable=SC2064  # the process number is wanted as it is now
    trap "kill $beat 2>/dev/null || true" EXIT
    "$venv/bin/python" -m pip install --constraint "$root/constraints.txt" --editable "${root}[dev,dit]" 9>&- || status=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" || true
    trap - EXIT
    [ "$status" -eq 0 ] || die "pip could not install the packages; its message is above." \
        "Behind a proxy or a private index set PIP_PROXY, PIP_INDEX_URL or PIP_CERT, then run the same command again."
}

[ "$(uname -s)" = Linux ] || die "megatron-core and torch with gloo are supported on Linux only; this is $(uname -s)." \
    "On Windows use WSL; on macOS a Linux container."
if up_to_date; then
    say "$venv is up to date"
    exit 0
fi
if [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$venv" ]; then
    say "the active environment $VIRTUAL_ENV is left alone; to install into it: export MEGATRON_EXT_VENV=\$VIRTUAL_ENV"
fi
if ! is_ours && { [ "$rebuild" = yes ] || ! venv_runs; }; then
    die "$venv was not made by this script, so it will not be deleted; and it is no working environment with pip$(
        [ "$rebuild" = no ] || echo ', or --rebuild asks for a new one'
    )." "Remove it yourself, or set MEGATRON_EXT_VENV to another folder."
fi
take_lock
if up_to_date; then # the setup that was waited for has done it
    say "$venv is up to date"
    exit 0
fi
if is_ours && must_be_made; then
    make_venv
fi
rm -f "$stamp"
install_packages
fingerprint >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done: $venv"
