"""The documentation says what the tables say."""

from tools.choices import PAGE, page_with_tables


def test_the_page_of_choices_shows_the_tables():
    text = PAGE.read_text()
    assert text == page_with_tables(text), "run: python -m tools.choices"
