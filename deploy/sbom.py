"""`python3 sbom.py ENVIRONMENT`: prints what an image is made of, its Python and Debian packages, as CycloneDX JSON."""

import json
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

DEBIAN = Path("/usr/share/debian-packages.tsv")  # written by the Dockerfile: package, version, architecture
Component = dict[str, object]


def python_package(package: Distribution) -> Component:
    name = package.metadata["Name"]
    found = component(name, package.version, f"pkg:pypi/{name.lower().replace('_', '-')}@{package.version}")
    if expression := package.metadata.get("License-Expression"):
        found["licenses"] = [{"expression": expression}]
    return found


def debian_package(line: str) -> Component:
    name, version, architecture = line.split("\t")
    return component(name, version, f"pkg:deb/debian/{name}@{version}?arch={architecture}&distro=bookworm")


def component(name: str, version: str, purl: str) -> Component:
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def bill(environment: Path) -> Component:
    """Return the bill of materials of an environment, and of the Debian below it if that has said what it is."""
    packages = distributions(path=[str(folder) for folder in environment.glob("lib/python3*/site-packages")])
    parts = [python_package(package) for package in packages]
    parts += [debian_package(line) for line in DEBIAN.read_text().splitlines()] if DEBIAN.exists() else []
    parts.sort(key=lambda part: str(part["purl"]))
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": parts}


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1])), indent=1))
