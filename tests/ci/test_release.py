"""What is released: an sdist that the wheel can be built from, and a wheel that tests pass on."""

import email
import os
import re
import shutil
import sys
import tarfile
import zipfile

import pytest

import keras_mp
from tests.common import ROOT, once
from tests.common import run_program as run

pytestmark = once

SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "keras_mp")
SOURCES += ("BUILD", "CHANGELOG.md", "CONTRIBUTING.md", "conftest.py", ".ci", "docs", "tests")

# A quick one that makes variables and graphs, and one that looks at files of the package.
QUICK = ("tests/step/test_loss_scale.py", "tests/test_package.py", "tests/test_elsewhere.py")

ELSEWHERE = """
import pathlib

import keras_mp


def test_it_is_the_installed_one():
    assert pathlib.Path(keras_mp.__file__).parent.parent == pathlib.Path({site!r})
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder with the sdist, unpacked as `elsewhere`, and the wheel that was built from it."""
    if not (ROOT / "keras_mp").exists():
        pytest.skip("There is no source here to build from: the installed wheel is under test.")
    folder = tmp_path_factory.mktemp("release")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    run("setup.py", "-q", "sdist", "-d", folder, folder=checkout)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data") if sys.version_info >= (3, 12) else (
            archive.extractall(folder)
        )
    (folder / sdist.name.removesuffix(".tar.gz")).rename(folder / "elsewhere")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "wheel", ".", "-q", *offline, "-w", folder, folder=folder / "elsewhere")
    return folder


@pytest.fixture(scope="module")
def wheel(released):
    (path,) = released.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    info = f"keras_mp-{keras_mp.__version__}.dist-info/"
    files = {name for name in wheel.namelist() if not name.startswith(info)}
    package = ROOT / "keras_mp"
    expected = {f"keras_mp/{p.relative_to(package).as_posix()}" for p in package.rglob("*.py")}
    assert files == expected | {"keras_mp/py.typed"}
    assert any(name.startswith(info) and name.endswith("LICENSE") for name in wheel.namelist())


def test_the_metadata(wheel):
    metadata = email.message_from_bytes(
        wheel.read(f"keras_mp-{keras_mp.__version__}.dist-info/METADATA")
    )
    assert metadata["Version"] == keras_mp.__version__
    needs = [re.sub(r"[ ()]", "", need) for need in metadata.get_all("Requires-Dist")]
    assert {"keras>=3.12", "tensorflow>=2.16"} <= set(needs)
    text = metadata.get_payload()
    outside_of_code = "".join(re.split(r"^```.*?^```$", text, flags=re.M | re.S))
    links = re.findall(r"\]\(([^)\s]+)\)", outside_of_code)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "keras_mp.set_global_policy(" in text


def test_links_lead_to_the_repository_once_it_has_an_address(tmp_path):
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "keras_mp").mkdir()
    (tmp_path / "keras_mp" / "_version.py").write_text('__version__ = "1.2.3"\n')
    readme = "[a](docs/a.md) ![b](c.png) [d](https://d) [e](#e)\n```\nf[0](g)\n```\n[h](i.md#j)\n"
    (tmp_path / "README.md").write_text(readme)
    setup = tmp_path / "setup.py"
    plain = "a b [d](https://d) [e](#e)\n```\nf[0](g)\n```\nh\n"
    assert run("setup.py", "-q", "--long-description", folder=tmp_path).strip() == plain.strip()
    setup.write_text(setup.read_text().replace('_REPOSITORY = ""', '_REPOSITORY = "https://r"'))
    linked = run("setup.py", "-q", "--long-description", folder=tmp_path)
    assert linked.startswith(
        "[a](https://r/blob/v1.2.3/docs/a.md) ![b](https://r/raw/v1.2.3/c.png) [d](https://d) [e]("
    )
    assert "f[0](g)" in linked
    assert "[h](https://r/blob/v1.2.3/i.md#j)" in linked


def test_tests_pass_on_the_installed_wheel(released, wheel):
    site, elsewhere = released / "site", released / "elsewhere"
    wheel.extractall(site)
    shutil.rmtree(elsewhere / "keras_mp")
    test = elsewhere / "tests" / "test_elsewhere.py"
    test.write_text(ELSEWHERE.format(site=str(site)))
    printed = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", *QUICK),
        folder=elsewhere,
        PYTHONPATH=str(site),
    )
    assert re.search(r"\d+ passed", printed)


def test_versions_are_those_on_the_page():
    page = (ROOT / "docs" / "releases.md").read_text()
    setup = (ROOT / "setup.py").read_text()
    for name, major in (("TensorFlow", 2), ("Keras 3", 3)):
        row = rf"^\| {name} \| {major}\.(\d+) and later, tested with {major}\.(\d+)-{major}\.(\d+)"
        oldest, first, last = map(int, re.search(row, page, re.M).groups())
        assert oldest == first < last
        assert f'">={major}.{first}"' in setup
    assert not re.search(r'">=[\d.]+,<', setup)  # no upper bounds
    assert re.search(r"^\| Python \| 3\.10-3\.13", page, re.M)
    assert 'python_requires=">=3.10"' in setup
    assert keras_mp.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_hosted_ci_does_what_ci_does():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("It is not in the sdist.")
    commands = re.findall(r"- run: (.+)", workflow.read_text())
    assert {".ci/run ${{ matrix.part }}", ".ci/release"} < set(commands)
    run = (ROOT / ".ci" / "run").read_text()
    described = re.findall(r"^#   (\w+)  ", run, re.M)
    assert described == re.search(r'^known="(.+)"', run, re.M)[1].split()
    assert set(re.findall(r"part: (\w+)", workflow.read_text())) == set(described)
    for command in (".ci/run", ".ci/release"):
        assert os.access(ROOT / command, os.X_OK)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    for command in ("ruff check", "ruff format"):
        assert f"entry: {command}" in hooks
        assert command in (ROOT / "CONTRIBUTING.md").read_text()
