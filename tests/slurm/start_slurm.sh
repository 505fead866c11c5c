#!/usr/bin/env bash
# A SLURM of one node for tests: munged, slurmctld and slurmd, started by hand in a separate folder.
#
#   export SLURM_CONF=/tmp/my_slurm/slurm.conf
#   bash tests/slurm/start_slurm.sh start /tmp/my_slurm      # returns when the node is idle
#   sbatch ... && squeue
#   bash tests/slurm/start_slurm.sh stop /tmp/my_slurm       # ends all jobs and daemons, deletes the folder
#
# Needs slurmctld, slurmd and munged (`apt-get install slurm-wlm munge`), no systemd, no cgroup and no second machine.
# Run it as root or as any user; jobs then run for that user. It neither reads nor changes a SLURM that this machine may
# belong to: it has its own ports, key, socket, spool and log. The node has SLURM_CPUS processors (8), whatever their
# real number, and memory is not counted. CONFIG adds lines to slurm.conf. Both commands may be given twice.
#
# With NODES ("host0=10.77.0.1 host1=10.77.0.2") this host, at ADDRESS, is the controller of these nodes, which see
# FOLDER:
#
#   ADDRESS=10.77.0.9 NODES="..." bash tests/slurm/start_slurm.sh start /tmp/my_slurm
#   bash tests/slurm/start_slurm.sh node /tmp/my_slurm       # on each of them
#   bash tests/slurm/start_slurm.sh await /tmp/my_slurm      # returns when all nodes are idle
set -euo pipefail

command="${1:-}" folder="${2:-}"
if [[ ! "$command" =~ ^(start|node|await|stop)$ || "$folder" != /* ]]; then
    echo "usage: $0 start|node|await|stop FOLDER (absolute; short, as the path of a socket has 108 characters at most)" >&2
    exit 2
fi
PATH="$PATH:/usr/sbin:/sbin"
export SLURM_CONF="$folder/slurm.conf"

# Succeeds if the daemon NAME of this folder is running: the process with its id has the folder in its command line.
alive() {
    local pid
    pid="$(cat "$folder/$1.pid" 2>/dev/null)" && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF "$folder"
}

# Waits until a command succeeds: wait_for SECONDS COMMAND...
wait_for() {
    local until=$((SECONDS + $1))
    while ! "${@:2}"; do
        if ((SECONDS >= until)); then
            return 1
        fi
        sleep 0.1
    done
}

gone() {
    ! alive "$1"
}

no_jobs() {
    [[ -z "$(squeue --noheader 2>&1)" ]]
}

idle() {
    [[ "$(sinfo --noheader --format %t 2>/dev/null)" == idle ]]
}

# Prints a port that nobody listens on, below the kernel's ports for outgoing connections. Ports from 20000 on are for
# jobs: see scripts/train_gpt_slurm.sh.
free_port() {
    local port
    while true; do
        port=$((RANDOM % 10000 + 22000))
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return
        fi
    done
}

configure() {
    local user control node nodes="" each
    user="$(id -un)" control="$(free_port)" node="$(free_port)"
    while ((node == control)); do
        node="$(free_port)"
    done
    for each in ${NODES:-$(hostname -s)=127.0.0.1}; do
        nodes+="NodeName=${each%=*} NodeAddr=${each#*=} CPUs=${SLURM_CPUS:-8} State=UNKNOWN"$'\n'
    done
    mkdir -p "$folder/state" "$folder/spool"
    chmod 755 "$folder"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 400 "$folder/munge.key"
    cat >"$SLURM_CONF" <<END
ClusterName=tests
SlurmctldHost=$(hostname -s)(${ADDRESS:-127.0.0.1})
SlurmctldPort=$control
SlurmdPort=$node
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MinJobAge=3600
ReturnToService=2
JobRequeue=1
KillWait=${KILL_WAIT:-10}
OverTimeLimit=0
MaxTasksPerNode=64
SlurmctldParameters=node_reg_mem_percent=0
SlurmdParameters=config_overrides
${nodes}PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
${CONFIG:-}
END
}

start() {
    local name
    for name in munged slurmctld slurmd; do
        if ! type -P "$name" >/dev/null; then
            echo "$name is not installed (Debian and Ubuntu: apt-get install slurm-wlm munge)" >&2
            return 1
        fi
    done
    if [[ ! -f "$SLURM_CONF" ]]; then
        configure
    fi
    if ! alive munged; then
        munged --force --key-file "$folder/munge.key" --socket "$folder/munge.socket" --pid-file "$folder/munged.pid" \
            --log-file "$folder/munged.log" --seed-file "$folder/munge.seed"
    fi
    if ! alive slurmctld; then
        slurmctld -f "$SLURM_CONF"
    fi
    if [[ -z "${NODES:-}" ]]; then
        node
        await
    fi
}

# Starts the daemon of this host's node.
node() {
    mkdir -p "$folder/spool/$(hostname -s)"
    if ! alive "slurmd-$(hostname -s)"; then
        slurmd -f "$SLURM_CONF"
    fi
}

await() {
    if ! wait_for 30 idle; then
        echo "not all nodes are idle after 30 s; sinfo says $(sinfo --noheader --format '%t %E' 2>&1), the logs end with" >&2
        tail -n 15 "$folder"/*.log >&2
        return 1
    fi
}

stop() {
    local name
    if alive slurmctld; then
        # If no job and no step is left, none of their processes is left.
        scancel --user "$(id -un)" --signal KILL --full 2>/dev/null || true
        scancel --user "$(id -un)" 2>/dev/null || true
        wait_for 30 no_jobs || squeue >&2
    fi
    for name in "slurmd-$(hostname -s)" slurmctld munged; do
        if alive "$name"; then
            kill "$(<"$folder/$name.pid")"
            wait_for 10 gone "$name" || kill -KILL "$(<"$folder/$name.pid")"
        fi
    done
    rm -rf "$folder"
}

"$command"
