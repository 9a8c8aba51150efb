# Sourced by .ci/run: makes sure that PostgreSQL, MariaDB, Redis and RabbitMQ answer on this machine.

POSTGRES_URL=postgres://outbox_ci:outbox_ci@127.0.0.1:5432/postgres
MARIADB_URL=mysql://outbox_ci:outbox_ci@127.0.0.1:3306/mysql
REDIS_URL=redis://127.0.0.1:6379/0
RABBITMQ_URL=amqp://guest:guest@127.0.0.1:5672/%2F

start_servers() {
    install_missing
    ensure PostgreSQL 5432 start_postgresql
    ensure MariaDB 3306 start_mariadb
    ensure Redis 6379 start_redis
    ensure RabbitMQ 5672 start_rabbitmq
    create_postgresql_role
    create_mariadb_user
}

install_missing() {
    local packages=()
    ls -d /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || packages+=(postgresql)
    [[ -x /usr/sbin/mariadbd ]] || packages+=(mariadb-server)
    command -v redis-server >/dev/null || packages+=(redis-server)
    [[ -x /usr/sbin/rabbitmq-server ]] || packages+=(rabbitmq-server)
    # Tests put the one in front of a server of their own, and set the clocks of processes by the other.
    [[ -x /usr/sbin/pgbouncer ]] || packages+=(pgbouncer)
    ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || packages+=(libfaketime)
    command -v unshare >/dev/null || packages+=(util-linux)
    # mysqlclient is compiled.
    command -v gcc >/dev/null || packages+=(build-essential)
    command -v pkg-config >/dev/null || packages+=(pkg-config)
    command -v mariadb_config mysql_config >/dev/null || packages+=(libmariadb-dev)
    ((${#packages[@]})) || return 0
    echo "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q >/dev/null
    apt-get install -y -q --no-install-recommends "${packages[@]}" >/dev/null
}

answers() { # PORT
    (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

ensure() { # NAME PORT START: starts a server unless it answers; waits until it does
    if ! answers "$2"; then
        echo "starting $1"
        "$3"
    fi
    local deadline=$((SECONDS + 90))
    until answers "$2"; do
        if ((SECONDS > deadline)); then
            echo "$1 does not answer on port $2 of this machine and could not be started." >&2
            return 1
        fi
        sleep 0.5
    done
    echo "$1 answers"
}

start_postgresql() {
    local version name _
    read -r version name _ < <(pg_lsclusters --no-header)
    pg_ctlcluster --skip-systemctl-redirect "$version" "$name" start
}

start_mariadb() {
    install -d -o mysql -g mysql /run/mysqld
    start-stop-daemon --start --oknodo --background --exec /usr/sbin/mariadbd -- --user=mysql
}

start_redis() { redis-server --daemonize yes --save "" --dir /tmp >/dev/null; }

start_rabbitmq() { rabbitmq-server -detached; }

create_postgresql_role() {
    runuser -u postgres -- psql --quiet --set ON_ERROR_STOP=1 postgres <<'SQL'
SELECT 'CREATE ROLE outbox_ci' WHERE to_regrole('outbox_ci') IS NULL \gexec
ALTER ROLE outbox_ci LOGIN SUPERUSER PASSWORD 'outbox_ci';
SQL
}

create_mariadb_user() {
    mariadb <<'SQL'
CREATE OR REPLACE USER outbox_ci@'127.0.0.1' IDENTIFIED BY 'outbox_ci';
CREATE OR REPLACE USER outbox_ci@'localhost' IDENTIFIED BY 'outbox_ci';
GRANT ALL ON *.* TO outbox_ci@'127.0.0.1' WITH GRANT OPTION;
GRANT ALL ON *.* TO outbox_ci@'localhost' WITH GRANT OPTION;
SQL
}
