"""Python code in a form that is the same for code that does the same by other words.

Comments, docstrings, layout, the version of Python and the names of local variables do not matter.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping

Names = Mapping[str, str]  # of local variables: a name, and its number
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
#: Statements that bind names otherwise than by a ``Name``, or in another scope.
_KEEP_NAMES = (ast.ClassDef, ast.Global, ast.Nonlocal, ast.MatchAs, ast.MatchStar, ast.MatchMapping)
#: Functions that see the names of local variables.
_READ_NAMES = {"locals", "vars", "dir", "eval", "exec"}


def canonical_code(module: ast.Module) -> str:
    """Return the code of a module as text."""
    return str(_Writer().convert(module, {}))


class _Writer:
    def __init__(self) -> None:
        self._numbers = map("#{}".format, itertools.count())  # no identifiers

    def convert(self, node: object, names: Names) -> object:
        """Convert a tree to tuples, without docstrings and empty fields."""
        if isinstance(node, list):
            return tuple(self.convert(item, names) for item in node)
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name):
            return ("Name", names.get(node.id, node.id), type(node.ctx).__name__)
        if isinstance(node, _Comprehension):
            return self._convert_comprehension(node, names)
        inner = self._number_locals(node, names) if isinstance(node, _Function) else names
        fields = []
        for field, value in ast.iter_fields(node):
            if field == "body" and isinstance(value, list):
                value = [item for item in value if not _is_text(item)]  # docstrings, also of keys
            if value not in (None, []) and field != "kind":
                fields.append((field, self.convert(value, inner if field == "body" else names)))
        return (type(node).__name__, *fields)

    def _convert_comprehension(self, node: _Comprehension, names: Names) -> object:
        targets = _find_stored_names(generator.target for generator in node.generators)
        inner = self._number(targets, names)
        values = [
            (field, self.convert(value, inner))
            for field, value in ast.iter_fields(node)
            if field != "generators"
        ]
        generators = [
            # the first iterable is evaluated outside
            (self.convert(part.target, inner), self.convert(part.iter, inner if place else names),
             self.convert(part.ifs, inner), part.is_async)
            for place, part in enumerate(node.generators)
        ]  # fmt: skip
        return (type(node).__name__, *values, *generators)

    def _number_locals(self, function: _Function, names: Names) -> Names:
        """The names that the body of a function sees: numbers in place of its local variables."""
        arguments = function.args
        parameters = {
            argument.arg
            for argument in (
                *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                arguments.vararg, arguments.kwarg,
            )
            if argument is not None
        }  # fmt: skip
        body = function.body if isinstance(function.body, list) else [function.body]
        if _must_keep_names(body):
            hidden = parameters | set(_find_stored_names(body)) | _find_other_bindings(body)
            return {name: number for name, number in names.items() if name not in hidden}
        other = parameters | _find_other_bindings(body)
        seen = {name: number for name, number in names.items() if name not in other}
        return self._number((name for name in _find_stored_names(body) if name not in other), seen)

    def _number(self, new: Iterable[str], names: Names) -> Names:
        return {**names, **{name: next(self._numbers) for name in dict.fromkeys(new)}}


def _walk_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes in order, without what lies in functions and comprehensions inside, except for
    assignment expressions in comprehensions: they bind outside."""
    for node in nodes:
        yield node
        if isinstance(node, _Comprehension):
            yield from (
                child.target for child in ast.walk(node) if isinstance(child, ast.NamedExpr)
            )
        elif not isinstance(node, _Function | ast.ClassDef):
            yield from _walk_scope(ast.iter_child_nodes(node))


def _find_stored_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in _walk_scope(nodes):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


def _find_other_bindings(body: Iterable[ast.AST]) -> set[str]:
    """Names that a function binds as functions, imports or exceptions: they stay."""
    bound = set()
    for node in _walk_scope(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _must_keep_names(body: Iterable[ast.AST]) -> bool:
    """Return whether a function has, or may have, other bindings than this module knows."""
    return any(
        isinstance(node, _KEEP_NAMES) or (isinstance(node, ast.Name) and node.id in _READ_NAMES)
        for statement in body
        for node in ast.walk(statement)
    )


def _is_text(node: object) -> bool:
    """Return whether a statement is only a string, which has no effect."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
