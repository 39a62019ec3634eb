"""What a package offers can be imported, and says what it is."""

from __future__ import annotations

import importlib

import pytest

PACKAGES = ("motrt.engines", "motrt.runtime", "motrt.export", "motrt.calibration")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    for name in module.__all__:
        found = getattr(module, name)
        assert not callable(found) or found.__doc__, name


@pytest.mark.parametrize("package", ["motrt.export", "motrt.calibration"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing
