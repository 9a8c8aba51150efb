"""The operator's pages inside Django's admin, one module each; read-only but for guarded verbs."""

from django.contrib import admin

from outbox.admin.attempts import AttemptAdmin
from outbox.admin.breakers import BreakerAdmin
from outbox.admin.dispatchers import DispatcherAdmin
from outbox.admin.messages import MessageAdmin
from outbox.models import Attempt, Breaker, Dispatcher, Message

__all__ = ["AttemptAdmin", "BreakerAdmin", "DispatcherAdmin", "MessageAdmin"]

admin.site.register(Message, MessageAdmin)
admin.site.register(Attempt, AttemptAdmin)
admin.site.register(Dispatcher, DispatcherAdmin)
admin.site.register(Breaker, BreakerAdmin)
