"""Packages: `shim`, and the repository's dashboards/ as its data. The metadata is in pyproject.toml."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

DASHBOARDS = "shim.dashboards"


class BuildPy(build_py):
    """Leaves the generator out: it needs Grafana's SDK, and what it makes is in the wheel."""

    def find_package_modules(self, package, package_dir):
        return [] if package == DASHBOARDS else super().find_package_modules(package, package_dir)


setup(
    packages=[*find_packages(include=["shim", "shim.*"]), DASHBOARDS],
    package_dir={DASHBOARDS: "dashboards"},
    package_data={DASHBOARDS: ["*.md", "generated/*", "tests/*.yaml", "deploy/**/*"]},
    cmdclass={"build_py": BuildPy},
)
