"""The app: finds every app's handlers, connects the log receivers and the system checks."""

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class OutboxConfig(AppConfig):
    name = "outbox"
    label = "outbox"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from outbox import checks, logs  # noqa: F401 - importing them connects them

        autodiscover_modules("outbox_handlers")
