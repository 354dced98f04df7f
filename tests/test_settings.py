"""Every setting has a form, an example of it, and a row in the README."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tlcache import config
from tlcache.settings import FIELDS, Settings, Unfit, written

README = Path(__file__).parents[1] / "README.md"


def test_the_fields_are_the_attributes_of_the_settings():
    names = [field.name for field in dataclasses.fields(Settings)]
    assert names == [*FIELDS, "origins", "shadowed"]
    for name in names:
        assert f"        {name}: " in (Settings.__doc__ or "")


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_the_example_of_a_field_is_of_its_form(field):
    field.parse(config._table("", f"value = {field.example}".encode())["value"])


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
@pytest.mark.parametrize("value", [None, [], {}, 1.5, "", "\x00", "a\nb", "\ud800"])
def test_no_field_takes_what_is_of_no_form(field, value):
    with pytest.raises(Unfit):
        field.parse(value)


def test_the_readme_has_a_row_for_each_setting_and_no_other():
    section = README.read_text().split("## Configuration", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+?) \| `(\w+)` \|", section, re.MULTILINE)
    assert rows == [
        (field.name, field.example, field.default, field.variable) for field in FIELDS.values()
    ]


def test_a_value_is_written_for_people():
    assert written(None) == "none"
    assert written((Path("/a"), Path("/b"))) == "/a, /b"
