"""Settings of the example project; what differs between machines comes from the environment.

DATABASE_URL            a database URL; SQLite beside manage.py by default
CONN_MAX_AGE            seconds a connection is kept; 60
DEBUG, SECRET_KEY, ALLOWED_HOSTS
USE_TZ, TIME_ZONE       True, UTC
REDIS_URL, RABBITMQ_URL brokers of the example apps; empty: embedded tables take their place
LOG_LEVEL               of the outbox and the example apps; INFO
WORLD_...               how the world outside behaves, below
"""

from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()


def database(url: str) -> dict:
    """Return the DATABASES entry for a URL, with what the outbox wants of that database."""
    config = environ.Env.db_url_config(url)
    config["CONN_MAX_AGE"] = env.int("CONN_MAX_AGE", default=60)
    config["CONN_HEALTH_CHECKS"] = True
    options = config.setdefault("OPTIONS", {})
    if config["ENGINE"] == "django.db.backends.sqlite3":
        # IMMEDIATE takes the write lock at BEGIN, where a busy database is waited for; a
        # transaction that reads first and writes later fails at once instead.
        options.setdefault("transaction_mode", "IMMEDIATE")
        options.setdefault("timeout", 20)
        options.setdefault("init_command", "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
    elif config["ENGINE"] == "django.db.backends.mysql":
        options.setdefault("charset", "utf8mb4")
    return config


DEBUG = env.bool("DEBUG", default=True)
SECRET_KEY = env.str("SECRET_KEY", default="an-example-key-that-protects-nothing-at-all-000000")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "outbox",
    "example_project.media",
    "example_project.tasks",
    "example_project.ai_jobs",
    "example_project.live",
    "example_project.demo",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
ASGI_APPLICATION = "example_project.asgi.application"

DATABASES = {
    "default": database(env.str("DATABASE_URL", default="") or f"sqlite:///{BASE_DIR}/db.sqlite3"),
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = env.bool("USE_TZ", default=True)
TIME_ZONE = env.str("TIME_ZONE", default="UTC")
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("de", "Deutsch")]

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "example_project" / "static_root"

REDIS_URL = env.str("REDIS_URL", default="")
RABBITMQ_URL = env.str("RABBITMQ_URL", default="")

# The world outside the database, as example_project/world.py plays it.
WORLD_NAMESPACE = env.str("WORLD_NAMESPACE", default="example")  # before the names of streams and queues
WORLD_JOURNAL = env.str("WORLD_JOURNAL", default=str(BASE_DIR / "journal.jsonl"))  # what it received
WORLD_LATENCY = env.dict(
    "WORLD_LATENCY", cast={"value": float}, default={}
)  # seconds per place: all=0.1;notifications=2
WORLD_FAULTS = env.float("WORLD_FAULTS", default=0.0)  # part of the calls that fail at first
WORLD_DOWN = env.list("WORLD_DOWN", default=[])  # places that never answer

LIVE_TOPICS = ["media.*", "recording.*", "ai_job.*"]  # shown live

LOG_LEVEL = env.str("LOG_LEVEL", default="INFO")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
    },
    "handlers": {
        "console": {"class": "logging.StreamHandler", "formatter": "line"},
    },
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {
        "outbox": {"level": LOG_LEVEL},
        "example_project": {"level": LOG_LEVEL},
    },
}
