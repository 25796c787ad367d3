# Shared by the scripts beside it: messages, named steps, and finding a Python. Sourced, never run.
# shellcheck shell=bash

# say TEXT: one line of progress, with the seconds since the script started.
say() { printf '[%s %3ds] %s\n' "${script_name:-megatron_ext}" "$SECONDS" "$*"; }

# die TEXT...: each argument is one line on stderr; exit 1.
die() {
    {
        printf '\n%s: %s\n' "${script_name:-megatron_ext}" "$1"
        shift
        [ $# -eq 0 ] || printf '  %s\n' "$@"
    } >&2
    trap - ERR
    exit 1
}

# step TEXT: names what is being done now; fail_with_step (an ERR trap) reports that name.
step() {
    current_step=$1
    say "$1"
}

fail_with_step() {
    local status=$?
    [ "$BASH_SUBSHELL" -eq 0 ] || exit "$status" # what started the subshell reports it
    printf '\n%s: failed (exit %d) while: %s\n' \
        "${script_name:-megatron_ext}" "$status" "${current_step:-starting}" >&2
    exit "$status"
}

# venv_dir: the folder of the environment (root is the checkout), as a full path.
venv_dir() {
    case "${MEGATRON_EXT_VENV:-}" in
        "") printf '%s\n' "${root:?}/.venv" ;;
        /*) printf '%s\n' "$MEGATRON_EXT_VENV" ;;
        *) printf '%s\n' "$PWD/$MEGATRON_EXT_VENV" ;;
    esac
}

# probe_python CMD: runs CMD as a Python and prints "ok VERSION" or "no REASON".
# It runs it for real: a pyenv shim is on PATH even when its version is not selected.
probe_python() {
    local answer
    if ! answer=$("$1" -c '
import sys
found = ".".join(map(str, sys.version_info[:3]))
if sys.version_info < (3, 12):
    print("no Python " + found + " is older than 3.12")
elif sys.version_info >= (3, 14):
    print("no Python " + found + " is newer than 3.13, and megatron-core has no wheel for it")
else:
    try:
        import ensurepip, venv
    except ImportError as error:
        print("no Python " + found + " lacks the module " + str(error.name) + " that makes environments")
    else:
        print("ok " + found)
' 2>/dev/null); then
        answer="no it does not run"
    fi
    printf '%s\n' "${answer:-no it prints nothing}"
}

# python_candidates: one command a line, the tested version first.
python_candidates() {
    local minor name root
    for minor in 12 13; do
        name=$(command -v "python3.$minor") && printf '%s\n' "$name"
    done
    for name in python3 python; do
        name=$(command -v "$name") && printf '%s\n' "$name"
    done
    for root in ${PYENV_ROOT:+"$PYENV_ROOT"} ${HOME:+"$HOME/.pyenv"}; do
        for minor in 12 13; do
            # Newest patch release first; a glob that matches nothing prints nothing.
            printf '%s\n' "$root"/versions/3."$minor".*/bin/python | grep -vF '*' | sort -rV || true
        done
    done
    if command -v uv >/dev/null; then
        uv python find --no-project 3.12 2>/dev/null || uv python find --no-project '>=3.12,<3.14' 2>/dev/null || true
    fi
}

# find_python: sets python_found to a Python 3.12 or 3.13 that can make environments, or explains and exits.
find_python() {
    local candidate answer
    local -a refused=()
    if [ -n "${PYTHON:-}" ]; then
        answer=$(probe_python "$PYTHON")
        [ "${answer%% *}" = ok ] || die "PYTHON=$PYTHON cannot be used: ${answer#no }." \
            "Set PYTHON to a Python 3.12 or 3.13 that has venv, or unset it to let this script look for one."
        python_found=$PYTHON
        return
    fi
    while IFS= read -r candidate; do
        answer=$(probe_python "$candidate")
        if [ "${answer%% *}" = ok ]; then
            # shellcheck disable=SC2034  # read by the script that sources this file
            python_found=$candidate
            return
        fi
        refused+=("- $candidate: ${answer#no }")
    done < <(python_candidates)
    [ ${#refused[@]} -gt 0 ] || refused=("- there is no python3.12, python3.13, python3 or python")
    die "no usable Python 3.12 or 3.13 was found on PATH, in pyenv or through uv. What was looked at:" \
        "${refused[@]}" \
        "Install one in one of these ways, then run the same command again:" \
        "- Debian 13, Ubuntu 24.04 or newer:  sudo apt-get install python3 python3-venv" \
        "- pyenv:  pyenv install 3.12" \
        "- uv:     uv python install 3.12" \
        "- conda:  conda create -n py312 python=3.12, then conda activate py312" \
        "Or name one yourself:  PYTHON=/path/to/python3.12"
}
