"""The table of a comparison for a paper: LaTeX with booktabs."""

import re
from collections.abc import Sequence

from privssl.compare.paired import Difference, p_heading
from privssl.compare.table import Row, cells, notes

ESCAPES = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "<": r"$<$", ">": r"$>$", **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip


def escape(text: str) -> str:
    r"""
    >>> print(escape("a_1 ± 5%"))
    a\_1 $\pm$ 5\%
    """
    return re.sub(r"[\\~^±<>&%$#_{}]", lambda sign: ESCAPES[sign[0]], text)


def latex(rows: Sequence[Row], found: Sequence[Difference]) -> str:
    """A row per config; the best accuracy, chosen on test rows, is left out. Notes are comments.
    ``found``: differences from the first config, of those that can be paired."""
    headings = ["config", "algorithm", "labels", "rounds", "final test accuracy", "epsilon"]
    paired = {one.config: one for one in found}
    lines = []
    for of in rows:
        named = cells(of, rows[0].config)
        line = [*named[:5], named[9] + (" (DIFFERENT split)" if of.differs else "")]
        if found:
            one = paired.get(of.config)
            line += [one.interval(), one.p_text()] if one else ["", ""]
        lines.append(" & ".join(map(escape, line)) + r" \\")
    if found:
        headings += [f"difference from {rows[0].config}", p_heading(found)]
    # A note of several lines would leave the comment.
    comments = [f"% {' '.join(note.split())}" for note in notes(rows)]
    return "\n".join(
        [
            *(*comments, r"% \usepackage{booktabs}"),
            r"\begin{tabular}{llrr" + "l" * (len(headings) - 4) + "}",
            *(r"\toprule", " & ".join(map(escape, headings)) + r" \\", r"\midrule"),
            *(*lines, r"\bottomrule", r"\end{tabular}", ""),
        ]
    )
