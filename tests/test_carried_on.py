"""Maintenance of the site: versions, and the form for a wrong number."""

import json
import re
import runpy
import subprocess
import zipfile
from urllib.parse import parse_qs, urlsplit

import pytest

from shardlab.common import show

ROOT = show.ROOT


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "book/_ext"))
    return __import__


def test_a_wrong_number_is_reported_with_page_and_build(extension):
    repository = extension("repository")
    said = repository.describe_build(ROOT)
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    assert re.fullmatch(rf"[\d.]+, commit {head}, \d{{4}}-\d\d-\d\d", said)
    for host, path, body in (
        ("https://github.com/o/n", "/o/n/issues/new", "body"),
        ("https://gitlab.com/o/n", "/o/n/-/issues/new", "issue[description]"),
    ):
        published = repository.Repository(host, "main")
        link = urlsplit(repository.make_issue_url(published, "lessons/zero", said))
        asked = parse_qs(link.query)
        assert link.path == path
        assert f"Page: lessons/zero\nBuild: {said}\nSection:\n" in asked[body][0]


def test_sites_of_releases_stand_beside_the_newest(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/versions.json").write_text('[{"name": "0.3.0", "path": ""}]')
    for tag in ("v0.2", "v0.10", "v0.9", "no-site"):
        (tmp_path / "kept" / tag).mkdir(parents=True)
        if tag != "no-site":
            with zipfile.ZipFile(tmp_path / "kept" / tag / "course.zip", "w") as archive:
                archive.writestr("course/index.html", tag)
    main = runpy.run_path(str(ROOT / ".github/versions.py"))["main"]
    for _ in range(2):  # once more over its own result
        listed = main(tmp_path / "site", tmp_path / "kept")
    assert [one["name"] for one in listed] == ["0.3.0", "v0.10", "v0.9", "v0.2"]
    for one in listed[1:]:
        page = tmp_path / "site" / one["path"] / "index.html"
        assert page.read_text() == one["name"]
    assert json.loads((tmp_path / "site/versions.json").read_text()) == listed
