"""A transactional outbox for Django: what shall happen is stored with the business data, or not at all.

::

    with transaction.atomic():                      # 1. stage in your own transaction
        order = Order.objects.create(...)
        stage("order.paid", {"order_id": order.pk}, event_key=f"order:{order.pk}:paid")

    @handler("order.paid", max_attempts=8)          # 2. shop/outbox_handlers.py, found automatically
    def send_receipt(message): ...

    $ python manage.py outbox_dispatch              # 3. delivers after the commit, whatever dies in between
"""
