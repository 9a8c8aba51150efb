"""The app that stands for a user's business code in the tests."""

from django.apps import AppConfig


class TestappConfig(AppConfig):
    name = "tests.testapp"
    label = "testapp"
