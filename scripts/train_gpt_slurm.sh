#!/usr/bin/env bash
#SBATCH --job-name=pretrain_gpt
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#
# Trains on the nodes of a SLURM job: one torchrun per node, which starts a process for each GPU. The nodes meet at the
# first node of the job, on a port that follows from the job id, so that two jobs on one node do not clash.
#
#   DATA_PATH=... sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/gpt3_175b.sh
#   sbatch --nodes 2 scripts/train_gpt_slurm.sh pretrain_gpt.py --num-layers 24 ...
#
# Submit from the repository, or set REPO to it. The same command resumes where --save and --load name one folder.
set -euo pipefail

cd "${REPO:-${SLURM_SUBMIT_DIR:-$PWD}}"
if [[ ! -f pretrain_gpt.py ]]; then
    echo "no pretrain_gpt.py in $PWD: submit from the repository, or set REPO to it" >&2
    exit 2
fi
if (($# == 0)); then
    echo "nothing to run: name a script (scripts/gpt3_175b.sh) or pretrain_gpt.py with its flags" >&2
    exit 2
fi
: "${SLURM_JOB_ID:?submit this with sbatch}" "${SLURM_JOB_NODELIST:?submit this with sbatch}"

export PYTHON="${PYTHON:-$PWD/.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
nodes="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}"
gpus="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
log_dir="${LOG_DIR:-runs/slurm-$SLURM_JOB_ID}"
mkdir -p "$log_dir"

LAUNCH="$PYTHON -m torch.distributed.run --nnodes $nodes --nproc-per-node $gpus --max-restarts 0"
LAUNCH+=" --rdzv-backend c10d --rdzv-endpoint $head_node:$port --rdzv-id $SLURM_JOB_ID"
export LAUNCH
if [[ "$1" == *.sh ]]; then
    command=(bash "$@") # it starts under LAUNCH by itself
else
    read -r -a command <<<"$LAUNCH"
    command+=("$@")
fi

echo "job $SLURM_JOB_ID: $nodes nodes x $gpus processes, rendezvous at $head_node:$port, logs in $log_dir"
exec srun --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1 --output "$log_dir/node-%n.log" "${command[@]}"
