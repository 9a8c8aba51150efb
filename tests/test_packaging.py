"""The version stands in one place; what the wheel holds is looked at by .ci/run."""

from importlib.metadata import PackageNotFoundError, entry_points, version

import pytest

import outbox

DISTRIBUTION = "django-durable-outbox"


@pytest.fixture
def installed_version():
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed here; the source tree is on the path")


def test_the_version_is_the_one_of_the_installed_distribution(installed_version):
    assert outbox.__version__ == installed_version


@pytest.mark.usefixtures("installed_version")
def test_installing_makes_the_testing_kit_a_pytest_plugin():
    (plugin,) = entry_points(group="pytest11", name="outbox")
    assert plugin.value == "outbox.pytest_plugin"
