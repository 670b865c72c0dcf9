"""How the product's code is counted, and what its counts may be."""

import ast

from code_counts import any_annotations, cpp_statements, long_functions, methods, sources, statements

CODE = '''
"""A module."""

from typing import Any

SIZE: int


class Table:
    """A table: Any."""

    rows: list[Any] = []

    @property
    def first(self) -> Any:
        """The first row."""
        return self.rows[0]

    def add(self, row: dict[str, Any], *more: object) -> None:
        self.rows.append(row)
'''


def test_what_is_counted():
    tree = ast.parse(CODE)
    assert statements(tree) == 7  # import, class, rows, two functions, return, append
    assert any_annotations(tree) == 3
    assert methods(tree) == {"Table": 2}
    assert long_functions(tree, 2) == [("first", 3)]
    assert cpp_statements('int a = 1; // no; more\n/* f(); */ call("a;b", a);\n') == 2


def test_the_parts_of_a_sharded_model_stay_small():
    trees = [ast.parse(text) for text in sources(folders=("zero_compiler/sharded/",)).values()]
    found = {name: count for tree in trees for name, count in methods(tree).items()}
    parts = {"ShardedModel", "ModelIdentity", "RestTiers", "ChunkStorage", "GradientStorage", "CallProtocol"}
    assert parts <= set(found)
    assert not {name: found[name] for name in parts if found[name] > 15}


def test_annotations_say_a_type():
    """Half of what they were before the state of a sharded model had types: 1,013."""
    assert sum(any_annotations(ast.parse(text)) for text in sources().values()) <= 506
