"""Real processes on real servers, tormented by a plan, and a checker that works on what they left behind.

::

    plan ──▶ writer, dispatchers (outbox_handlers) ──▶ journal, tables ──▶ evidence ──▶ checker ──▶ figures
      └────▶ conductor (starts them, kills, freezes, restarts servers) ──▶ journal

``python -m tests.chaos --help`` runs it for as long as wanted; `test_chaos` runs a short form.
"""
