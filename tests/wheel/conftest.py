from __future__ import annotations

import pytest

from tests.wheel.installed import Installed, build, install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    return install(build(folder), folder / "environment")
