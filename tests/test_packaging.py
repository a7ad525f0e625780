"""What an installed Tilefold offers, and what a clean clone promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

import pytest

import tilefold
from tilefold import version
from tilefold.runtime import cache

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "BackendError", "CacheError", "NotFusibleError", "ParseError", "TilefoldError", "UnsupportedError", "VerifyError",
    "derive", "explain", "fuse", "verify",
}  # fmt: skip


def test_public_names_are_listed_and_exist():
    assert set(tilefold.__all__) >= PUBLIC
    assert all(getattr(tilefold, name).__doc__ for name in PUBLIC)


def test_names_outside_the_list_are_refused():
    with pytest.raises(AttributeError, match="no_such_name"):
        tilefold.no_such_name  # noqa: B018


def test_the_package_is_typed():
    assert (files("tilefold") / "py.typed").is_file()


def test_torch_finds_the_back_end_by_its_entry_point():
    (found,) = entry_points(group="torch_dynamo_backends", name="tilefold")
    assert callable(found.load())
    assert not entry_points(group="torch_dynamo_backends", name="tilefold_absent")


def test_the_command_is_registered():
    (found,) = (e for e in entry_points(group="console_scripts", name="tilefold"))
    assert found.value == "tilefold.cli:app"
    assert callable(found.load())


@pytest.mark.parametrize("target", ["run", "test", "lint", "types", "examples", "bench", "docs", "clean"])
def test_make_knows_its_targets(target):
    plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert plan.returncode == 0, plan.stderr


def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n')
    old.chmod(0o755)
    built = subprocess.run(
        ["make", "venv", f"PYTHON={old}", f"VENV={tmp_path}/venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode != 0
    assert "needs Python 3.11 or later" in built.stderr and "Python 3.9.1" in built.stderr


def test_torch_is_pinned_within_what_the_package_accepts():
    (pinned,) = re.findall(r"^TORCH \?= torch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (least,) = (re.fullmatch(r"torch>=([\d.]+)", r)[1] for r in requires if r.startswith("torch>"))
    assert [int(n) for n in pinned.split(".")] >= [int(n) for n in least.split(".")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """`python -m build`: a source archive of this checkout, and from that the wheel, without a network.

    It is built from a copy without git, as building leaves folders; its version is the fallback.
    """
    for needed in ("build", "setuptools_scm"):
        pytest.importorskip(needed, reason=f"building needs the package {needed}")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "tilefold", source / "tilefold", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    (wheel,) = out.glob("*.whl")
    return wheel


def test_a_wheel_holds_what_is_not_python_too(wheel):
    """Headers, tables of tuned kernels, the page's parts: all that git knows of the package, and nothing else."""
    listed = subprocess.run(["git", "ls-files", "tilefold"], cwd=ROOT, capture_output=True, text=True, check=False)
    known = {name for name in listed.stdout.split() if (ROOT / name).exists()}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert {"tilefold/backends/cpp/include/tilefold_math.h", "tilefold/runtime/tables/nvidia-h200.json"} <= held
    assert {Path(name).suffix for name in held} == {".py", ".h", ".cpp", ".json", ".html", ".css", ".js", ".typed"}
    assert not known or held >= known


def test_a_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """Installed without a network: what it depends on is that of this environment, by a path."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    options = ["--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *options], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))

    def run(*words: object) -> str:
        own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        own |= {"TILEFOLD_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run(tmp_path / "env/bin/tilefold", "--version").startswith("tilefold 0.1.dev0 (torch ")
    (tmp_path / "used.py").write_text(
        "import torch, tilefold\n"
        "print(tilefold.__file__)\n"
        "x = torch.randn(3, 40)\n"
        "assert torch.allclose(torch.compile(lambda x: torch.softmax(x, -1), backend='tilefold')(x), x.softmax(-1))\n"
    )
    assert Path(run(python, "used.py").strip()).is_relative_to(tmp_path)


def test_the_version_is_that_of_the_package():
    assert tilefold.__version__ == metadata.version("tilefold") and key_says(tilefold.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert "## 0.1.0" in (ROOT / "CHANGELOG.md").read_text()


def key_says(other: str) -> bool:
    """Whether keys of kernels on disk are those of this version."""
    before = cache.key_of({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "version", lambda: other)
        return cache.key_of({}) == before


def test_kernels_of_another_version_are_not_read():
    assert not key_says("0.0.1")


def test_a_source_that_is_not_installed_has_a_version_too(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version.version() == version.UNKNOWN == tilefold.__version__


@pytest.mark.parametrize(("tag", "found"), [(None, r"0\.1\.dev1\+g"), ("v0.3.0", r"0\.3\.0$")])
def test_the_version_comes_from_tags(tag, found, tmp_path):
    """Of a clone with a commit and a tag, or without any."""
    pytest.importorskip("setuptools_scm")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], *([["tag", tag]] if tag else [])):
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)
    says = [sys.executable, "-m", "setuptools_scm"]
    done = subprocess.run(says, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.match(found, done.stdout.strip())


def _pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", _pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_site_has_every_page_once():
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_the_site_asks_for_what_its_hook_makes():
    hook = (ROOT / "docs/site_pages.py").read_text()
    asked = {m for p in (ROOT / "docs").rglob("*.md") for m in re.findall(r"<!-- made: (\w+) -->", p.read_text())}
    assert asked == {"environment", "commands"} and all(f'("{name}", {name})' in hook for name in asked)


def test_the_index_names_every_design_page():
    index = (ROOT / "docs/index.md").read_text()
    assert [p.name for p in (ROOT / "docs/design").glob("*.md") if f"design/{p.name}" not in index] == []
