"""Tweets of Sentiment140 (Go, Bhayani and Huang 2009)."""

import html
from pathlib import Path

import numpy as np

from privssl.data.csv_rows import Texts, read_texts
from privssl.errors import DataError

TWEET_CLASSES = ("negative", "positive")  # 0 and 1 in the files


def read_sent140(root: Path) -> Texts:
    """Read the columns ``label``, 0 or 1, and ``text``.

    HTML entities are resolved. Only the first of equal tweets is kept, because one record has one
    account.
    """
    folder = root if (root / "train.csv").is_file() else root / "sent140"
    if not (folder / "train.csv").is_file():
        raise DataError(
            f"sent140: no {folder / 'train.csv'}. Put train.csv and test.csv there, with the "
            "columns label (0 negative, 1 positive) and text, or name their folder in data.root"
        )
    texts = read_texts(folder, text="text", label="label")
    if texts.class_names != ("0", "1"):
        raise DataError(f"{folder}: labels are {', '.join(texts.class_names)}, not 0 and 1")
    train, test = (tuple(map(clean_tweet, part)) for part in (texts.x_train, texts.x_test))
    indices = np.unique(np.array(train, dtype=object), return_index=True)[1]
    indices.sort()
    return Texts(
        tuple(train[i] for i in indices), texts.y_train[indices], test, texts.y_test, TWEET_CLASSES
    )


def clean_tweet(text: str) -> str:
    """Return a tweet without HTML entities and repeated spaces.

    >>> clean_tweet("so  good &lt;3")
    'so good <3'
    """
    return " ".join(html.unescape(text).split())
