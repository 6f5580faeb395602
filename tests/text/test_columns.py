"""Columns of a terminal stand below each other, whatever they are written in."""

import textwrap

import pytest

from text.columns import padded, shortened, width, wrapped


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("云岭。", 6),
        ("ｶﾞ", 2),
        ("か\u3099", 2),
        ("e\u0301", 1),
        ("\u1112\u1161\u11ab", 2),
        ("😀", 2),
        ("سَلام", 4),
    ],
)
def test_a_wide_character_takes_two_columns_and_a_mark_none(text, n):
    assert width(text) == n
    assert width(padded(text, 9)) == 9


def test_lines_and_beginnings_fit_their_columns():
    text = "云岭县盛产tea-leaves和瓷器，许多人喜欢 it，因为那里有豆腐。か\u3099😀"
    for n in range(12, 40):
        lines = wrapped(text, n)
        assert all(width(line) <= n for line in lines)
        assert min(width(line) for line in lines[:-1]) > n - 12  # a word is not broken
        short = shortened(text, n)
        assert width(short) <= n
        assert short.startswith("云岭") and short.endswith(" [...]")
    assert "".join(wrapped(text, 20)).replace(" ", "") == text.replace(" ", "").replace(
        "か\u3099", "が"
    )


def test_text_of_narrow_letters_is_as_textwrap_has_it():
    text = "The French-speaking country -- Côte d'Ivoire -- lies in Western Africa. " + "x" * 50
    for n in range(13, 60):  # in fewer columns, textwrap.shorten leaves out a whole word
        assert wrapped(text, n) == textwrap.wrap(text, n)
        assert shortened(text, n) == textwrap.shorten(text, n)
    assert shortened("ACGT" * 9, 26) == "ACGTACGTACGTACGTACGT [...]"  # a text without blanks
