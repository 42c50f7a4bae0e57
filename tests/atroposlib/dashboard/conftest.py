"""Fixtures of the tests that look at the page."""

from tests.atroposlib.dashboard.signed_in import made_up, signed_in
from tests.headless_browser import browser, visit

__all__ = ["browser", "made_up", "signed_in", "visit"]
