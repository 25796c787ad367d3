#!/usr/bin/env bash
# From nothing to a comparison page: a small GPT trained on real text with Megatron-core on this machine's CPU, with
# stock in a single process and as a pipeline of two, as that pipeline with vocabulary parallelism, on two ranks that
# share each sequence with WallFacer, and on four data-parallel ranks in two groups with PaRO, from the same initial
# weights.
#
#   bash scripts/quickstart.sh
#
# Everything it makes is in .venv and runs/quickstart. Environment and data are kept between runs.
set -Eeuo pipefail
script_name=quickstart
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/lib.sh
. "$root/scripts/lib.sh"
trap fail_with_step ERR
[ $# -eq 0 ] || die "it takes no arguments." "To train something else see README.md."

step "setting up the environment"
bash "$root/scripts/setup.sh"
python="$(venv_dir)/bin/python"

cd "$root"
out=runs/quickstart
# Named by the Python whose sources it holds, so that a newer Python makes its own.
data=$out/data/stdlib-$("$python" -c 'import sys; print(sys.version.split()[0])')
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONUNBUFFERED=1

# The sources of Python's standard library: megabytes of real text that are on every machine.
step "preparing data from the Python standard library's sources"
"$python" -m megatron_ext data \
    --input "$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    --exclude site-packages test tests idlelib lib2to3 --output "$data" --vocab-size 4096

# The rest is made anew: a run record must hold one run, and the seed must fit the model of today.
mkdir -p "$out"
rm -rf "$out/seed" "$out/pp1" "$out/pp2" "$out/pp2-vocab" "$out/pp2-v-half" "$out/tp4-linear3d" \
    "$out/cp2-wallfacer" "$out/dp4-paro" "$out/compare"

# What a reader wants to see of a job while it runs; all of it is in its log.
progress() {
    sed -unE -e '/^\[megatron_ext\] (patched|workaround)/d' -e '/^\[megatron_ext\]/p' \
        -e '/successfully (saved|loaded)/p' -e 's/.* iteration +([0-9]+)\/ *([0-9]+) .*per iteration \(ms\): ([0-9]+).* lm loss: ([^ ]+) .*/  step \1 of \2   loss \4   \3 ms/p'
}

# train NAME PROCESSES ARGS...: one job through the launcher, as a user would start it, logged to NAME.log.
train() {
    local log=$out/$1.log processes=$2
    shift 2
    say "imports take 10 to 20 seconds; the whole output goes to $log"
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" \
        -m megatron_ext --cpu --ext-config configs/gpt-cpu-small.yaml pretrain_gpt.py \
        --data-path "${data}_text_document" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data.model" \
        "$@" 2>&1 | tee "$log" | progress || {
        tail -n 40 "$log" >&2
        die "the job failed while: $current_step" "The end of its output is above, all of it is in $log."
    }
}

# A run of its own optimizer and step count that starts from the weights in the seed.
from_seed=(--load "$out/seed" --finetune --no-load-optim --no-load-rng)

# Initial weights depend on the layout, so all runs load one seed checkpoint. Megatron saves after a step, never
# before the first; --iterations-to-skip makes the only step one that trains nothing.
step "making the initial weights (a job whose only step is skipped)"
train seed 1 --train-iters 1 --lr-warmup-iters 0 --iterations-to-skip 1 --save "$out/seed" --no-save-optim --no-save-rng

step "training in one process"
train pp1 1 "${from_seed[@]}" --ext-report "$out/pp1"

step "training as a pipeline of two processes"
train pp2 2 "${from_seed[@]}" --pipeline-model-parallel-size 2 --ext-report "$out/pp2"

step "the same pipeline with vocabulary parallelism"
train pp2-vocab 2 "${from_seed[@]}" --pipeline-model-parallel-size 2 --vocab-parallel vocab-2 --ext-report "$out/pp2-vocab"

step "and on a V-shaped schedule with two chunks per rank"
train pp2-v-half 2 "${from_seed[@]}" --pipeline-model-parallel-size 2 --vocab-parallel vocab-2 \
    --pipeline-schedule v-half --ext-report "$out/pp2-v-half"

step "tensor parallelism on a grid of four ranks: 3-D linear layers"
train tp4-linear3d 4 "${from_seed[@]}" --tensor-model-parallel-size 4 --linear-3d 2 1 2 --ext-report "$out/tp4-linear3d"

step "context parallelism on two ranks in one team: WallFacer"
train cp2-wallfacer 2 "${from_seed[@]}" --context-parallel-size 2 --cp-comm-type wallfacer --wallfacer-team-size 2 \
    --wallfacer-kv-bundle 1 --ext-report "$out/cp2-wallfacer"

step "data parallelism with everything split: PaRO, two groups of two"
train dp4-paro 4 "${from_seed[@]}" --paro-strategy IIG --paro-group-size 2 --ext-report "$out/dp4-paro"

step "comparing the runs"
"$python" -m megatron_ext compare "$out/pp1" "$out/pp2" "$out/pp2-vocab" "$out/pp2-v-half" "$out/tp4-linear3d" \
    "$out/cp2-wallfacer" "$out/dp4-paro" --output "$out/compare"
say "done. The same model, data and initial weights, split in six ways, gave the losses above."
