"""A business row, and a row that records what a handler did."""

from django.db import models


class Order(models.Model):
    reference = models.CharField(max_length=100)
    total = models.IntegerField(default=0)
    note = models.TextField(blank=True)

    def __str__(self):
        return self.reference


class Effect(models.Model):
    """One run of a handler's body: what the tests count."""

    key = models.CharField(max_length=255)
    note = models.CharField(max_length=255, blank=True)
    attempt = models.IntegerField(default=0)
    at = models.DateTimeField(auto_now_add=True)

    def __str__(self):
        return self.key
