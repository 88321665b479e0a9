"""Descriptions of config keys, read from the code that defines them."""

import ast
import functools
import inspect
import textwrap

#: The meaning of common keys, if the code has no comment.
USUAL = {
    "rounds": "rounds of training",
    "batch_size": "rows in a batch",
    "momentum": "of SGD",
    "generator_width": "scales the channels of G and D",
    "strong": "augmentation of the view that is trained on",
    "weak": "augmentation of the view that is labelled, and of labelled rows",
    "weight_decay": "l2 penalty of SGD",
    "profile": "defaults of the authors' code, or of the paper",
    "weight_rate": "rate of the schedule, per round",
    "filters": "filters of the encoder",
    "vote_rounds": "rounds from the answers of support agents",
    "self_training_rounds": "rounds on pseudo-labels after that",
    "local_steps": "training steps of an agent in a round",
}


def descriptions(section: type) -> dict[str, str]:
    """Return the description of each field of a dataclass.

    Its docstring, else the comments above and beside it, else that of ``USUAL``, else an empty
    string.
    """
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        texts |= {
            name: text or texts.get(name, "") for name, text in _describe_own_fields(kind).items()
        }
    return {name: (text or USUAL.get(name, "")).replace("``", "`") for name, text in texts.items()}


@functools.cache  # sections share their bases
def _describe_own_fields(section: type) -> dict[str, str]:
    """Return the same for fields that are not inherited; empty without a description."""
    lines = textwrap.dedent(inspect.getsource(section)).splitlines()
    [tree] = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for node, next_node in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        match next_node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                texts[node.target.id] = " ".join(text.split())
            case _:
                texts[node.target.id] = _read_comments(lines, node)
    return texts


def _read_comments(lines: list[str], node: ast.AnnAssign) -> str:
    """Return the comment lines above a field and the comment at its end, as one sentence."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    first, texts = node.lineno - 1, [lines[node.end_lineno - 1][node.end_col_offset :]]
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
        texts.insert(0, lines[first])
    return " ".join(" ".join(texts).replace("#", " ").split())
