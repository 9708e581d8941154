#!/bin/sh
# redis.sh redis | sentinel | wait | ping
# One pod of the log's Redis, with a Sentinel beside it if there are several. `wait` ends when the master answers REDIS_USER,
# `ping` tells whether this pod's Redis answers. HOSTS: all hosts, the first one is the first master. Passwords are in
# /passwords, one file for each user. The last master is in /data/sentinel.conf, so a start of all pods goes on with it.
set -euf
passwords=${PASSWORDS:-/passwords} data=${DATA:-/data} run=${RUN:-/tmp}
bind=${BIND:-* -::*}
first=${HOSTS%% *}
num_hosts=$(echo "$HOSTS" | wc -w)

of_user() { # user host words..: redis-cli as this user
    user=$1 host=$2
    shift 2
    REDISCLI_AUTH=$(cat "$passwords/$user") timeout 2 redis-cli --user "$user" -h "$host" "$@" 2> /dev/null
}

named_by() { # host: prints the master that the Sentinel there names, if it is one of HOSTS
    named=$(REDISCLI_AUTH=$(cat "$passwords/sentinel") timeout 2 \
        redis-cli -h "$1" -p 26379 sentinel get-master-addr-by-name minisgl 2> /dev/null | head -n 1) || return 1
    case " $HOSTS " in *" ${named:-nothing} "*) echo "$named" ;; *) return 1 ;; esac
}

master() { # prints the master; other Sentinels know it better than one that was away
    [ "$num_hosts" -gt 1 ] || { echo "$first" && return; }
    for host in $HOSTS; do
        if [ "$host" != "$me" ] && named_by "$host"; then return; fi
    done
    named_by "$me"
}

first_or_named() { # prints the master, or the first host if no Sentinel names one
    for _ in 1 2 3 4 5; do
        if master; then return; fi
        sleep 1
    done
    echo "$first"
}

others_have_keys() {
    for host in $HOSTS; do
        if [ "$host" != "$me" ] && of_user minisgl "$host" info keyspace | grep -q '^db'; then return; fi
    done
    return 1
}

with_hash() { # user rights..: prints the line of an ACL file
    user=$1
    shift
    [ -s "$passwords/$user" ] || { echo "redis.sh: the Secret has no password for the user $user; add it" >&2 && exit 2; }
    echo "user $user reset on #$(tr -d '\n' < "$passwords/$user" | sha256sum | cut -d ' ' -f 1) $*"
}

me=${ME:-}
for host in $HOSTS; do
    [ -n "$me" ] || case "$host" in "$(hostname)".*) me=$host ;; esac
done
umask 077

case "$1" in
wait)
    until host=$(master) && of_user "$REDIS_USER" "$host" ping | grep -q PONG; do sleep 1; done
    ;;
ping)
    of_user minisgl "${BIND:-127.0.0.1}" ping | grep -q PONG
    ;;
redis)
    sed -n 's/^user \([a-z]*\) reset on \(.*\)/\1 \2/p' "${USERS:-/minisgl/users.acl}" | while read -r line; do
        with_hash $line
    done > "$run/users.acl"
    grep -v -e '^dir ' -e '^bind ' "${CONFIG:-/minisgl/redis.conf}" > "$run/redis.conf"
    printf '%s\n' "bind $bind" "dir $data" "aclfile $run/users.acl" "$MORE" >> "$run/redis.conf"
    if [ "$num_hosts" -gt 1 ]; then
        with_hash replica +psync +replconf +ping >> "$run/users.acl"
        with_hash sentinel '&*' +multi +slaveof +ping +exec +subscribe '+config|rewrite' +role +publish +info \
            '+client|setname' '+client|kill' '+script|kill' >> "$run/users.acl"
        now=$(first_or_named)
        # A master that has lost its disk must not empty its replicas: it waits until another one is the master.
        while [ "$now" = "$me" ] && [ -z "$(ls "$data" | grep appendonly)" ] && others_have_keys; do
            sleep 1
            now=$(first_or_named)
        done
        printf '%s\n' "replica-announce-ip $me" 'masteruser replica' "masterauth $(cat "$passwords/replica")" \
            'min-replicas-to-write 1' 'repl-diskless-sync-delay 1' >> "$run/redis.conf"
        [ "$now" = "$me" ] || echo "replicaof $now 6379" >> "$run/redis.conf"
    fi
    # Nobody can log in as `default`. But Redis 7 loads what a script has written only if that user may write it.
    echo 'user default reset off ~* &* +@all' >> "$run/users.acl"
    exec redis-server "$run/redis.conf"
    ;;
sentinel)
    config=$data/sentinel.conf
    if ! grep -q '^sentinel monitor' "$config" 2> /dev/null; then
        password=$(cat "$passwords/sentinel")
        printf '%s\n' "bind $bind" 'port 26379' "dir $run" "requirepass $password" "sentinel sentinel-pass $password" \
            'sentinel resolve-hostnames yes' 'sentinel announce-hostnames yes' "sentinel announce-ip $me" \
            "sentinel monitor minisgl $(first_or_named) 6379 $((num_hosts / 2 + 1))" \
            'sentinel auth-user minisgl sentinel' "sentinel auth-pass minisgl $password" \
            'sentinel down-after-milliseconds minisgl 3000' 'sentinel failover-timeout minisgl 10000' > "$config.new"
        mv "$config.new" "$config"
    fi
    exec redis-server "$config" --sentinel
    ;;
*)
    echo "redis.sh: $1 given, expected redis, sentinel, wait or ping" >&2
    exit 2
    ;;
esac
