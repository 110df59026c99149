"""A headless browser for the tests of the HTML report."""

import os
import shutil

import pytest


def open_browser(width: int = 1280, height: int = 900, scheme: str = "light"):
    """Return a Chromium that records its log and all requests; skip the test where it is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(word)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox refuses root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    resize(browser, width, height)
    emulate(browser, scheme)
    return browser


def resize(browser, width: int, height: int) -> None:
    """Give the page the size of a window; a narrow one is a telephone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def emulate(browser, scheme: str) -> None:
    """Let the page prefer the colours "light" or "dark"."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},  # what is scrolled to can be clicked at once
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


# A script that lists the texts whose contrast with their background is too low, by the formula of WCAG 2.2.
CONTRAST = """
const channel = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const read = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n.slice(0, 3), n.length > 3 ? n[3] : 1]; };
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const [colour, alpha] = read(getComputedStyle(at).backgroundColor);
    if (alpha === 1) return colour;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !node.getClientRects().length) continue;
  const style = getComputedStyle(node), [color] = read(node.ownerSVGElement ? style.fill : style.color);
  const pair = [light(color), light(behind(node))].sort((a, b) => b - a);
  const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (ratio < 4.5) found.push([walker.currentNode.textContent.trim().slice(0, 40), ratio]);
}
return found;
"""
