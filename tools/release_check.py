"""Check that a release is complete, and write the address of the repository into every file that needs it.

python tools/release_check.py                                # print what is missing; the exit status is 1 if anything is
python tools/release_check.py --address https://github.com/someone/fewshot_callbacks    # write the address, then check
python tools/release_check.py --published                    # the name on the package index is ours: pages may install by it
"""

from __future__ import annotations

import argparse
import email
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
EXAMPLE = "https://github.com/someone/fewshot_callbacks"
ADDRESS = re.compile(r"https://github\.com/([\w-]+)/(fewshot[_-]callbacks)")
NEEDED = {
    ".github/workflows/release.yml": (
        "gh-action-pypi-publish",
        "id-token: write",
        "environment:\n      name: release\n",
    ),
    ".github/workflows/docs.yml": ("deploy-pages", "id-token: write", "pages: write", "name: github-pages\n"),
    "LICENSE": ("Apache License", "Version 2.0"),
    "pyproject.toml": ('license = "Apache-2.0"', 'license-files = ["LICENSE"]'),
    "CITATION.cff": ("license: Apache-2.0\n",),
}
"""File -> texts that the package, its licence and its site need for publication."""
BY_HAND = """
Everything is in place. These steps need your account:
- GitHub, Settings, Pages: choose "GitHub Actions" as the source. Code security: allow private vulnerability reports.
- PyPI, trusted publisher: project {name}, owner {owner}, repository {repository}, workflow release.yml, environment release.
- {tag}
- After the release: python tools/release_check.py --published, and python tools/conda_recipe.py with the archive of the tag.
"""


class Place(NamedTuple):
    """The place of a text with the address: the pattern `slot` between the patterns `before` and `after`."""

    file: str
    before: str
    slot: str
    after: str
    text: str


def places(address: str, *, published: bool = False) -> list[Place]:
    """Return all places of an address; `published` means that the name on the package index is ours."""
    owner, name = re.fullmatch(ADDRESS, address).groups()
    site = f"https://{owner}.github.io/{name}/"
    colab = f"https://colab.research.google.com/github/{owner}/{name}/blob/main/examples/colab.ipynb"
    urls = f'[project.urls]\nDocumentation = "{site}"\nRepository = "{address}"\nIssues = "{address}/issues"\n'
    urls += f'Changelog = "{address}/blob/main/CHANGELOG.md"\n\n'
    record = "[tool.release-check]\npublished = true  # the name on the package index is ours\n\n" if published else ""
    tests = f"[![Tests]({address}/actions/workflows/ci.yml/badge.svg)]({address}/actions/workflows/ci.yml)"
    badge = f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})"
    requirement = "fewshot-callbacks[all]" if published else f"fewshot-callbacks[all] @ git+{address}"
    install = f'If you have no checkout, replace the second line with:\n\n```bash\npip install "{requirement}"\n```\n\n'
    advisory = f"{address}/security/advisories/new"
    report = f'["Report a vulnerability"]({advisory})'
    links = f"contact_links:\n  - name: Documentation\n    url: {site}\n    about: Guides, recipes and the FAQ.\n"
    links += f"  - name: Report a vulnerability\n    url: {advisory}\n    about: Only the maintainers can read it.\n"
    page, notebook = "docs/start/notebook.md", "examples/colab.ipynb"
    citation = f"repository-code: {address}\nurl: {site}\n"
    append = "    " + json.dumps(f'    sources.append("git+{address}")\n') + ",\n"
    sources = r"for path in \(\*checkouts, \*wheels\)\]\\n\",\n"
    title = r'^    "# Watch an embedding while it trains\\n",\n    "\\n",\n'
    return [
        Place("pyproject.toml", "", r"(?:^\[project\.urls\]\n(?:.+\n)*\n)?", r"^\[project\.scripts\]", urls),
        Place("pyproject.toml", "", r"(?:^\[tool\.release-check\]\n.+\n\n)?", r"^\[tool\.hatch\.version\]", record),
        Place("CITATION.cff", "", r"(?:^repository-code: .+\nurl: .+\n)?", "^keywords:", citation),
        Place("README.md", r"\A# fewshot_callbacks\n\n", r"(?:\[!\[.+\n\n)?", "", f"{tests} {badge}\n\n"),
        Place("docs/start/install.md", "", r"(?:^If you have no .+\n\n(?:.+\n){3}\n)?", "^To check that ", install),
        Place("SECURITY.md", "Use ", r'"Report a vulnerability" on [^;]+|\["Report.+?\)', ";", report),
        Place(".github/ISSUE_TEMPLATE/config.yml", r"\Ablank.+\n", r"(?:contact_links:\n(?:  .+\n)+)?", "", links),
        Place(page, r"\A# Notebook\n\n", r"(?:\[Open it .+\n\n)?", "", f"[Open it in Colab]({colab}).\n\n"),
        Place(page, "If there is neither, it ", "[^.]+", r"\.", "installs the package from the repository"),
        Place(notebook, title, r'(?:    "\[!\[.+\n    "\\n",\n)?', "", f'    "{badge}\\n",\n    "\\n",\n'),
        Place(notebook, "Without either, it ", "[^.]+", r"\.", "installs the package from the repository"),
        Place(notebook, "# uploaded wheel", ".+", r'\\n",$', ", or else from the repository."),
        Place(notebook, sources, r'    "    if not (?s:.+?)"        \)\\n",\n|    "    sources\.append.+\n', "", append),
    ]  # fmt: skip


def filled(root: Path, place: Place) -> str:
    """Return a file with the text of a place in it. Exit if the file does not have the place exactly once."""
    text = (root / place.file).read_text(encoding="utf-8")
    pattern = re.compile(f"({place.before})(?:{place.slot})({place.after})", re.MULTILINE)
    result, count = pattern.subn(lambda match: match[1] + place.text + match[2], text)
    if count != 1:
        raise SystemExit(
            f"{place.file} has {count} times {pattern.pattern!r}. Change the place in tools/release_check.py."
        )
    return result


def write(root: Path, address: str, *, published: bool) -> None:
    """Write an address to all of its places."""
    if not ADDRESS.fullmatch(address):
        raise SystemExit(f"--address {address} is not the address of a repository such as {EXAMPLE}.")
    for place in places(address, published=published):
        (root / place.file).write_text(filled(root, place), encoding="utf-8")


def pyproject(root: Path) -> dict[str, Any]:
    """Return the contents of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def address_of(root: Path) -> str | None:
    """Return the address in pyproject.toml."""
    address: str | None = pyproject(root)["project"].get("urls", {}).get("Repository")
    return address


def is_published(root: Path) -> bool:
    """Return whether pyproject.toml records that the name on the package index is ours."""
    return bool(pyproject(root).get("tool", {}).get("release-check", {}).get("published", False))


def version_of(root: Path) -> str:
    """Return the version of the package."""
    package = (root / "fewshot_callbacks/__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)[1]


def tag_command(root: Path) -> str:
    """Return the command that publishes the version."""
    version = version_of(root)
    return f"git tag v{version} && git push origin v{version}"


def address_problems(root: Path) -> list[str]:
    """Return the texts that each file lacks for the address (for an example address if there is none yet)."""
    address = address_of(root)
    missing = [
        f"{place.file} lacks this text:\n{textwrap.indent(place.text.strip(), '    ')}"
        for place in places(address or EXAMPLE, published=is_published(root))
        if filled(root, place) != (root / place.file).read_text(encoding="utf-8")
    ]
    if address is None:
        missing.append(f"There is no address yet. Run python tools/release_check.py --address {EXAMPLE}, with yours.")
    return missing


def text_problems(root: Path) -> list[str]:
    """Return the files that lack a text of the release, or name another version or date."""
    version, tag = version_of(root), tag_command(root)
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    if releases and releases[0][0] != version:
        return [f"The newest release in CHANGELOG.md is not {version}, the version of the package."]
    needed = {
        "CITATION.cff": (f"version: {version}\n", *(f"date-released: {date}\n" for _, date in releases[:1])),
        "docs/project/releasing.md": (tag,),
        ".github/workflows/release.yml": (tag,),
        "docs/start/install.md": (f"fewshot_callbacks-{version}-py3-none-any.whl",),
        "SECURITY.md": (f"| {version.rpartition('.')[0]} | yes |",),
    }
    missing = [*lacking(root, needed), *lacking(root, NEEDED)]
    if not releases or re.search(r"^## \[Unreleased\]\n\s*(?!\s|## |\Z)", changes, re.MULTILINE):
        missing.append(f'CHANGELOG.md has unreleased changes. Insert "## [{version}] - DATE" below "## [Unreleased]".')
    return missing


def lacking(root: Path, needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return which files are missing, or lack one of their texts."""
    missing = []
    for file, texts in needed.items():
        if not (root / file).is_file():
            missing.append(f"{file} is missing.")
            continue
        contents = (root / file).read_text(encoding="utf-8")
        missing += [f"{file} lacks {text!r}." for text in texts if text not in contents]
    return missing


def wheel_problems(root: Path) -> list[str]:
    """Build the wheel, and return the entries that its metadata lack."""
    if importlib.util.find_spec("hatchling") is None:
        [requirement] = pyproject(root)["build-system"]["requires"]
        return [f"The wheel cannot be built without hatchling. Run python -m pip install {requirement!r}."]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
        built = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            return [f"The wheel cannot be built: {(built.stderr or built.stdout).strip()[-500:]}"]
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = email.message_from_bytes(archive.read(path))
    project = pyproject(root)["project"]
    needed = [("Name", project["name"]), ("Version", version_of(root)), ("License-Expression", project["license"])]
    needed += [("License-File", "LICENSE"), ("Description-Content-Type", "text/markdown")]
    needed += [("Project-URL", f"{name}, {url}") for name, url in project.get("urls", {}).items()]
    return [
        f"The wheel's metadata lack {key}: {value}." for key, value in needed if value not in metadata.get_all(key, [])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help=f"the address of the repository, such as {EXAMPLE}")
    parser.add_argument("--published", action="store_true", help="the name on the package index is ours")
    options = parser.parse_args()
    address = options.address or address_of(ROOT)
    if options.published and address is None:
        parser.error("--published needs the address of the repository: pass --address, too.")
    if options.address or options.published:
        write(ROOT, address, published=options.published or is_published(ROOT))
    if missing := [*address_problems(ROOT), *text_problems(ROOT), *wheel_problems(ROOT)]:
        print("\n".join(missing))
        raise SystemExit(1)
    owner, repository = re.fullmatch(ADDRESS, address).groups()
    print(
        BY_HAND.format(
            owner=owner, repository=repository, name=pyproject(ROOT)["project"]["name"], tag=tag_command(ROOT)
        )
    )


if __name__ == "__main__":
    main()
