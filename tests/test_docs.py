"""The documentation says what the tables say."""

from tests.support.render import ROOT
from tools.choices import PAGE, page_with_tables


def test_the_page_of_choices_shows_the_tables():
    text = PAGE.read_text()
    assert text == page_with_tables(text), "run: python -m tools.choices"


def test_the_readme_names_every_preset():
    text = (ROOT / "README.md").read_text()
    presets = sorted(path.name for path in (ROOT / "presets").glob("*.yml"))
    assert len(presets) >= 9
    assert [name for name in presets if f"[`{name}`](presets/{name})" not in text] == []
