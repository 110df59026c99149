"""Words in messages that depend on other words: indefinite articles, and singular or plural nouns and verbs."""

from __future__ import annotations

import re

# Words that begin with a vowel and sound like "you" or "one".
_CONSONANT_SOUND = re.compile(r"(u(ni|s[aeiou]|int)|eu|one\b)", re.IGNORECASE)
# Initials whose first letter is spoken with a vowel: the N of ndarray and NDFrame, the H of HFDataset.
_VOWEL_SOUND = re.compile(r"[FHLMNRSX][A-Z]|nd")


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article.

    Examples:
        >>> [with_article(noun) for noun in ("int", "list", "evaluation", "UserDict", "ndarray")]
        ['an int', 'a list', 'an evaluation', 'a UserDict', 'an ndarray']
    """
    has_vowel = noun[:1].lower() in tuple("aeiou") and not _CONSONANT_SOUND.match(noun)
    return f"{'an' if has_vowel or _VOWEL_SOUND.match(noun) else 'a'} {noun}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which is given in the singular.

    Examples:
        >>> counted(1, "box"), counted(2000, "box"), counted(3, "file"), counted(0, "query"), counted(2, "key")
        ('1 box', '2,000 boxes', '3 files', '0 queries', '2 keys')
        >>> counted(4, "batch"), counted(4, "epoch")
        ('4 batches', '4 epochs')
    """
    return f"{number:,} {noun if number == 1 else _plural(noun)}"


def verb(number: int, singular: str, plural: str) -> str:
    """Return the singular or the plural of a verb or another word, depending on the number.

    Examples:
        >>> verb(1, "is", "are"), verb(0, "is", "are")
        ('is', 'are')
    """
    return singular if number == 1 else plural


def none_has(number: int, noun: str) -> str:
    """Return the first words of a sentence in which none of a number of things has something.

    Examples:
        >>> none_has(1, "query"), none_has(3, "query")
        ('the only query lacks', 'none of the 3 queries has')
    """
    return f"the only {noun} lacks" if number == 1 else f"none of the {counted(number, noun)} has"


def _plural(noun: str) -> str:
    """Return the plural of a noun, whose last word gets the ending."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    has_hiss = noun.endswith(("s", "x", "ch", "sh")) and not noun.endswith("epoch")
    return noun + ("es" if has_hiss else "s")
