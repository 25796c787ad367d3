#!/usr/bin/env bash
# Sets up the environment, then runs the checks: ruff, and pytest on CPU (no GPU needed).
#
#   bash scripts/test.sh                     a covering subset of all cases (under 20 minutes on 2 cores)
#   bash scripts/test.sh --full              every case (two to three hours on 2 cores)
#   bash scripts/test.sh tests/unit -k rule  anything else goes to pytest as it is
set -Eeuo pipefail
script_name="test"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
. "$root/scripts/lib.sh"
trap fail_with_step ERR

selection="not full and not gpu"
pytest_args=()
for argument in "$@"; do
    case "$argument" in
        --full) selection="not gpu" ;;
        *) pytest_args+=("$argument") ;;
    esac
done

bash "$root/scripts/setup.sh"
python="$(venv_dir)/bin/python"

step "ruff check"
(cd "$root" && "$python" -m ruff check .)
step "ruff format"
(cd "$root" && "$python" -m ruff format --check .)

# One thread a rank: several ranks share the cores, and sums come out in one order.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONUNBUFFERED=1
# Every rank of every case imports the package anew: compiled once, not each time.
unset PYTHONDONTWRITEBYTECODE
step "pytest -m '$selection'"
trap - ERR
cd "$root"
exec "$python" -m pytest -v --durations=15 -m "$selection" ${pytest_args[@]+"${pytest_args[@]}"}
