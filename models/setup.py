"""Builds the package of the pair: its data. The scripts beside it, which trained it, stay out."""

from setuptools import setup
from setuptools.command.build_py import build_py


class DataOnly(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return []


setup(cmdclass={"build_py": DataOnly})
