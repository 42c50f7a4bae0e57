"""Fixtures of the tests that look at the page."""

from tests.headless_browser import browser, visit

__all__ = ["browser", "visit"]
