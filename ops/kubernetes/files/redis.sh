#!/bin/sh
# redis.sh redis | sentinel | ready redis | ready sentinel | cli WORDS..
# A pod of the log's Redis, with a Sentinel beside it if there are several. HOSTS are the Services of all pods, and the first of
# them is the first master. Later, the master is the one that most Sentinels name: they keep it in /data/sentinel.conf.
# Names are looked up at the start alone: a Sentinel stands still while it waits for DNS.
# Passwords are in /passwords, a file for each user. `cli` is redis-cli at the master, as a user who may do everything.
set -euf
passwords=${PASSWORDS:-/passwords} data=${DATA:-/data} run=${RUN:-/tmp}
bind=${BIND:-* -::*}
names=$HOSTS
num_hosts=$(echo "$HOSTS" | wc -w)
majority=$((num_hosts / 2 + 1))
umask 077
trap 'exit 143' TERM # a shell that is process 1 would ignore it

address() {
    until found=$(getent ahosts "$1" | awk '{ print $1; exit }') && [ -n "$found" ]; do sleep 1; done
    echo "$found"
}

look_up() { # sets HOSTS to addresses, `first` to that of the first one and `me` to that of this pod
    HOSTS='' me=''
    for name in $names; do
        host=$(address "$name")
        HOSTS=${HOSTS:+$HOSTS }$host
        case "$name" in "${ME:-$(hostname)}" | "${ME:-$(hostname)}".*) me=$host ;; esac
    done
    first=${HOSTS%% *}
}

is_host() {
    case " $HOSTS " in *" $1 "*) return 0 ;; esac
    return 1
}

info() { # host section: what the Redis there says
    REDISCLI_AUTH=$(cat "$passwords/minisgl") timeout 2 redis-cli --user minisgl -h "$1" info "$2" 2> /dev/null
}

named_by() { # hosts..: prints, for each Sentinel that answers, the number of failovers that it knows and the master
    for host in "$@"; do
        REDISCLI_AUTH=$(cat "$passwords/sentinel") timeout 2 \
            redis-cli -h "$host" -p 26379 sentinel master minisgl 2> /dev/null | awk '
                name == "ip" { ip = $0 } name == "config-epoch" { epoch = $0 } { name = $0 }
                END { if (ip != "") print epoch, ip }' || true
    done
}

newest() { sort -n | tail -n 1 | cut -d ' ' -f 2; }

master() { # prints the master, once most Sentinels have answered: one alone may have been away
    if [ "$num_hosts" -eq 1 ]; then echo "$first" && return; fi
    answers=$(named_by $HOSTS)
    [ "$(echo "$answers" | grep -c ' ')" -ge "$majority" ] || return 1
    named=$(echo "$answers" | newest)
    is_host "$named" && echo "$named"
}

# A pod that begins as a replica without data is no candidate for the master before it has copied all.
has_data() { ls "$data" | grep -q appendonly && [ ! -e "$data/copying" ]; }

may_lead() { # a master without data would empty its replicas: all others must say that they are empty, too
    if has_data; then return 0; fi
    for host in $HOSTS; do
        [ "$host" != "$me" ] || continue
        case $(info "$host" keyspace) in *db0:*) return 1 ;; *'# Keyspace'*) ;; *) return 1 ;; esac
    done
}

with_hash() { # user rights..: prints the line of an ACL file
    user=$1
    shift
    [ -s "$passwords/$user" ] || { echo "redis.sh: the Secret has no password for the user $user; add it" >&2 && exit 2; }
    echo "user $user reset on #$(tr -d '\n' < "$passwords/$user" | sha256sum | cut -d ' ' -f 1) $*"
}

case "$*" in
'ready redis')
    said=$(info "${BIND:-127.0.0.1}" replication)
    case $said in *role:master* | *master_link_status:up*) ;; *) exit 1 ;; esac
    if [ -e "$data/copying" ]; then
        REDISCLI_AUTH=$(cat "$passwords/admin") timeout 2 \
            redis-cli --user admin -h "${BIND:-127.0.0.1}" config set replica-priority 100 > /dev/null
        rm "$data/copying"
    fi
    ;;
'ready sentinel')
    [ -n "$(named_by "${BIND:-127.0.0.1}")" ]
    ;;
'cli '*)
    shift
    look_up
    REDISCLI_AUTH=$(cat "$passwords/admin") exec redis-cli --user admin -h "$(master)" "$@"
    ;;
redis)
    look_up
    sed -n 's/^user \([a-z]*\) reset on \(.*\)/\1 \2/p' "${USERS:-/minisgl/users.acl}" | while read -r line; do
        with_hash $line
    done > "$run/users.acl"
    with_hash admin '~*' '&*' +@all >> "$run/users.acl"
    with_hash replica +psync +replconf +ping >> "$run/users.acl"
    with_hash sentinel '&*' +multi +slaveof +ping +exec +subscribe '+config|rewrite' +role +publish +info \
        '+client|setname' '+client|kill' '+script|kill' >> "$run/users.acl"
    # Nobody can log in as `default`. But Redis 7 loads what a script has written only if that user may write it.
    echo 'user default reset off ~* &* +@all' >> "$run/users.acl"
    grep -v -e '^dir ' -e '^bind ' "${CONFIG:-/minisgl/redis.conf}" > "$run/redis.conf"
    printf '%s\n' "bind $bind" "dir $data" "aclfile $run/users.acl" "$MORE" >> "$run/redis.conf"
    if [ "$num_hosts" -gt 1 ]; then
        printf '%s\n' "replica-announce-ip $me" 'masteruser replica' "masterauth $(cat "$passwords/replica")" \
            'min-replicas-to-write 1' 'repl-diskless-sync-delay 1' >> "$run/redis.conf"
        until now=$(master) && { [ "$now" != "$me" ] || may_lead; }; do
            [ "${said:-}" = "${now:-}." ] || echo "redis.sh: waits until most Sentinels name a master${now:+, and not $now, which has no data}"
            said=${now:-}.
            sleep 1
        done
        if [ "$now" != "$me" ]; then
            echo "replicaof $now 6379" >> "$run/redis.conf"
            has_data || { : > "$data/copying" && echo 'replica-priority 0' >> "$run/redis.conf"; }
        fi
    fi
    exec redis-server "$run/redis.conf"
    ;;
sentinel)
    look_up
    config=$data/sentinel.conf password=$(cat "$passwords/sentinel")
    # After a new install, Services have other addresses.
    if [ -f "$data/hosts" ] && [ -f "$config" ]; then
        while read -r name old; do
            case " $names " in *" $name "*) sed -i "s/ $old / $name /" "$config" ;; esac
        done < "$data/hosts"
        for name in $names; do sed -i "s/ $name / $(address "$name") /" "$config"; done
    fi
    for name in $names; do echo "$name $(address "$name")"; done > "$data/hosts"
    monitored=$(sed -n 's/^sentinel monitor minisgl \([^ ]*\) .*/\1/p' "$config" 2> /dev/null || true)
    for _ in 1 2 3 4 5; do
        [ -z "$monitored" ] || break
        monitored=$(named_by $HOSTS | newest)
        [ -n "$monitored" ] || sleep 1
    done
    {
        printf '%s\n' "bind $bind" 'port 26379' "dir $run" "requirepass $password" "sentinel sentinel-pass $password"
        # For stages and KEDA, which only ask for the master.
        with_hash lookup '&*' +ping +subscribe +psubscribe '+client|setname' '+sentinel|master' '+sentinel|masters' \
            '+sentinel|get-master-addr-by-name' '+sentinel|replicas' '+sentinel|slaves' '+sentinel|sentinels'
        printf '%s\n' "sentinel announce-ip $me" \
            "sentinel monitor minisgl ${monitored:-$first} 6379 $majority" \
            'sentinel auth-user minisgl sentinel' "sentinel auth-pass minisgl $password" \
            'sentinel down-after-milliseconds minisgl 3000' 'sentinel failover-timeout minisgl 10000'
        # What it knew. Pods that there are no more would count for a majority.
        grep -E '^sentinel (myid|[a-z]+-epoch) ' "$config" 2> /dev/null || true
        grep -E '^sentinel known-' "$config" 2> /dev/null | while read -r line; do
            host=$(echo "$line" | cut -d ' ' -f 4)
            if is_host "$host"; then echo "$line"; fi
        done
    } > "$config.new"
    mv "$config.new" "$config"
    exec redis-server "$config" --sentinel
    ;;
*)
    echo "redis.sh: $* given, expected redis, sentinel, ready redis, ready sentinel or cli WORDS.." >&2
    exit 2
    ;;
esac
