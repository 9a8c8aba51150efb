"""How Sphinx builds these pages: sphinx-build -W -b html docs docs/_build/html."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from outbox.version import __version__

project = "django-durable-outbox"
author = "The django-durable-outbox contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

# Links to headings, as in page.md#a-heading.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"outbox {__version__}"
