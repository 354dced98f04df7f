"""Variables that switch something on or off."""

from __future__ import annotations

import pytest

from tlcache import switches


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *((value, True) for value in ("1", "true", "TRUE", "yes", " On ")),
        *((value, False) for value in ("0", "false", "No", "off")),
        *((value, None) for value in (None, "", " ", "2", "maybe")),
    ],
)
def test_a_variable_says_on_or_off_or_nothing(monkeypatch, value, said):
    monkeypatch.delenv("ANY_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("ANY_SWITCH", value)
    assert switches.said("ANY_SWITCH") is said
