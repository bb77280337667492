"""For all tests: pytest must not take the root, which is the package `moa_spec`, for a package of tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


class RootIsNoTestPackage:
    """Otherwise pytest imports the root's `__init__.py` a second time, under the folder's name, and a second drafter
    class takes the first one's place in `AutoModelForCausalLM`."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsNoTestPackage())
