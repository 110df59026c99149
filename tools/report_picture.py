"""Take a picture of a report in a headless browser, as docs/evaluate/report.md shows it.

    python tools/report_picture.py report.html docs/images/report.png --to threshold
    python tools/report_picture.py report.html docs/images/report_queries.png --from queries --to queries

Needs Chromium with its driver (apt-get install chromium chromium-driver) and selenium, which is among the dev dependencies.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

MARGIN = 16
"""Pixels of the page above and below the sections."""

ARRANGE = """
const [from, to, cards] = arguments;
for (const list of document.querySelectorAll("#panels, #suspect-list, #duplicate-list"))
  for (const card of [...list.children].slice(cards)) card.remove();
for (const button of document.querySelectorAll("#more-panels, #more-suspects")) button.remove();
const top = from ? document.getElementById(from).getBoundingClientRect().top + scrollY : 0;
return [top, document.getElementById(to).getBoundingClientRect().bottom + scrollY];
"""
"""Keeps the first cards of each list, so that no card is cut; returns the top and the bottom of the sections in pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="first", help="id of the first section; by default the top of the report")
    parser.add_argument("--to", dest="last", default="threshold", help="id of the last section")
    parser.add_argument("--cards", type=int, default=4, help="queries, suspects or duplicates to show")
    parser.add_argument("--width", type=int, default=1100)
    options = parser.parse_args()
    settings = webdriver.ChromeOptions()
    settings.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        settings.add_argument(word)
    browser = webdriver.Chrome(options=settings, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        # Two pixels of the picture for each pixel of the page: text is sharp on every screen.
        size = {"width": options.width, "height": 900, "deviceScaleFactor": 2, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(options.report.resolve().as_uri())
        time.sleep(1)
        top, bottom = browser.execute_script(ARRANGE, options.first, options.last, options.cards)
        above = min(MARGIN, top)
        clip = {"x": 0, "y": top - above, "width": options.width, "height": bottom - top + above + MARGIN, "scale": 1}
        shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    finally:
        browser.quit()
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(options.picture, optimize=True)


if __name__ == "__main__":
    main()
