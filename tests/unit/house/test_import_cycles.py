"""No module imports itself by way of others, imports inside functions and for types included."""

import ast
from pathlib import Path

import networkx as nx

SOURCE = Path(__file__).resolve().parents[3] / "src"


def draw_imports(source: Path) -> nx.DiGraph:
    """Module -> module that it imports, wherever in the file the import stands."""
    names = {
        path: ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in source.rglob("*.py")
    }
    modules = set(names.values())
    graph = nx.DiGraph()
    for path, name in names.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found = (inside & modules) | ({node.module} if inside - modules else set())
            else:
                continue
            graph.add_edges_from((name, one) for one in found & modules if one != name)
    return graph


def list_cycles(source: Path) -> list[list[str]]:
    return [
        sorted(cycle) for cycle in nx.strongly_connected_components(draw_imports(source)) if len(cycle) > 1
    ]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert list_cycles(SOURCE) == []


def test_a_cycle_through_a_function_is_seen(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import two\n")
    (tmp_path / "two.py").write_text("def late():\n    from one import name\n")
    assert list_cycles(tmp_path) == [["one", "two"]]
