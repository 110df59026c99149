"""`tools/release_check.py` in copies of the repository: what it finds missing, and what it writes."""

import hashlib
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from packaging.requirements import Requirement

import fewshot_callbacks
from tests.scripts import ROOT, imported_script

if not (ROOT / ".git").exists():
    pytest.skip("git says which files belong to the repository", allow_module_level=True)

ACCOUNT = "ada-l"
ADDRESS = f"https://github.com/{ACCOUNT}/fewshot_callbacks"
SITE = f"https://{ACCOUNT}.github.io/fewshot_callbacks/"
VERSION = fewshot_callbacks.__version__
MINOR = VERSION.rpartition(".")[0]
DATE = re.search(r"(?m)^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"))[1]
FILLED = {
    ".github/ISSUE_TEMPLATE/config.yml",
    "CITATION.cff",
    "README.md",
    "SECURITY.md",
    "docs/start/install.md",
    "docs/start/notebook.md",
    "examples/colab.ipynb",
    "pyproject.toml",
}
CHECKED = {
    ".github/workflows/docs.yml",
    ".github/workflows/release.yml",
    "CHANGELOG.md",
    "docs/project/releasing.md",
    "LICENSE",
    "fewshot_callbacks/__init__.py",
}


@pytest.fixture(scope="module")
def check():
    with imported_script("tools/release_check.py") as module:
        yield module


@pytest.fixture(scope="module")
def conda():
    with imported_script("tools/conda_recipe.py") as module:
        yield module


def copied(names, root):
    """Copy files of the repository, and release the changes that wait for the first release; later ones are left out."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    changes = root / "CHANGELOG.md"
    text, unreleased = changes.read_text(encoding="utf-8"), "## [Unreleased]\n\n"
    if f"## [{VERSION}]" in text:
        text = re.sub(r"(?ms)^## \[Unreleased\]\n.*?(?=^## )", unreleased, text)
    else:
        text = text.replace(unreleased, f"{unreleased}## [{VERSION}] - {DATE}\n\n")
    changes.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def repository(tmp_path):
    """The files that are checked."""
    return copied(sorted(FILLED | CHECKED), tmp_path / "repository")


@pytest.fixture
def whole_repository(tmp_path):
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    root = copied([name for name in names if name and (ROOT / name).is_file()], tmp_path / "repository")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


@pytest.fixture
def ready(repository, check):
    check.write(repository, ADDRESS, published=False)
    return repository


def run(root, *words):
    return subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, check=False)


def contents(root):
    return {file: (root / file).read_text(encoding="utf-8") for file in FILLED}


has_no_address = pytest.mark.skipif(
    "[project.urls]" in (ROOT / "pyproject.toml").read_text(encoding="utf-8"), reason="the repository has an address"
)


@has_no_address
def test_without_an_address_it_lists_what_each_file_will_contain_and_changes_nothing(whole_repository, check):
    before = contents(whole_repository)
    done = run(whole_repository, "tools/release_check.py")
    assert done.returncode == 1, done.stderr
    assert {file for file in FILLED if f"{file} lacks" in done.stdout} == FILLED
    assert f'Repository = "{check.EXAMPLE}"' in done.stdout
    assert f"tools/release_check.py --address {check.EXAMPLE}" in done.stdout
    assert contents(whole_repository) == before


def test_with_an_address_nothing_is_missing_and_the_steps_by_hand_are_listed(whole_repository):
    done = run(whole_repository, "tools/release_check.py", "--address", ADDRESS)
    assert done.returncode == 0, done.stdout + done.stderr
    for fact in (ACCOUNT, "release.yml", "fewshot-callbacks", "git push origin v"):
        assert fact in done.stdout
    assert all(ACCOUNT in text for text in contents(whole_repository).values())
    citation = yaml.safe_load((whole_repository / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["repository-code"], citation["url"]) == (ADDRESS, SITE)
    links = yaml.safe_load((whole_repository / ".github/ISSUE_TEMPLATE/config.yml").read_text(encoding="utf-8"))
    assert [link["url"] for link in links["contact_links"]] == [SITE, f"{ADDRESS}/security/advisories/new"]


@pytest.mark.parametrize("published", [False, True])
def test_the_tests_of_addresses_and_of_the_notebook_pass_afterwards(whole_repository, check, published):
    check.write(whole_repository, ADDRESS, published=published)
    environment = os.environ | {"PYTHONPATH": str(whole_repository)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/test_addresses.py", "tests/examples/test_notebook.py"]
    done = subprocess.run(command, cwd=whole_repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_an_address_is_written_once_and_another_takes_its_place(ready, check):
    before = contents(ready)
    check.write(ready, ADDRESS, published=False)
    assert contents(ready) == before
    check.write(ready, "https://github.com/{}/fewshot-callbacks".format("grace"), published=False)
    assert not any(ACCOUNT in text for text in contents(ready).values())
    assert check.address_problems(ready) == []


def test_pages_install_by_name_once_the_name_is_ours(ready, check):
    install = ready / "docs/start/install.md"
    assert f'pip install "fewshot-callbacks[all] @ git+{ADDRESS}"' in install.read_text(encoding="utf-8")
    check.write(ready, ADDRESS, published=True)
    assert 'pip install "fewshot-callbacks[all]"\n' in install.read_text(encoding="utf-8")
    assert check.address_problems(ready) == []


@pytest.mark.parametrize("file", sorted(FILLED - {"pyproject.toml"}))
def test_a_file_without_the_address_is_named(ready, check, file):
    before = (ready / file).read_text(encoding="utf-8")
    (ready / file).write_text(before.replace(ACCOUNT, "grace"), encoding="utf-8")
    problems = check.address_problems(ready)
    assert problems
    assert all(problem.startswith(f"{file} lacks") for problem in problems)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- A change.\n"),
        ("CHANGELOG.md", f"## [{VERSION}]", "## [99.0]"),
        ("CHANGELOG.md", DATE, "2020-01-01"),
        ("CHANGELOG.md", f"## [{VERSION}] - {DATE}\n", ""),
        ("CITATION.cff", f"version: {VERSION}", "version: 99.0"),
        ("CITATION.cff", "license: Apache-2.0", "license: MIT"),
        ("docs/project/releasing.md", f"git tag v{VERSION}", "git tag v99.0"),
        ("SECURITY.md", f"| {MINOR} | yes |", f"| {MINOR} | no |"),
        ("docs/start/install.md", f"fewshot_callbacks-{VERSION}", "fewshot_callbacks-99.0"),
        ("fewshot_callbacks/__init__.py", f'"{VERSION}"', '"99.0"'),
        ("pyproject.toml", 'license-files = ["LICENSE"]\n', ""),
        (".github/workflows/release.yml", "      name: release\n", "      name: other\n"),
        (".github/workflows/release.yml", "id-token: write", "id-token: none"),
        (".github/workflows/docs.yml", "deploy-pages", "upload-artifact"),
        ("LICENSE", None, None),
        (".github/workflows/release.yml", None, None),
    ],
)
def test_each_missing_piece_is_found(ready, check, file, old, new):
    assert check.text_problems(ready) == []
    if old is None:
        (ready / file).unlink()
    else:
        text = (ready / file).read_text(encoding="utf-8")
        assert old in text
        (ready / file).write_text(text.replace(old, new), encoding="utf-8")
    problems = check.text_problems(ready)
    assert problems
    named = {DATE: "CITATION.cff", f'"{VERSION}"': "CHANGELOG.md"}.get(old, file)
    assert all(named in problem for problem in problems)


def test_a_wheel_that_cannot_be_built_or_lacks_metadata_is_found(whole_repository, check, monkeypatch):
    check.write(whole_repository, ADDRESS, published=False)
    assert check.wheel_problems(whole_repository) == []
    project = whole_repository / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace('readme = "README.md"\n', ""), encoding="utf-8")
    assert [problem for problem in check.wheel_problems(whole_repository) if "text/markdown" in problem]
    project.write_text(text.replace('readme = "README.md"\n', 'readme = "NONE.md"\n'), encoding="utf-8")
    assert [problem for problem in check.wheel_problems(whole_repository) if "cannot be built" in problem]
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    [problem] = check.wheel_problems(whole_repository)
    assert "pip install 'hatchling" in problem


def test_a_place_that_is_gone_is_named(ready, check):
    (ready / "SECURITY.md").write_text("# Security\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"SECURITY\.md"):
        check.address_problems(ready)


@pytest.mark.parametrize("address", ["someone", "https://github.com/ada", f"{ADDRESS}/", "http://host.org/a/b"])
def test_what_is_not_the_address_of_a_repository_is_refused(repository, check, address):
    before = contents(repository)
    with pytest.raises(SystemExit, match=re.escape(address)):
        check.write(repository, address, published=False)
    assert contents(repository) == before


def test_the_recipe_has_the_dependencies_of_the_package(ready, check, conda, tmp_path):
    archive = tmp_path / "archive.tar.gz"
    archive.write_bytes(b"the files of the tag")
    recipe = yaml.safe_load(conda.recipe(ready, archive))
    assert recipe["source"]["sha256"] == hashlib.sha256(b"the files of the tag").hexdigest()
    assert recipe["source"]["url"] == f"{ADDRESS}/archive/refs/tags/v{check.version_of(ready)}.tar.gz"
    assert recipe["extra"]["recipe-maintainers"] == [ACCOUNT]
    python, *run = recipe["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert f">={recipe['context']['python_min']}" == check.pyproject(ready)["project"]["requires-python"]
    found = {Requirement(words.replace("pytorch ", "torch ")) for words in run}
    assert found == {Requirement(words) for words in check.pyproject(ready)["project"]["dependencies"]}


def test_a_recipe_needs_an_address_and_plain_requirements(repository, conda, tmp_path):
    for requirement in ("jsonargparse[signatures]>=4", "numpy>=2; python_version > '3.12'"):
        with pytest.raises(SystemExit, match=re.escape(requirement)):
            conda.conda_requirement(requirement)
    assert conda.conda_requirement("torch>=2.6,!=2.7") == "pytorch >=2.6,!=2.7"
    assert conda.conda_requirement("scipy") == "scipy"
    project = repository / "pyproject.toml"
    text = re.sub(r"(?m)^\[project\.urls\]\n(.+\n)*", "", project.read_text(encoding="utf-8"))
    project.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="--address"):
        conda.recipe(repository, tmp_path / "archive")
