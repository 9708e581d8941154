#!/bin/bash
#SBATCH --job-name=minisgl
#SBATCH --output=minisgl-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
# MiniSGL as jobs of a Slurm cluster (docs/slurm.md). Submit it in the checkout, in a folder that all nodes see:
#   sbatch ops/slurm.sh log                                            Redis, web, tokenize and detokenize, on one node
#   sbatch --array=1-2 --gpus=1 ops/slurm.sh engine                    two engines
#   sbatch --nodes=2 --gpus-per-node=4 ops/slurm.sh engine --tp 8      one engine on two machines
# MINISGL_<FLAG> in the environment sets any flag, MINISGL_REDIS_URL a Redis that is there. REDIS_ADDRESS and REDIS_PORT
# say where the Redis of the log job listens.
set -euo pipefail
umask 077
role=${1:-}
shift || true
PATH=$PWD/.venv/bin:$PATH
folder=${MINISGL_DATA_DIR:-$HOME/.local/state/minisgl/slurm}
given=${MINISGL_REDIS_URL:-}
redis=
# Before the time limit, the job goes back to the queue. What it leaves is in the log.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

# Print the URL of Redis, or nothing. The log job writes where its Redis listens.
redis_url() {
    local host port
    if [ -n "$given" ]; then
        echo "$given"
    elif read -r host port 2> /dev/null < "$folder/redis" && (exec 3<> "/dev/tcp/$host/$port") 2> /dev/null; then
        echo "redis://$host:$port/0?password_file=$folder/password"
    fi
}

start_redis() {
    local server host code port=${REDIS_PORT:-6379}
    mkdir -p "$folder/data"
    # Redis holds the lock, too: never two on the same data. A second log job waits here, and takes the first one's place.
    exec 9> "$folder/lock"
    if ! flock -n 9; then
        echo "Waits until the log job that has $folder ends."
        flock 9 & wait $!
    fi
    [ -s "$folder/password" ] || od -A n -t x1 -N 32 /dev/urandom | tr -d ' \n' > "$folder/password"
    host=${REDIS_ADDRESS:-$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}
    host=$(getent ahostsv4 "$host" | awk '{ print $1; exit }')
    server=$(python -c 'from pipeline.process.redis_server import find_binary; print(find_binary())')
    # The password is not on a command line. A Redis that is killed starts again with its data.
    while
        code=0
        {
            grep -Ev '^(bind|dir) ' docker/redis.conf
            printf '%s\n' "bind $host" "port $port" "dir $folder/data" "pidfile $folder/redis.pid"
            printf 'requirepass %s\n' "$(cat "$folder/password")"
        } | "$server" - || code=$?
        ((code > 128))
    do sleep 1; done &
    redis=$!
    until (exec 3<> "/dev/tcp/$host/$port") 2> /dev/null; do
        kill -0 "$redis" 2> /dev/null || { echo "Redis did not start at $host:$port." >&2 && exit 2; }
        sleep 0.2
    done
    echo "$host $port" > "$folder/redis.new"
    mv "$folder/redis.new" "$folder/redis"
}

stop_log() {
    trap '' TERM
    local pid
    for pid in "${stages[@]}"; do # web first: its open streams need the others
        kill "$pid" 2> /dev/null || true
        wait "$pid" || true
    done
    [ -z "$redis" ] || kill "$(cat "$folder/redis.pid" 2> /dev/null)" 2> /dev/null || true
    wait
    exit "$1"
}

case $role in
    log)
        [ -n "$given" ] || start_redis
        MINISGL_REDIS_URL=$(redis_url)
        export MINISGL_REDIS_URL
        minisgl stage web "$@" & stages=($!)
        minisgl stage tokenize & stages+=($!)
        minisgl stage detokenize & stages+=($!)
        trap 'stop_log 0' TERM
        code=0
        wait -n "${stages[@]}" $redis || code=$?
        stop_log "$code"
        ;;
    engine)
        [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
        command=(minisgl stage generate "$@")
        if ((SLURM_NNODES > 1)); then
            nodes=(--nnodes "$SLURM_NNODES" --group "$SLURM_JOB_ID")
            command=(bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' engine "${command[@]}" "${nodes[@]}")
        fi
        trap 'kill "$step" 2> /dev/null; wait "$step" || true; exit 0' TERM
        while :; do
            until MINISGL_REDIS_URL=$(redis_url) && [ -n "$MINISGL_REDIS_URL" ]; do sleep 1; done
            export MINISGL_REDIS_URL
            place=$(cat "$folder/redis" 2> /dev/null || true)
            srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${command[@]}" & step=$!
            # When the log job has moved to another node, the engine starts again with the new address.
            while kill -0 "$step" 2> /dev/null && [ "$(cat "$folder/redis" 2> /dev/null)" = "$place" ]; do sleep 1; done
            kill "$step" 2> /dev/null || true
            code=0
            wait "$step" || code=$?
            # 0: it was told to end. 2: the flags or the set-up are wrong.
            [ "$(cat "$folder/redis" 2> /dev/null)" != "$place" ] || ((code != 0 && code != 2)) || exit "$code"
            sleep 1
        done
        ;;
    *)
        echo "usage: sbatch [options] ops/slurm.sh log|engine [flags]" >&2
        exit 2
        ;;
esac
