"""What ``canonical_code`` calls the same code."""

import ast

import pytest

from privssl.reproduce.canonical_code import canonical_code


def same(one: str, other: str) -> bool:
    return canonical_code(ast.parse(one)) == canonical_code(ast.parse(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n  y = x\n  return y", "def f(x):\n  z = x\n  return z"),
        ("def f(x):\n  for y in x: print(y)", "def f(x):\n  for z in x: print(z)"),
        ("def f(x):\n  with x as y: y()", "def f(x):\n  with x as z: z()"),
        ("def f():\n  y = 1\n  def g(): return y", "def f():\n  z = 1\n  def g(): return z"),
        ("def f():\n  y = 1\n  return lambda: y", "def f():\n  z = 1\n  return lambda: z"),
        ("def f(x): return [y for y in x if y]", "def f(x): return [z for z in x if z]"),
        ("A = {y: 1 for y in B}", "A = {z: 1 for z in B}"),
        ("def f(x): return (y := x), y", "def f(x): return (z := x), z"),
        ("def f(x): return [(y := v) for v in x], y", "def f(x): return [(z := v) for v in x], z"),
        ("def f():\n  y = 1\n  return f'{y:>3}'", "def f():\n  z = 1\n  return f'{z:>3}'"),
        ("class A:\n  def f(self):\n    y = 1", "class A:\n  def f(self):\n    z = 1"),
        ("def f():\n  'Some words.'\n  return 1", "def f():\n  return 1  # others"),
    ],
)
def test_names_of_local_variables_and_comments_do_not_matter(one: str, other: str) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # another variable is read
        ("def f():\n  y = z = 1\n  return y", "def f():\n  y = z = 1\n  return z"),
        ("def f():\n  y = 1\n  return y", "def f():\n  y = 1\n  return z"),
        ("def f():\n  y = 1\n  return lambda y: y", "def f():\n  y = 1\n  return lambda z: y"),
        ("def f(y):\n  y = 1\n  [y for y in y]", "def f(y):\n  y = 1\n  [y for z in y]"),
        ("def f():\n  y = 1\n  [y for y in y]", "def f():\n  y = 1\n  [z for z in z]"),
        ("def f():\n  y = 1\n  def g(): y = 2\n  return y",
         "def f():\n  y = 1\n  def g(): z = 2\n  return z"),
        # others may use the name
        ("def f(x): return x", "def f(y): return y"),
        ("y = 1", "z = 1"),
        ("class A:\n  y = 1", "class A:\n  z = 1"),
        ("def f(x): x.y = 1", "def f(x): x.z = 1"),
        ("def f():\n  def g(): pass", "def f():\n  def h(): pass"),
        ("def f(): f(y=1)", "def f(): f(z=1)"),
        # a statement may read or bind the name
        ("def f():\n  global y\n  y = 1", "def f():\n  global z\n  z = 1"),
        ("def f():\n  y = 1\n  return locals()", "def f():\n  z = 1\n  return locals()"),
        ("def f():\n  y = 1\n  class A:\n    y = y", "def f():\n  z = 1\n  class A:\n    y = z"),
        ("def f():\n  y = 1\n  def g():\n    nonlocal y\n    y = 2\n  return y",
         "def f():\n  z = 1\n  def g():\n    nonlocal y\n    y = 2\n  return z"),
        # other code
        ("def f():\n  return 1", "def f():\n  return 2"),
        ("def f(x):\n  y = x[0]", "def f(x):\n  y = x[1]"),
        ("def f(x): return [y for y in x]", "def f(x): return {y for y in x}"),
    ],
)  # fmt: skip
def test_other_code_differs_and_names_that_others_may_use_count(one: str, other: str) -> None:
    assert not same(one, other)
