#!/bin/sh
# Makes a password for each user of the log that has none in /passwords, and starts Redis with their hashes.
# To use your own password, put it into /passwords/<user> first. Runs as root until the image's entrypoint changes user.
set -eu
acl=/run/minisgl.acl
sed -n 's/^user \([a-z]*\) reset on .*/\1/p' /minisgl/users.acl | while read -r user; do
    if [ ! -s "/passwords/$user" ]; then
        head -c 32 /dev/urandom | od -A n -t x1 | tr -d ' \n' > "/passwords/$user.new"
        mv "/passwords/$user.new" "/passwords/$user"
    fi
    hash=$(tr -d '\n' < "/passwords/$user" | sha256sum | cut -d ' ' -f 1)
    sed -n "s/^user $user .*/& #$hash/p" /minisgl/users.acl
done > "$acl"
# Nobody can log in as `default`. But Redis 7 loads what a script has written only if that user may write it.
echo 'user default reset off ~* &* +@all' >> "$acl"
chown redis "$acl"
chmod 400 "$acl"
exec docker-entrypoint.sh redis-server /minisgl/redis.conf --aclfile "$acl"
