#!/usr/bin/env bash
# One node's part of scripts/pretrain.sbatch, started by srun once on each node:
#
#   pretrain_node.sh doctor             is this node fit to train?
#   pretrain_node.sh train CONFIG ARGS  its torchrun
set -euo pipefail
script_name=pretrain
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Near the time limit Slurm sends USR1 to every process of the step. Only the ranks shall act on it: Megatron sets
# its handler there (--exit-signal). torchrun and tee inherit that it is ignored; by default it would end them.
trap '' USR1

node=${SLURMD_NODENAME:-$(hostname)}
command -v "$PYTHON" >/dev/null || die "node $node has no $PYTHON." \
    "Run 'bash scripts/setup.sh' in the checkout, on a file system that every node sees, or set PYTHON."

launcher_args=()
doctor_args=(--require-gpu)
if [ "$CPU" = 1 ]; then
    launcher_args=(--cpu)
    doctor_args=(--cpu)
fi

doctor() {
    local report=$LOG_DIR/$node.doctor status=0
    "$PYTHON" -m megatron_ext doctor "${doctor_args[@]}" >"$report" 2>&1 || status=$?
    if [ "$status" -eq 0 ]; then
        say "node $node is healthy ($report)"
    else
        cat "$report"
    fi
    exit "$status"
}

train() {
    local config=$1 nproc=${NPROC_PER_NODE:-}
    shift
    if [ -z "$nproc" ]; then
        # torchrun counts the GPUs itself where Slurm does not say how many there are.
        if [ "$CPU" = 1 ]; then nproc=1; else nproc=${SLURM_GPUS_ON_NODE:-gpu}; fi
    fi
    exec > >(tee -a "$LOG_DIR/$node.log") 2>&1
    # Later arguments win: the user's over these, these over the YAML file. A --load of the user's arrives here on
    # the first start only (see arguments_to_resume in pretrain.sbatch).
    exec "$PYTHON" -m torch.distributed.run \
        --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$nproc" --max-restarts 0 \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --local-addr "$node" \
        -m megatron_ext ${launcher_args[@]+"${launcher_args[@]}"} --ext-config "$config" "$SCRIPT" \
        --save "$CHECKPOINT_DIR" --load "$CHECKPOINT_DIR" \
        --exit-signal-handler --exit-signal SIGUSR1 --ext-report "$REPORT_DIR" "$@"
}

case "${1:-}" in
    doctor) doctor ;;
    train)
        shift
        train "$@"
        ;;
    *) die "unknown verb '${1:-}'." "This script is started by scripts/pretrain.sbatch." ;;
esac
