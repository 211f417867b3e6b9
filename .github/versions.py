"""Put the sites of releases beside the one that was just built, and list them all.

    python .github/versions.py _build/html kept/

`kept/` has a folder for each release, named as its tag, with the archive of its site in it. Each
becomes `versions/<tag>/` of the site, and `versions.json` lists them, the newest first.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path


def order(tag: str) -> list[int]:
    """By which tags are sorted: v0.10 comes after v0.9."""
    return [int(number) for number in re.findall(r"\d+", tag)]


def main(site: Path, kept: Path) -> list[dict[str, str]]:
    """Unpack what is kept; the list, as it is written."""
    goal = site / "versions"
    shutil.rmtree(goal, ignore_errors=True)
    listed = json.loads((site / "versions.json").read_text("utf-8"))[:1]
    folders = [path for path in kept.iterdir() if path.is_dir()] if kept.is_dir() else []
    for folder in sorted(folders, key=lambda path: order(path.name), reverse=True):
        archives = sorted(folder.glob("*.zip"))
        if len(archives) != 1 or not re.fullmatch(r"[\w.-]+", folder.name):
            continue
        with zipfile.ZipFile(archives[0]) as archive:
            archive.extractall(goal / folder.name)
        inside = list((goal / folder.name).iterdir())
        if len(inside) == 1 and inside[0].is_dir():  # the archive has one folder with all in it
            for path in inside[0].iterdir():
                path.rename(goal / folder.name / path.name)
            inside[0].rmdir()
        listed.append({"name": folder.name, "path": f"versions/{folder.name}/"})
    (site / "versions.json").write_text(json.dumps(listed) + "\n", "utf-8")
    return listed


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
