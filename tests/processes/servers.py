"""Database servers of a test's own, to be stopped, killed, frozen and misconfigured: PostgreSQL, MariaDB, PgBouncer.

Each listens on a free port of this machine and keeps its files in a scratch directory. A missing program skips the
test, except where CI is set: there it fails.
"""

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.waiting import wait_until

NAME = USER = "outbox"
PLACES = ("/usr/sbin", "/usr/lib/postgresql/*/bin")
PATIENCE = 60.0


def program(name):
    """The path of a program that must be there: without it the test is skipped, or fails in CI."""
    if found := shutil.which(name):
        return found
    return library(*(f"{place}/{name}" for place in PLACES))


def library(*places):
    """The path of a shared library that must be there, likewise; the places may hold wildcards."""
    found = [path for place in places for path in sorted(Path("/").glob(place.lstrip("/")))]
    if not found:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{Path(places[0]).name} is not installed")
    return str(found[-1])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def family(pid):
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue  # it has ended
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


def cpu_seconds(pid):
    """How long a process has kept a processor busy so far."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Server:
    """A process that listens on ``port``. Subclasses say how it is made, started, asked and stopped."""

    account = None  # under whose name it runs when the tests run as root

    def __init__(self):
        self.port = free_port()
        self.home = Path(tempfile.mkdtemp(prefix="outbox-server-"))
        self.log = self.home / "log"
        self.log.touch()
        self.process = None
        self.sockets = self.home
        self._as = {}
        if self.account and os.geteuid() == 0:
            account = pwd.getpwnam(self.account)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            for path in (self.home, self.log):
                os.chown(path, account.pw_uid, account.pw_gid)
        atexit.register(self.remove)

    def run(self, *arguments, **options):
        done = subprocess.run(
            list(map(str, arguments)), capture_output=True, text=True, cwd=self.home, **self._as, **options
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout} {done.stderr}"
        return done.stdout

    def start(self, *more):
        """Start it, and wait until it answers; ``more`` are further arguments of its command line."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(map(str, (*self.command(), *more))),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
                **self._as,
            )
        wait_until(self.is_ready, PATIENCE)

    def is_ready(self):
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-2000:]
        return answers(self.port)

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def stop(self, number=signal.SIGTERM):
        """End it by a signal, and wait until nothing of it is left."""
        if not self.is_running():
            return
        members = family(self.process.pid)
        self.thaw()
        self.process.send_signal(number)
        self.process.wait(PATIENCE)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in members), PATIENCE)

    def kill(self):
        """End it without any goodbye, as a crash of its machine would."""
        self.stop(signal.SIGKILL)

    def restart(self):
        self.stop()
        self.start()

    def freeze(self):
        self._signal(signal.SIGSTOP)

    def thaw(self):
        self._signal(signal.SIGCONT)

    def _signal(self, number):
        for pid in family(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def remove(self):
        if self.is_running():
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


class PostgreSQL(Server):
    account = "postgres"

    def __init__(self):
        super().__init__()
        self.data = self.home / "data"
        options = ("--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
        self.run(program("initdb"), *options, "-D", self.data)
        with (self.data / "postgresql.auto.conf").open("a") as settings:
            settings.write("fsync = off\nmax_connections = 60\nshared_buffers = 32MB\n")
        self.start()
        self.say(f"CREATE ROLE {USER} LOGIN")
        self.say(f"CREATE DATABASE {NAME} OWNER {USER}")

    def command(self):
        where = ("-D", self.data, "-p", self.port, "-c", "listen_addresses=127.0.0.1", "-k", self.sockets)
        return (program("postgres"), *where)

    def url(self, user=USER, port=None):
        return f"postgres://{user}@127.0.0.1:{port or self.port}/{NAME}"

    def say(self, sql, database="postgres"):
        """Execute this as the superuser; returns what it prints, as lists of text."""
        shell = (program("psql"), "-X", "-q", "-A", "-t", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1")
        out = self.run(*shell, "-p", self.port, "-U", "postgres", "-d", database, "-c", sql)
        return [line.split("\t") for line in out.splitlines()]

    def is_ready(self):
        return super().is_ready() and "ready" in self._state()

    def _state(self):
        """The last line of the file in which the server itself tells its state."""
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()[-1]
        except (OSError, IndexError):
            return ""

    def stop(self, number=signal.SIGINT):  # "fast": sessions are ended
        super().stop(number)

    def stop_immediately(self):
        super().stop(signal.SIGQUIT)

    def set(self, name, value):
        """Change a setting of the running server."""
        self.say(f"ALTER SYSTEM SET {name} = '{value}'")
        self.reload()

    def reset(self):
        """Take back all changes of settings."""
        for name in ("default_transaction_read_only", "lock_timeout", "idle_in_transaction_session_timeout"):
            self.say(f"ALTER SYSTEM RESET {name}")
        self.reload()
        self.say(f"ALTER ROLE {USER} CONNECTION LIMIT -1")

    def reload(self):
        self.process.send_signal(signal.SIGHUP)

    def set_read_only(self, value):
        self.set("default_transaction_read_only", "on" if value else "off")

    def sessions(self, where="true"):
        """(pid, application, state, last statement) of the sessions on the tests' database."""
        return self.say(
            "SELECT pid, application_name, state, replace(left(query, 200), E'\\n', ' ') FROM pg_stat_activity "
            f"WHERE datname = '{NAME}' AND {where} ORDER BY backend_start"
        )

    def end_session(self, pid):
        self.say(f"SELECT pg_terminate_backend({pid})")

    def deadlocks(self):
        return int(self.say(f"SELECT deadlocks FROM pg_stat_database WHERE datname = '{NAME}'")[0][0])


class MariaDB(Server):
    account = "mysql"

    def __init__(self):
        super().__init__()
        self.data = self.home / "data"
        options = ("--auth-root-authentication-method=normal", "--skip-test-db", "--skip-log-bin")
        self.run(program("mariadb-install-db"), "--no-defaults", f"--datadir={self.data}", *options)
        self.start()
        self.say(f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4")
        for host in ("127.0.0.1", "localhost"):
            self.say(f"CREATE USER {USER}@'{host}'")
            self.say(f"GRANT ALL ON {NAME}.* TO {USER}@'{host}'")

    def command(self):
        return (
            program("mariadbd"),
            "--no-defaults",
            f"--datadir={self.data}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            f"--socket={self.home}/socket",
            f"--pid-file={self.home}/pid",
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=64M",
            "--innodb-fast-shutdown=2",
            "--max-connections=60",
        )

    def url(self, user=USER, port=None):
        return f"mysql://{user}@127.0.0.1:{port or self.port}/{NAME}"

    def say(self, sql, database=""):
        shell = (program("mariadb"), "--no-defaults", f"--socket={self.home}/socket", "-u", "root", "-N", "-B")
        out = self.run(*shell, "-e", sql, *([database] if database else []))
        return [line.split("\t") for line in out.splitlines()]

    def set(self, name, value):
        self.say(f"SET GLOBAL {name} = {value}")

    def reset(self):
        for name, value in (
            ("read_only", 0),
            ("max_connections", 60),
            ("max_allowed_packet", 16 * 2**20),
            ("wait_timeout", 28800),
            ("innodb_lock_wait_timeout", 50),
        ):
            self.set(name, value)

    def stop_immediately(self):
        self.kill()

    def set_read_only(self, value):
        self.set("read_only", int(value))

    def sessions(self, where="true"):
        """(id, user, command, last statement) of the sessions on the tests' database."""
        return self.say(
            "SELECT id, user, command, REPLACE(LEFT(COALESCE(info, ''), 200), '\\n', ' ') "
            f"FROM information_schema.processlist WHERE db = '{NAME}' AND {where} ORDER BY id"
        )

    def end_session(self, pid):
        if any(row[0] == str(pid) for row in self.sessions()):
            self.say(f"KILL {pid}")

    def deadlocks(self):
        return int(self.say("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")[0][1])


class PgBouncer(Server):
    """A transaction pooler in front of a PostgreSQL server: two server sessions for all its clients."""

    account = "postgres"

    def __init__(self, server, pool_size=2):
        super().__init__()
        self.server = server
        self._settings = self.home / "pgbouncer.ini"
        self._settings.write_text(
            f"[databases]\n{NAME} = host=127.0.0.1 port={server.port} dbname={NAME} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 200\n"
            "server_login_retry = 1\nignore_startup_parameters = extra_float_digits\n"
        )
        self.start()

    def command(self):
        return (program("pgbouncer"), self._settings)

    def url(self):
        return self.server.url(port=self.port)


@cache
def private_server(vendor):
    """The server of this kind that all tests of this run share."""
    return {"postgresql": PostgreSQL, "mysql": MariaDB}[vendor]()
