"""The browser libraries that `headrace view` brings along are the published ones, with their licences."""

import hashlib
import json
from importlib.resources import files

VENDOR = files("headrace.tools") / "view" / "static" / "vendor"


def test_vendored_files_have_the_digests_of_the_manifest_and_no_other_file_is_there():
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    listed = {entry["file"]: entry["sha256"] for package in manifest for entry in package["files"]}
    present = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.iterdir()}
    del present["manifest.json"]
    assert present == listed


def test_every_vendored_package_has_a_version_a_licence_and_the_text_of_it():
    for package in json.loads((VENDOR / "manifest.json").read_text()):
        assert package["version"].split(".")[0].isdigit() and len(package["tarball_sha256"]) == 64
        text = (VENDOR / f"LICENSE-{package['package']}.txt").read_text()
        assert {"MIT": "The MIT License", "Apache-2.0": "Apache License"}[package["license"]] in text
