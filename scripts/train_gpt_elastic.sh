#!/usr/bin/env bash
# Trains on several hosts without a scheduler. If a host is lost, the run continues on the others; when the host
# returns, it rejoins the run. Run the same command on every host, and again after a reboot (from a systemd unit with
# Restart=always, or cron):
#
#   HOSTS="node1 node2 node3 node4" scripts/train_gpt_elastic.sh pretrain_gpt.py --save runs/a --load runs/a ...
#
# HOSTS lists the hosts that may take part, in the same order everywhere, by names that every host can resolve. --save
# and --load name one folder that all hosts share. The data-parallel size follows the number of hosts. For MIN_HOSTS or
# more hosts, the number of ranks must be divisible by the model-parallel sizes, and --global-batch-size by the number
# of replicas. Otherwise the run ends once on all hosts, with code 2 and the rule; start it again with other sizes, or
# when the host is back.
#
#   MIN_HOSTS        fewest hosts to continue with. Default: more than half, so that two halves of a cluster cannot both
#                    continue; 1 of 2 hosts, where the lease on --save decides (docs/reliability.md)
#   GPUS_PER_NODE    processes of each host. Default: one for each GPU
#   THIS_HOST        this host's name in HOSTS. Default: `hostname`
#   PORT             port of the rendezvous. Default: 29400
#   MAX_RESTARTS     restarts by torchrun (10); after these, this script starts torchrun again
#   MAX_FRUITLESS    consecutive starts without a newer checkpoint (10), after which the run ends
#   RENDEZVOUS_PATIENCE  a whole number (1) by which the limits of the hosts' rendezvous are multiplied, for hosts so busy
#                    that their launchers stand still for seconds; launchers notice a lost host as much later
#
# torchrun restarts the ranks on the hosts that it still sees. If the host of its rendezvous is lost, this script meets
# the others at the first remaining host. Ctrl-C or SIGTERM at torchrun saves and ends all hosts; at one host's script,
# it ends only that host, and the others continue.
set -euo pipefail

cd "${REPO:-$(dirname "${BASH_SOURCE[0]}")/..}"
. scripts/env.sh
if [[ -z "${HOSTS:-}" || $# == 0 ]]; then
    echo "usage: HOSTS=\"node1 node2 ...\" $0 pretrain_gpt.py FLAGS... (the same on each host)" >&2
    exit 2
fi
read -r -a hosts <<<"$HOSTS"
here="${THIS_HOST:-$(hostname)}"
if [[ " ${hosts[*]} " != *" $here "* ]]; then
    echo "this host, $here, is not one of HOSTS=\"$HOSTS\": correct the list, or set THIS_HOST" >&2
    exit 2
fi
fewest=$((${#hosts[@]} > 2 ? ${#hosts[@]} / 2 + 1 : 1))
min_hosts="${MIN_HOSTS:-$fewest}"
port="${PORT:-29400}"
export RENDEZVOUS_PATIENCE="${RENDEZVOUS_PATIENCE:-1}"
patience="$RENDEZVOUS_PATIENCE"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=.venv/bin/python
    [[ -x "$PYTHON" ]] || PYTHON=python3
fi
gpus="${GPUS_PER_NODE:-$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Each start of the ranks gets its own store, because torchrun's store disappears with its host.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
export OUTCOME_FILE="$scratch/outcome" RENDEZVOUS_WAITS="$scratch/waits"

say() {
    echo "$(date +%FT%T) $here: $*"
}

outcome() {
    sed -n "s/^$1=//p" "$OUTCOME_FILE" 2>/dev/null || true
}

# Prints whether HOST has a rendezvous: `open`; `refused` if the host has none; nothing if no host answers within 2 s.
probe() {
    local said
    if said="$(LC_ALL=C timeout 2 bash -c "exec 3<>/dev/tcp/$1/$port" 2>&1)"; then
        echo open
    elif [[ "$said" == *refused* ]]; then
        echo refused
    fi
}

# Probes all other hosts at once. Call it in a separate shell, because it waits for all children: probe_all FOLDER
probe_all() {
    local host
    mkdir -p "$1"
    for host in "${hosts[@]}"; do
        if [[ "$host" != "$here" ]]; then
            probe "$host" >"$1/$host" &
        fi
    done
    wait
}

# Prints the host of the rendezvous: one that has opened it; otherwise this host, unless an earlier host answers. The
# earlier host gets SECONDS to open a rendezvous; without SECONDS, it is assumed to do so while the launcher starts
# here: meeting [SECONDS]
meeting() {
    local host state until=$((SECONDS + ${1:-0})) wait_for_earlier
    while true; do
        probe_all "$scratch/meeting"
        wait_for_earlier=""
        for host in "${hosts[@]}"; do
            if [[ "$host" == "$here" ]]; then
                break
            fi
            state="$(cat "$scratch/meeting/$host")"
            [[ "$state" != refused ]] || wait_for_earlier="${wait_for_earlier:-$host}"
        done
        for host in "${hosts[@]}"; do
            if [[ "$host" != "$here" && "$(cat "$scratch/meeting/$host")" == open ]]; then
                echo "$host"
                return
            fi
        done
        if [[ -z "$wait_for_earlier" ]] || ((SECONDS >= until)); then
            if (($#)); then
                echo "$here"
            else
                echo "${wait_for_earlier:-$here}"
            fi
            return
        fi
        sleep 1
    done
}

# shellcheck disable=SC2046  # a script around torchrun does not pass signals on
end_launcher() {
    kill -TERM $(cat "/proc/$1/task/$1/children" 2>/dev/null) "$1" 2>/dev/null || true
}

# Ends the launcher of this host, which waits at its own rendezvous, when another host has one. If that host is earlier
# in HOSTS, the launcher ends immediately. If it is later, the launcher ends after 12 s, because that host comes here by
# itself unless others have met there: watch LAUNCHER
watch() {
    local host other before since=""
    while sleep 2 && kill -0 "$1" 2>/dev/null; do
        before=1 other=""
        [[ ! -e "$RENDEZVOUS_WAITS" ]] || probe_all "$scratch/watch"
        for host in "${hosts[@]}"; do
            if [[ "$host" == "$here" ]]; then
                before=""
            elif [[ -e "$RENDEZVOUS_WAITS" && "$(cat "$scratch/watch/$host")" == open ]]; then
                other="$host"
                break
            fi
        done
        if [[ -z "$other" ]]; then
            since=""
        elif [[ -n "$before" ]] || ((SECONDS >= ${since:=$SECONDS} + 12)); then
            echo "$other" >"$scratch/moves"
            end_launcher "$1"
            return
        fi
    done
}

# shellcheck disable=SC2317,SC2329  # called by trap
stop() {
    stopped=1
    [[ -z "${launcher:-}" ]] || end_launcher "$launcher"
}

stopped="" launcher="" watcher="" fruitless=0 before=""
trap stop INT TERM
while true; do
    # If no host has opened the rendezvous that this host went to, it does not go there again.
    wait_first=()
    [[ ! -e "$RENDEZVOUS_WAITS" ]] || wait_first=(15)
    rm -f "$OUTCOME_FILE" "$scratch/moves"
    at="$(meeting "${wait_first[@]}")"
    [[ -z "$stopped" ]] || exit 75
    conf="is_host=$([[ "$at" == "$here" ]] && echo 1 || echo 0),join_timeout=$((60 * patience))"
    conf+=",last_call_timeout=${LAST_CALL:-6},read_timeout=$((patience * (${#wait_first[@]} ? 6 : 15)))"
    conf+=",close_timeout=$((5 * patience)),keep_alive_interval=2,keep_alive_max_attempt=$((4 * patience))"
    say "joins the rendezvous at $at:$port, $min_hosts to ${#hosts[@]} hosts"
    LAUNCH="$PYTHON -m megatron.extensions.operate.resilience.torchrun --nnodes $min_hosts:${#hosts[@]}"
    LAUNCH+=" --nproc-per-node $gpus --max-restarts ${MAX_RESTARTS:-10} --rdzv-backend c10d-open"
    LAUNCH+=" --rdzv-endpoint $at:$port --rdzv-id elastic --rdzv-conf $conf --local-addr $here"
    export LAUNCH
    if [[ "$1" == *.sh ]]; then
        command=(bash "$@") # the script itself uses LAUNCH
    else
        read -r -a command <<<"$LAUNCH"
        command+=("$@")
    fi
    touch "$RENDEZVOUS_WAITS"
    "${command[@]}" &
    launcher=$!
    if [[ "$at" == "$here" ]]; then
        watch "$launcher" &
        watcher=$!
    fi
    code=0
    wait "$launcher" || code=$?
    while kill -0 "$launcher" 2>/dev/null; do
        code=0
        wait "$launcher" || code=$? # a signal ended the previous wait
    done
    if [[ -n "$watcher" ]]; then
        kill "$watcher" 2>/dev/null || true
        wait "$watcher" 2>/dev/null || true
    fi
    launcher="" watcher="" name="$(outcome name)"
    if [[ -z "$stopped" && -e "$scratch/moves" ]]; then
        say "no other host has joined here: moves to the rendezvous of $(cat "$scratch/moves")"
        continue
    fi
    case "$stopped:$name:$code" in
        1:*) say "stopped" && exit 75 ;;
        :DONE:0) say "done: $(outcome why)" && exit 0 ;;
        :CALLBACK_FAILED:*) say "done, but $(outcome why)" && exit 3 ;;
        :BAD_CONFIGURATION:*) say "the configuration cannot run on the present hosts" && exit 2 ;;
        *:0) # stopped; or rank 0 was elsewhere, and knows how the run ended: if it goes on, there is a rendezvous
            sleep 5
            [[ "$(meeting 0)" != "$here" ]] || { say "done, or stopped: see where rank 0 was" && exit 0; } ;;
        *) say "torchrun ended with $code${name:+, the run $name: $(outcome why)}" ;;
    esac
    save="$(outcome save)"
    for ((i = 1; i < $#; i++)); do
        [[ -n "$save" || "${!i}" != --save ]] || { ((i++)) && save="${!i}"; }
    done
    latest="$(cat "$save/latest_checkpointed_iteration.txt" 2>/dev/null || echo "$before")"
    fruitless=$((fruitless + 1))
    [[ "$latest" == "$before" ]] || fruitless=0
    before="$latest"
    if ((fruitless >= ${MAX_FRUITLESS:-10})); then
        say "gives up: $fruitless starts left no newer checkpoint than iteration ${latest:-0} (MAX_FRUITLESS)"
        exit 1
    fi
done
