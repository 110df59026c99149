"""Take a screenshot of a report in a headless browser, for README.

    fewshot report embeddings.npz -o report.html
    python tools/report_picture.py report.html docs/images/report.png --sections threshold queries suspects

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--sections", nargs="+", default=["threshold", "suspects"], help="one below the other")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--most", type=int, default=620, help="maximum height of a section, in pixels")
    options = parser.parse_args()
    settings = webdriver.ChromeOptions()
    settings.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        settings.add_argument(word)
    browser = webdriver.Chrome(options=settings, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        size = {"width": options.width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(options.report.resolve().as_uri())
        time.sleep(1)
        parts = [section(browser, name, options.width, options.most) for name in options.sections]
    finally:
        browser.quit()
    whole = Image.new("RGB", (options.width, sum(part.height for part in parts)), parts[0].getpixel((0, 0)))
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    whole.quantize(128).save(options.picture, optimize=True)


def section(browser: webdriver.Chrome, name: str, width: int, most: int) -> Image.Image:
    """Return a section of the page, cut at a maximum height."""
    top, height = browser.execute_script(
        "const box = document.getElementById(arguments[0]).getBoundingClientRect(); return [box.top + scrollY, box.height];",
        name,
    )
    clip = {"x": 0, "y": top - 16, "width": width, "height": min(height + 24, most), "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")


if __name__ == "__main__":
    main()
