#!/usr/bin/env bash
#SBATCH --job-name=pretrain_gpt
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --exclusive
#SBATCH --signal=USR1@240
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#
# Trains on the nodes of a SLURM job: one torchrun per node, which starts a process for each GPU. The nodes meet at the
# first node of the job, on a port that follows from the job id, so that two jobs on one node do not clash.
#
#   DATA_PATH=... sbatch --nodes 128 scripts/train_gpt_slurm.sh scripts/gpt3_175b.sh
#   sbatch --nodes 2 scripts/train_gpt_slurm.sh pretrain_gpt.py --save runs/a --load runs/a --num-layers 24 ...
#   GPUS_PER_NODE=2 sbatch --nodes 1 --gpus-per-node 0 --cpus-per-task 2 scripts/train_gpt_slurm.sh pretrain_gpt.py --cpu ...
#
# Options of sbatch override those above. Submit from the repository, or set REPO to it. All nodes must see the
# repository, --save and LOG_DIR (runs/slurm-JOB). Job arrays work; each task needs its own --save.
#
# SETUP_FILE names a bash file that prepares the environment: `module load cuda nccl`, `export NCCL_SOCKET_IFNAME=ib0`,
# PYTHON. This script sources it, and so does the shell of each node before its ranks start.
#
# One submission trains to the end. If a signal, the time limit or --exit-duration-in-mins ends the run, it saves, and
# the job is requeued and resumes. For that, --save and --load must name one folder. --signal above arrives at least 240
# s before the end of the job: choose more than a save takes. (--exit-margin-in-mins, 3 by default, is a second
# safeguard.)
#
#   scancel --signal=USR1 JOB   saves and requeues the job; so do USR2, TERM, and preemption with GraceTime
#   touch SAVE/exit             saves and ends
#   scancel JOB                 ends at once, without a save
#
# With `sbatch --no-kill`, the job keeps its other nodes when one is lost, and the run continues on them from the latest
# checkpoint, with fewer replicas: their number of ranks must be divisible by the model-parallel sizes, and
# --global-batch-size by the number of replicas.
# If they do not, or if the lost node is the first one, which runs this script, the job is requeued.
#
# A crash is retried too. The job ends with state FAILED after MAX_CRASHES (3) crashes or MAX_FRUITLESS (10) consecutive
# starts without a newer checkpoint, and at once if the configuration cannot run. Remove the cause, and start it again
# with the same sbatch or `scontrol requeue JOB`. With MAX_RESTARTS (0), torchrun first restarts the ranks inside the
# job. The log (NAME-JOB.log) lists each start and end, LOG_DIR/node-N.log is the output of a node's ranks, and
# LOG_DIR/outcome the status of the run (megatron/training/reliability/run_status.py).
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

# The id of an array task may also be the id of the whole array.
job="$SLURM_JOB_ID"
if [[ -n "${SLURM_ARRAY_JOB_ID:-}" ]]; then
    job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
if [[ -n "${SETUP_FILE:-}" ]]; then
    if [[ ! -f "$SETUP_FILE" ]]; then
        echo "SETUP_FILE=$SETUP_FILE: there is no such file in $PWD; correct it, or unset it" >&2
        exit 2
    fi
    SETUP_FILE="$(realpath "$SETUP_FILE")"
    export SETUP_FILE
    set +eu # `module` tests variables that are not set
    # shellcheck disable=SC1090
    . "$SETUP_FILE"
    set -eu
fi
export PYTHON="${PYTHON:-$PWD/.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
nodelist="$SLURM_JOB_NODELIST" nodes="${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}" lost=0
gpus="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
log_dir="$(realpath -m "${LOG_DIR:-runs/slurm-$SLURM_JOB_ID}")"
mkdir -p "$log_dir"

say() {
    echo "$(date +%FT%T) job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)): $*"
}

# Prints one field of SLURM's record of this job: JobState, EndTime, ...
job_field() {
    scontrol --oneliner show job "$job" 2>/dev/null | tr ' ' '\n' | sed -n "s/^$1=//p" | sed -n 1p
}

# Prints one field of the run's status.
outcome() {
    sed -n "s/^$1=//p" "$OUTCOME_FILE" 2>/dev/null || true
}

# Prints the iteration of the latest checkpoint, or 0 if there is none.
latest_checkpoint() {
    cat "$(outcome save)/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0
}

# Counts the starts in a row, and the crashes among them, that left no newer checkpoint: sets `fruitless` and `crashes`.
# The counts are kept in LOG_DIR/progress, because the next start is another process: count CRASHES_OF_THIS_START
count() {
    local before=0 latest
    latest="$(latest_checkpoint)" fruitless=0 crashes=0
    if [[ -s "$log_dir/progress" ]]; then
        read -r before fruitless crashes <"$log_dir/progress"
    fi
    if ((latest > before)); then
        fruitless=0 crashes="$1"
    else
        fruitless=$((fruitless + 1)) crashes=$((crashes + $1))
    fi
    echo "$latest $fruitless $crashes" >"$log_dir/progress"
}

# Ends the job for good: end CODE WHY. If it is started again by hand, the counts begin at 0.
end() {
    rm -f "$log_dir/progress"
    say "$2"
    exit "$1"
}

# Prints the state of the job and its reason: RUNNING/None, COMPLETING/TimeLimit while SLURM ends it, ...
job_state() {
    echo "$(job_field JobState)/$(job_field Reason)"
}

# Requeues the job, unless it was cancelled or SLURM is about to requeue it. To requeue a job, SLURM ends this script.
requeue() {
    local state latest
    latest="$(latest_checkpoint)"
    state="$(job_state)"
    if [[ ! "$state" =~ ^(RUNNING/.*|COMPLETING/TimeLimit|/)$ ]]; then
        say "not requeued: the job is $state"
        exit 75
    fi
    say "requeues the job, to resume from iteration $latest"
    for pause in 10 10 0; do
        scontrol requeue "$job" && exit 75
        sleep "$pause" # the controller may be starting again
    done
    end 75 "SLURM refuses the requeue; the same sbatch command resumes from iteration $latest"
}

# shellcheck disable=SC2317,SC2329  # called by trap
ask_ranks() {
    if [[ -n "${step:-}" ]]; then
        say "got a signal, passes it on to the ranks"
        kill -USR1 "$step" 2>/dev/null || true
        if [[ "$(job_state)" == COMPLETING/TimeLimit ]]; then
            requeue # the ranks have missed all earlier signals, and this script may end before they do
        fi
    fi
}

export OUTCOME_FILE="$log_dir/outcome"
if [[ "$(outcome name)" == RUNNING && ! "$log_dir/progress" -nt "$OUTCOME_FILE" ]]; then
    count 0 # the previous start ended with its node, or was killed before it could save
fi
rm -f "$OUTCOME_FILE" "$OUTCOME_FILE.asked"

# Older versions of SLURM do not set these for jobs, and newer versions of srun do not inherit them from sbatch:
starts="$(job_field StartTime)" ends="$(job_field EndTime)"
if [[ "$starts" == 2* && "$ends" == 2* ]]; then # a date, and not Unknown
    SLURM_JOB_START_TIME="$(date --date "$starts" +%s)" SLURM_JOB_END_TIME="$(date --date "$ends" +%s)"
    export SLURM_JOB_START_TIME SLURM_JOB_END_TIME
fi
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi

# With restarts inside the job, each start of the ranks gets its own store, because nodes may count restarts
# differently. torchrun then chooses a port that rank 0 opens seconds later, when another process may have taken it.
# Without them, the ranks use the store that torchrun opens itself.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-$((${MAX_RESTARTS:-0} > 0))}"
# SLURM signals every process of a step. The ranks act on the signal, not their launcher. A signal that arrives before
# there are ranks is left for them in a file.
export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT # an option of torchrun: it leaves SIGTERM to the ranks
# shellcheck disable=SC2016  # expands on each node
around=(bash -c '
    trap "" USR1 USR2 TERM
    [[ -z "${SETUP_FILE:-}" ]] || . "$SETUP_FILE"
    "$@" &
    trap "touch \"$OUTCOME_FILE.asked\"" USR1 USR2 TERM
    while true; do
        code=0
        wait $! || code=$?
        kill -0 $! 2>/dev/null || exit $code
    done' ranks)

# Starts the ranks on all nodes and waits for their end: train COMMAND... Sets `code`.
train() {
    local head_node
    head_node="$(scontrol show hostnames "$nodelist" | sed -n 1p)"
    LAUNCH="$PYTHON -m torch.distributed.run --nnodes $nodes --nproc-per-node $gpus --max-restarts ${MAX_RESTARTS:-0}"
    LAUNCH+=" --rdzv-backend c10d --rdzv-endpoint $head_node:$port"
    LAUNCH+=" --rdzv-id $SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$lost"
    export LAUNCH
    if [[ "$1" == *.sh ]]; then
        command=(bash "$@") # the script itself uses LAUNCH
    else
        read -r -a command <<<"$LAUNCH"
        command+=("$@")
    fi
    say "$nodes nodes ($nodelist) x $gpus processes, rendezvous at $head_node:$port, logs in $log_dir"
    srun --nodes "$nodes" --nodelist "$nodelist" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=1 \
        --output "$log_dir/node-%n.log" --open-mode append "${around[@]}" "${command[@]}" &
    step=$!
    code=0
    wait "$step" || code=$?
    while kill -0 "$step" 2>/dev/null; do
        code=0
        wait "$step" || code=$? # a signal ended the previous wait
    done
    step=""
}

# Continues with the nodes that SLURM has left to the job. Fails if no node was lost.
shrink() {
    local left
    left="$(job_field NodeList)"
    [[ "$(job_field JobState)" == RUNNING && "$left" != "$nodelist" && "$left" =~ [a-z0-9] ]] || return 1
    say "lost a node of $nodelist: continues on $left from iteration $(latest_checkpoint)"
    nodelist="$left" nodes="$(scontrol show hostnames "$left" | wc -l)" lost=$((lost + 1))
    unset SLURM_TASKS_PER_NODE SLURM_NTASKS SLURM_NPROCS # of all nodes
    export SLURM_OVERLAP=1                               # the previous step holds its CPUs until the lost node answers
}

trap ask_ranks USR1 USR2 TERM
while true; do
    train "$@"
    name="$(outcome name)" why="$(outcome why)" crashed=0
    save="$(outcome save)"
    # All other reasons are requests to end, and at the end of the training there is none.
    if [[ "$name:$why" == "DONE:--exit-duration-in-mins "* && -n "$save" && "$save" == "$(outcome load)" ]]; then
        name=TO_BE_RESUMED
    fi
    case "$name:$code" in
        DONE:* | :0) end 0 "done${why:+: $why}" ;;
        CALLBACK_FAILED:*) end 3 "done, but $why" ;;
        BAD_CONFIGURATION:*)
            ((lost > 0)) || end 2 "the configuration cannot run: see $log_dir"
            say "the configuration cannot run on the remaining nodes: see $log_dir"
            ;;
        TO_BE_RESUMED:* | KILLED:*) say "ended to be resumed: $why" ;;
        FAILED:*) crashed=1 && say "crashed: $why" ;;
        *) crashed=1 && say "crashed without a report; srun ended with code $code: see $log_dir" ;;
    esac
    if [[ -n "$name" && ("$(outcome save)" != "$(outcome load)" || -z "$(outcome save)") ]]; then
        end 1 "nothing to resume from: --save and --load must name one folder"
    fi
    count "$crashed"
    if ((crashes >= ${MAX_CRASHES:-3})); then
        end 1 "gives up: $crashes crashes and no checkpoint newer than iteration $(latest_checkpoint) (MAX_CRASHES)"
    elif ((fruitless >= ${MAX_FRUITLESS:-10})); then
        end 1 "gives up: $fruitless starts and no checkpoint newer than iteration $(latest_checkpoint) (MAX_FRUITLESS)"
    fi
    if ((!crashed)) || ! shrink; then
        break
    fi
    rm -f "$OUTCOME_FILE" "$OUTCOME_FILE.asked"
done
requeue
