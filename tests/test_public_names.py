"""The package itself has the names that users type, and its layers the types of what these give."""

import ast
import functools
import inspect
import pydoc
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import fewshot_callbacks
from fewshot_callbacks import callbacks, functional
from fewshot_callbacks.engine.relevance import Lists
from fewshot_callbacks.functional import Interval, Moments
from tests.integration_packages import skipped_without_integrations
from tests.messages import refused

PACKAGE = "fewshot_callbacks"
ROOT = Path(__file__).parents[1]
LAYERS = (
    "callbacks",
    "data",
    "errors",
    "functional",
    "integrations",
    "losses",
    "metrics",
    "plots",
    "protonet",
    "report",
    "storage",
)
NAMES = fewshot_callbacks.__all__

# Where users read what they construct and call. The reference in docs/api lists every name, also those that nobody types.
SHOWN = "\n".join(
    path.read_text(encoding="utf-8")
    for pattern in ("README.md", "docs/**/*.md", "examples/**/*.py", "examples/*.ipynb")
    for path in sorted(ROOT.glob(pattern))
    if path.parent.name != "api"
)
# Users add keys to it.
CONSTANTS = {"DEFAULT_METRICS"}


def public() -> dict[str, Any]:
    """Return the public names and what they name."""
    return {name: getattr(fewshot_callbacks, name) for name in NAMES}


def in_layers() -> dict[str, Any]:
    """Return what the layers export."""
    layers = [import_module(f"{PACKAGE}.{layer}") for layer in LAYERS]
    return {name: getattr(layer, name) for layer in layers for name in layer.__all__}


def is_of_package(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] == PACKAGE


def classes_in(annotation: Any) -> Iterator[type]:
    """List the classes of the package in a type, such as `Interval` of `dict[str, Interval] | None`."""
    if isinstance(annotation, list | tuple):  # the arguments of a Callable
        for part in annotation:
            yield from classes_in(part)
    elif inspect.isclass(annotation) and is_of_package(annotation):
        yield annotation
    yield from (found for part in get_args(annotation) for found in classes_in(part))


@functools.cache
def source_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


@functools.cache
def names_for_type_checkers(module: str) -> dict[str, Any]:
    """Return what a module imports for type checkers alone."""
    names: dict[str, Any] = {}
    for block in source_of(module).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(block.body, []), module, "exec"), names)
    return names


def hints(thing: Any) -> dict[str, Any]:
    return get_type_hints(thing, localns=names_for_type_checkers(thing.__module__))


def function_of(member: Any) -> Any:
    """Return the function behind a method, a property or a cached property; None behind anything else."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member if inspect.isfunction(member) else None


def annotated_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes that `__init__` annotates, and their types."""
    names = vars(sys.modules[kind.__module__]) | names_for_type_checkers(kind.__module__)
    [definition] = [
        node
        for node in ast.walk(source_of(kind.__module__))
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ]
    return {
        node.target.attr: eval(ast.unparse(node.annotation), names)
        for method in definition.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute)
    }


def given_by(thing: Any) -> dict[str, Any]:
    """Return the type of what each public member of a class gives, or of what a function returns."""
    if inspect.isfunction(thing):
        return {"()": hints(thing).get("return")}
    types: dict[str, Any] = {}
    for kind in filter(is_of_package, getattr(thing, "__mro__", ())):
        types |= {name: hints(kind)[name] for name in inspect.get_annotations(kind)} | annotated_attributes(kind)
        functions = {name: function_of(member) for name, member in vars(kind).items()}
        types |= {name: hints(each).get("return") for name, each in functions.items() if each and name[0] != "_"}
    return {name: annotation for name, annotation in types.items() if not name.startswith("_")}


def not_public(things: Mapping[str, Any], known: Collection[str]) -> dict[str, set[str]]:
    """Return the classes that these things give and that are not known, each with who gives it."""
    missing: dict[str, set[str]] = {}
    for name, thing in things.items():
        for member, annotation in given_by(thing).items():
            for kind in classes_in(annotation):
                if kind.__name__ not in known:
                    missing.setdefault(kind.__name__, set()).add(f"{name}.{member}")
    return missing


def is_constructed(name: str) -> bool:
    """Whether a page or an example constructs, calls, subclasses or catches it."""
    return re.search(rf"\b{name}(\.\w+)?\(|\bclass \w+\({name}\)|\bexcept {name}\b", SHOWN) is not None


def is_named(name: str) -> bool:
    """Whether a page names it as code."""
    return f"`{name}" in SHOWN


def given_classes(things: Mapping[str, Any]) -> set[str]:
    """Return the names of the classes that these things give."""
    return {
        kind.__name__
        for name, thing in things.items()
        for annotation in given_by(thing).values()
        for kind in classes_in(annotation)
        if kind.__name__ != name
    }


def belongs_to_a_layer(things: Mapping[str, Any]) -> set[str]:
    """Return the names that no user types: no page shows them, or other things give them and no page constructs them."""
    given = given_classes(things)
    typed = {name for name in things if is_constructed(name) or (is_named(name) and name not in given)}
    return {name for name, thing in things.items() if name not in typed or not callable(thing)} - CONSTANTS


def test_dir_lists_all_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert "RetrievalMonitor" in NAMES
    assert set(NAMES) <= set(dir(fewshot_callbacks))
    with refused(AttributeError, "fewshot_callbacks", "nothing"):
        _ = fewshot_callbacks.nothing


def test_what_layers_give_is_exported_by_a_layer() -> None:
    with skipped_without_integrations():
        everything = in_layers()
    assert not_public(everything, everything) == {}
    assert set(NAMES) <= set(everything)


def test_users_type_each_name_of_the_package() -> None:
    assert belongs_to_a_layer(public()) == set()


def planted() -> dict[str, tuple[Lists, ...]]:
    return {}


class Planted:
    moments: Moments

    def __init__(self) -> None:
        self.options: Lists | None = None

    @property
    def interval(self) -> Interval:
        return Interval(0.0, 1.0)

    @functools.cached_property
    def more(self) -> Lists:
        return Lists.none(1)

    def _private(self) -> Lists:
        return Lists.none(1)


def test_a_planted_result_that_no_layer_exports_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with skipped_without_integrations():
        exported = in_layers()
    assert not_public({"planted": planted}, exported) == {"Lists": {"planted.()"}}
    monkeypatch.setattr(Planted, "__module__", f"{PACKAGE}.planted")
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.planted", sys.modules[__name__])
    found = not_public({"Planted": Planted}, exported.keys() - {"Moments"})
    assert found == {"Moments": {"Planted.moments"}, "Lists": {"Planted.options", "Planted.more"}}


@pytest.mark.parametrize("name", ["Slices", "Interval", "RetrievalOptions", "METRICS"])
def test_a_planted_name_that_no_user_types_is_found(name: str) -> None:
    assert belongs_to_a_layer(public() | {name: getattr(functional, name)}) == {name}


def documented() -> set[str]:
    """Return the names that the pages of docs/api list, one by one or as a whole layer."""
    names: set[str] = set()
    for page in (ROOT / "docs/api").glob("*.md"):
        for entry in page.read_text(encoding="utf-8").split(f"::: {PACKAGE}.")[1:]:
            name = entry.split()[0]
            is_single = name in NAMES or "." in name
            names |= {name.rpartition(".")[2]} if is_single else set(import_module(f"{PACKAGE}.{name}").__all__)
    return names


def test_the_pages_list_the_public_names() -> None:
    with skipped_without_integrations():
        exported = in_layers()
    assert {*NAMES, *exported} - documented() == set()


def test_the_pages_list_the_layer_of_each_name_of_the_package() -> None:
    table = (ROOT / "docs/api/index.md").read_text(encoding="utf-8").partition("## Names of the package itself")[2]
    listed = {
        layer: set(re.findall(r"`(\w+)`", names))
        for layer, names in re.findall(rf"^\| `{PACKAGE}\.(\w+)` \| (.*) \|$", table, re.MULTILINE)
    }
    assert listed == {layer: set(import_module(f"{PACKAGE}.{layer}").__all__) & set(NAMES) for layer in listed}
    assert set().union(*listed.values()) == set(NAMES)


@pytest.mark.parametrize("name", sorted({*NAMES, *functional.__all__, *callbacks.__all__}))
def test_help_works(name: str) -> None:
    [layer, *_] = [each for each in (fewshot_callbacks, functional, callbacks) if name in each.__all__]
    words = pydoc.render_doc(getattr(layer, name), renderer=pydoc.plaintext)
    assert name in words or name.isupper() or name == "LabelSource"  # constants and a union have the help of their type
