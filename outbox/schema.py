"""Which of the outbox's tables and columns a database lacks."""

from __future__ import annotations

from django.apps import apps
from django.db import connections


def missing(using: str) -> list[str]:
    """The tables that are not there, and ``table.column`` for each column; empty when all migrations have run."""
    connection = connections[using]
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        lacking = []
        for model in apps.get_app_config("outbox").get_models():
            table = model._meta.db_table
            if table not in tables:
                lacking.append(table)
                continue
            columns = {each.name for each in connection.introspection.get_table_description(cursor, table)}
            wanted = {str(field.column) for field in model._meta.local_concrete_fields}
            lacking += [f"{table}.{column}" for column in sorted(wanted - columns)]
    return sorted(lacking)
