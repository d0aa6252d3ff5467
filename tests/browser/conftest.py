"""A real browser: Chromium of the distribution, without a window. `make browser` installs it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARTIFACTS = Path(__file__).resolve().parents[2] / "out" / "browser"
_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


def start_browser(profile: Path) -> Any:
    """A browser with an empty profile that writes down its console and its network."""
    driver_path, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver_path is None or chromium is None:
        pytest.skip("no Chromium here; make browser installs it")
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for each in (*_QUIET, f"--user-data-dir={profile}"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver_path))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
