"""A configuration in Python, read from its syntax tree: the result of one of its functions.

Nothing is run. The reader follows constants, arithmetic on them, attributes, conditions that it can resolve, and
functions of the same files; any other call becomes an object with the name of its function.

Also objects that a configuration in Python makes, as far as its text describes them.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from piper_ray.launches.launch import causes, text_beside, unseen
from piper_ray.model.errors import UsageError


@dataclass
class Made:
    """The result of a call, or a name defined elsewhere. name: with its dots, as written.

    fields: keyword arguments, and attributes that are set afterwards.
    """

    name: str
    arguments: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)
    is_called: bool = True

    def under(self, name: str) -> object:
        """A field; a field that is not set becomes an object on which fields can be set."""
        if name not in self.fields:
            if not self.is_called:
                return Made(f"{self.name}.{name}", is_called=False)
            self.fields[name] = Made(f"{self.name}.{name}", is_called=False)
        return self.fields[name]


def as_document(value: object) -> object:
    """The value as a document of plain tables. A name defined elsewhere becomes its text."""
    if isinstance(value, Made):
        if not value.fields:
            return value.name if not value.is_called else {"made_by": value.name, "arguments": list(value.arguments)}
        named = {"made_by": value.name, "arguments": list(value.arguments)} if value.is_called else {}
        return {name: as_document(one) for name, one in value.fields.items()} | named
    if isinstance(value, Mapping):
        return {str(name): as_document(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_document(one) for one in value]
    return value


def either(one: object, other: object, line: int) -> object:
    """A value after one of two branches, when it is unknown which one ran. line: of the condition."""
    if isinstance(one, Made) and isinstance(other, Made) and one.name == other.name:
        names = dict.fromkeys((*one.fields, *other.fields))
        kept = {name: either(one.fields.get(name, _MISSING), other.fields.get(name, _MISSING), line) for name in names}
        one.fields = {name: value for name, value in kept.items() if value is not _MISSING}
        return one
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {name: either(value, other[name], line) for name, value in one.items()}
    if type(one) is type(other) and one == other:
        return one
    return unseen(f"a value that depends on line {line}")


_MISSING = object()


def copied(variables: Mapping[str, object]) -> dict[str, object]:
    """A deep copy of variables, which can change independently."""
    return deepcopy(dict(variables))


_MOST_NESTED = 24
_MOST_STATEMENTS = 20_000
_ELSEWHERE = "is not read: its file is neither here nor in a folder above; put this file into a clone, or set more here"
_NOT_FOLLOWED = "registry"
"""Functions with such names look up a model; their arguments name it."""

_HARMLESS = ("default_adamw", "decoder_vocab_size")
"""Functions of torchtitan that set nothing of time or memory: rates of AdamW, the size of the vocabulary."""

_CALCULATED: dict[type[ast.operator], Callable[[int | float, int | float], int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[object, object], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_ORDERED: dict[type[ast.cmpop], Callable[[int | float, int | float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


@dataclass
class _ReadModule:
    """A file's functions, imported names, and constants."""

    path: Path | None
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    variables: dict[str, object] = field(default_factory=dict)


class _Returns(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class PythonConfig:
    """The result of a function of the file, as tables. notes: calls that the reader did not follow."""

    document: Mapping[str, object]
    notes: tuple[str, ...]


def is_python(text: str) -> bool:
    """Whether the text is Python that defines functions or sets fields."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        isinstance(one, ast.FunctionDef) or (isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Attribute))
        for one in tree.body
    )


def read_python(text: str, path: Path | None, recipe: str | None, wanted: Callable[[object], bool]) -> PythonConfig:
    """The configuration that ``recipe`` names: a function or a variable of the file; None: the only one.

    wanted: whether a document is a launch. Raises UsageError if there is none, or several.
    """
    reader = _Reader()
    module = reader.module(text, path)
    if recipe is not None:
        if recipe not in module.functions and recipe not in module.variables:
            raise UsageError(f"recipe {recipe}: the file has none of that name; it has {_some(module.functions)}")
        document = _named(reader, module, recipe)
        if not isinstance(document, Mapping):
            raise UsageError(f"recipe {recipe}: returns no configuration that can be read")
        return PythonConfig(document, tuple(dict.fromkeys(reader.notes)))
    found: dict[str, tuple[Mapping[str, object], tuple[str, ...]]] = {}
    top = as_document({name: one for name, one in module.variables.items() if isinstance(one, Made)})
    if isinstance(top, Mapping) and not module.functions and wanted(top):
        return PythonConfig(top, tuple(reader.notes))
    for name in (*module.functions, *module.variables):
        if not name.startswith("_"):
            reader.notes.clear()
            document = _named(reader, module, name)
            if isinstance(document, Mapping) and wanted(document):
                found[name] = document, tuple(dict.fromkeys(reader.notes))
    if not found:
        raise UsageError(
            "no function returns parallel sizes: put imported files here, or set sizes in a copy of the file"
        )
    if len(found) > 1:
        raise UsageError(f"the file has {len(found)} recipes; say which with --recipe: {_some(found)}")
    (document, notes) = next(iter(found.values()))
    return PythonConfig(document, notes)


def _named(reader: _Reader, module: _ReadModule, name: str) -> object:
    if name in module.variables:
        return as_document(module.variables[name])
    function = module.functions[name]
    given = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    required = given[: len(given) - len(function.args.defaults)]
    handed = {argument: Made(argument) for argument in required}
    value = reader.call(function, module, [], dict(handed), 0)
    if value is None and handed:
        value = next(iter(handed.values()))
    return as_document(value)


class _Reader:
    def __init__(self) -> None:
        self.modules: dict[Path, _ReadModule] = {}
        self.notes: list[str] = []
        self.statements = 0

    def module(self, text: str, path: Path | None) -> _ReadModule:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None)
            raise UsageError(f"{path or 'launch'}: not Python{f' (line {line})' if line else ''}") from None
        module = _ReadModule(path)
        if path is not None:
            self.modules[path] = module
        for one in tree.body:
            if isinstance(one, ast.FunctionDef):
                module.functions[one.name] = one
        with suppress(_Returns):
            self.all(tree.body, module, module.variables, 0)
        return module

    def call(
        self, function: ast.FunctionDef, module: _ReadModule, given: list[object], named: dict[str, object], depth: int
    ) -> object:
        """The result of a function of a file; None if it returns nothing."""
        arguments = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        variables: dict[str, object] = {}
        defaults = function.args.defaults
        for name, default in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True):
            variables[name] = self.value(default, module, {}, depth)
        for one, usual in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            variables[one.arg] = None if usual is None else self.value(usual, module, {}, depth)
        variables |= dict(zip(arguments, given, strict=False))
        known = {*arguments, *(one.arg for one in function.args.kwonlyargs)}
        variables |= {name: value for name, value in named.items() if name in known}
        if function.args.kwarg is not None:
            variables[function.args.kwarg.arg] = {name: one for name, one in named.items() if name not in known}
        for name in arguments:
            variables.setdefault(name, unseen(name))
        try:
            self.all(function.body, module, variables, depth + 1)
        except _Returns as ending:
            return ending.value
        return None

    def all(self, body: list[ast.stmt], module: _ReadModule, variables: dict[str, object], depth: int) -> None:
        for one in body:
            self.statement(one, module, variables, depth)

    def statement(self, one: ast.stmt, module: _ReadModule, variables: dict[str, object], depth: int) -> None:
        self.statements += 1
        if self.statements > _MOST_STATEMENTS or depth > _MOST_NESTED:
            raise UsageError("the configuration's loops are too long to follow")
        if isinstance(one, ast.Assign):
            value = self.value(one.value, module, variables, depth)
            for target in one.targets:
                self.assign(target, value, module, variables, depth)
        elif isinstance(one, ast.AnnAssign) and one.value is not None:
            self.assign(one.target, self.value(one.value, module, variables, depth), module, variables, depth)
        elif isinstance(one, ast.AugAssign):
            before = self.value(ast.parse(ast.unparse(one.target), mode="eval").body, module, variables, depth)
            by = self.value(one.value, module, variables, depth)
            self.assign(one.target, _calculated(one.op, before, by, one), module, variables, depth)
        elif isinstance(one, ast.Return):
            raise _Returns(None if one.value is None else self.value(one.value, module, variables, depth))
        elif isinstance(one, ast.Expr):
            self.value(one.value, module, variables, depth)
        elif isinstance(one, ast.If):
            self.branch(one, module, variables, depth)
        elif isinstance(one, ast.For):
            self.loop(one, module, variables, depth)
        elif isinstance(one, (ast.With, ast.Try)):
            self.all(one.body, module, variables, depth)
        elif isinstance(one, ast.ImportFrom):
            for name in one.names:
                module.imported[name.asname or name.name] = ("." * one.level + (one.module or ""), name.name)
        elif isinstance(one, ast.FunctionDef) and depth:
            variables[one.name] = one

    def branch(self, one: ast.If, module: _ReadModule, variables: dict[str, object], depth: int) -> None:
        test = self.value(one.test, module, variables, depth)
        if not causes(test) and not isinstance(test, Made):
            self.all(one.body if test else one.orelse, module, variables, depth + 1)
            return
        other = copied(variables)
        ways = ((one.body, variables), (one.orelse, other))
        returned = [value for body, table in ways for value in self.returned(body, module, table, depth + 1)]
        if len(returned) == 2:
            raise _Returns(either(returned[0], returned[1], one.lineno))
        if returned:
            raise _Returns(unseen(f"what is returned depends on line {one.lineno}"))
        for name in dict.fromkeys((*variables, *other)):
            variables[name] = either(variables.get(name), other.get(name), one.lineno)

    def returned(
        self, body: list[ast.stmt], module: _ReadModule, variables: dict[str, object], depth: int
    ) -> list[object]:
        """The result of these statements; empty if none returns."""
        try:
            self.all(body, module, variables, depth)
        except _Returns as ending:
            return [ending.value]
        return []

    def loop(self, one: ast.For, module: _ReadModule, variables: dict[str, object], depth: int) -> None:
        values = self.value(one.iter, module, variables, depth)
        turns = list(values) if isinstance(values, list | tuple | dict) else [unseen("each of a list")]
        for value in turns:
            self.assign(one.target, value, module, variables, depth)
            self.all(one.body, module, variables, depth + 1)

    def assign(
        self, target: ast.expr, value: object, module: _ReadModule, variables: dict[str, object], depth: int
    ) -> None:
        if isinstance(target, ast.Name):
            variables[target.id] = value
        elif isinstance(target, ast.Attribute):
            base: ast.expr = target
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id not in variables and base.id not in module.variables:
                variables[base.id] = Made(base.id)
            owner = self.value(target.value, module, variables, depth)
            if isinstance(owner, str) and causes(owner):
                return
            if owner is None or not isinstance(owner, Made):
                owner = Made("cfg")
                self.assign(target.value, owner, module, variables, depth)
            owner.fields[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner = self.value(target.value, module, variables, depth)
            key = self.value(target.slice, module, variables, depth)
            if isinstance(owner, dict) and isinstance(key, (str, int)):
                owner[key] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value if isinstance(value, list | tuple) and len(value) == len(target.elts) else None
            for number, part in enumerate(target.elts):
                own = parts[number] if parts is not None else unseen(ast.unparse(part))
                if parts is None and isinstance(part, ast.Name):
                    own = Made(part.id)
                self.assign(part, own, module, variables, depth)

    def value(self, one: ast.expr, module: _ReadModule, variables: Mapping[str, object], depth: int) -> object:
        def inner(part: ast.expr) -> object:
            return self.value(part, module, variables, depth)

        if isinstance(one, ast.Constant):
            return one.value
        if isinstance(one, ast.Name):
            return self.name(one.id, module, variables)
        if isinstance(one, ast.Attribute):
            owner = inner(one.value)
            return owner.under(one.attr) if isinstance(owner, Made) else unseen(ast.unparse(one))
        if isinstance(one, (ast.List, ast.Tuple)):
            return [*self.elements(one.elts, inner)]
        if isinstance(one, ast.Dict):
            found: dict[object, object] = {}
            for key, part in zip(one.keys, one.values, strict=True):
                whole = inner(part)
                if key is None:
                    found |= whole if isinstance(whole, dict) else {}
                elif isinstance(name := _key(inner(key)), (str, int, tuple)):
                    found[name] = whole
            return found
        if isinstance(one, ast.Call):
            return self.called(one, module, variables, depth)
        if isinstance(one, ast.BinOp):
            return _calculated(one.op, inner(one.left), inner(one.right), one)
        if isinstance(one, ast.UnaryOp):
            value = inner(one.operand)
            if isinstance(one.op, ast.Not) and not causes(value) and not isinstance(value, Made):
                return not value
            return -value if isinstance(one.op, ast.USub) and isinstance(value, (int, float)) else unseen(_text(one))
        if isinstance(one, ast.BoolOp):
            return self.both(one, inner)
        if isinstance(one, ast.Compare) and len(one.ops) == 1:
            return _compared(one, inner(one.left), inner(one.comparators[0]))
        if isinstance(one, ast.IfExp):
            test = inner(one.test)
            if causes(test) or isinstance(test, Made):
                return either(inner(one.body), inner(one.orelse), one.lineno)
            return inner(one.body if test else one.orelse)
        if isinstance(one, ast.Subscript):
            owner, place = inner(one.value), _key(inner(one.slice))
            if isinstance(owner, dict) and isinstance(place, (str, int, tuple)) and place in owner:
                return owner[place]
            if isinstance(owner, list) and isinstance(place, int) and -len(owner) <= place < len(owner):
                return owner[place]
        if isinstance(one, ast.ListComp) and len(one.generators) == 1 and not one.generators[0].ifs:
            turns = inner(one.generators[0].iter)
            if isinstance(turns, list):
                return [*self.each(one, turns, module, variables, depth)]
        return unseen(_text(one))

    def each(
        self, one: ast.ListComp, turns: list[object], module: _ReadModule, variables: Mapping[str, object], depth: int
    ) -> Iterator[object]:
        for turn in turns:
            own = dict(variables)
            self.assign(one.generators[0].target, turn, module, own, depth)
            yield self.value(one.elt, module, own, depth)

    def elements(self, parts: list[ast.expr], inner: Callable[[ast.expr], object]) -> Iterator[object]:
        for part in parts:
            if isinstance(part, ast.Starred):
                several = inner(part.value)
                yield from several if isinstance(several, list) else [unseen(_text(part))]
            else:
                yield inner(part)

    def both(self, one: ast.BoolOp, inner: Callable[[ast.expr], object]) -> object:
        """``a and b``, ``a or b``."""
        stops = isinstance(one.op, ast.Or)
        value: object = not stops
        for part in one.values:
            value = inner(part)
            if causes(value) or isinstance(value, Made):
                return unseen(_text(one))
            if bool(value) is stops:
                return value
        return value

    def name(self, name: str, module: _ReadModule, variables: Mapping[str, object]) -> object:
        if name in variables:
            return variables[name]
        if name in module.variables:
            return module.variables[name]
        if name in module.imported and name.isupper():
            other = self.imported(name, module)
            if other is not None and module.imported[name][1] in other.variables:
                return other.variables[module.imported[name][1]]
        return Made(name, is_called=False)

    def imported(self, name: str, module: _ReadModule) -> _ReadModule | None:
        """The file from which a name is imported, if it exists."""
        source, _ = module.imported[name]
        level = len(source) - len(source.lstrip("."))
        parts = source.lstrip(".").replace(".", "/")
        beside = module.path
        if beside is None:
            return None
        for _ in range(level - 1):
            beside = beside.parent
        for place in (f"{parts}.py", f"{parts}/__init__.py") if parts else ("__init__.py",):
            for named in (place, f"src/{place}"):
                path, text = text_beside(named, beside)
                if path is not None and text is not None:
                    return self.modules[path] if path in self.modules else self.module(text, path)
        return None

    def called(self, one: ast.Call, module: _ReadModule, variables: Mapping[str, object], depth: int) -> object:
        given = [*self.elements(one.args, lambda part: self.value(part, module, variables, depth))]
        named: dict[str, object] = {}
        for keyword in one.keywords:
            value = self.value(keyword.value, module, variables, depth)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= {str(name): part for name, part in value.items()}
        name = ast.unparse(one.func)
        if name in ("cast", "typing.cast") and len(given) == 2:
            return given[1]
        if name in ("deepcopy", "copy.deepcopy", "copy.copy") and given:
            return copied({"it": given[0]})["it"]
        if name in ("replace", "dataclasses.replace") and given and isinstance(given[0], Made):
            other = copied({"it": given[0]})["it"]
            assert isinstance(other, Made)
            other.fields |= named
            return other
        if name in ("hasattr", "isinstance", "callable"):
            return unseen(_text(one))
        if name == "getattr" and len(given) >= 2 and isinstance(given[0], Made) and isinstance(given[1], str):
            return given[0].fields.get(given[1], given[2] if len(given) > 2 else unseen(_text(one)))
        if name == "setattr" and len(given) == 3 and isinstance(given[0], Made) and isinstance(given[1], str):
            given[0].fields[given[1]] = given[2]
            return None
        if name == "apply_flex_dispatcher_backend" and given and isinstance(given[0], Made):
            if (given[1:] or [named.get("moe_flex_dispatcher_backend")])[0] in ("deepep", "hybridep"):
                given[0].fields["moe_token_dispatcher_type"] = "flex"  # which all GPUs of these recipes can
            return None
        if isinstance(one.func, ast.Attribute) and one.func.attr == "get" and 1 <= len(given) <= 2:
            owner = self.value(one.func.value, module, variables, depth)
            place = _key(given[0])
            if isinstance(owner, dict) and isinstance(place, (str, int, tuple)) and not causes(place):
                return owner.get(place, given[1] if len(given) > 1 else None)
        if name in ("dict", "list", "int", "str", "bool") and len(given) <= 1:
            if name == "dict" and (not given or isinstance(given[0], dict)):
                return {**(given[0] if given and isinstance(given[0], dict) else {}), **named}
            return given[0] if given else {"list": [], "int": 0, "str": "", "bool": False}[name]
        if isinstance(one.func, ast.Name) and (found := self.function(one.func.id, module, variables)) is not None:
            function, home = found
            return self.call(function, home, given, named, depth + 1)
        if name in _HARMLESS:
            return Made(name, tuple(given), named)
        for value in given:
            if isinstance(value, Made) and value.fields and "." not in name and name[:1].islower():
                self.notes.append(f"{name} may change the configuration and {_ELSEWHERE}")
        if isinstance(one.func, ast.Attribute):
            owner = self.value(one.func.value, module, variables, depth)
            if isinstance(owner, Made) and owner.arguments and not given:
                given = list(owner.arguments)  # for a model that is looked up and then made
        if (isinstance(one.func, ast.Name) and name[:1].islower()) or name.startswith("_"):
            self.notes.append(f"what {name} sets {_ELSEWHERE}") if not given else None
        return Made(name, tuple(given), named)

    def function(
        self, name: str, module: _ReadModule, variables: Mapping[str, object]
    ) -> tuple[ast.FunctionDef, _ReadModule] | None:
        own = variables.get(name)
        if isinstance(own, ast.FunctionDef):
            return own, module
        if name in module.functions:
            return module.functions[name], module
        if name in module.imported and _NOT_FOLLOWED not in name and not name[:1].isupper():
            other = self.imported(name, module)
            original = module.imported[name][1]
            if other is not None and original in other.functions:
                return other.functions[original], other
            if other is not None and original in other.imported:
                return self.function(original, other, {})
        return None


def _key(value: object) -> object:
    """A value as a key of a table: a list of plain values becomes a tuple."""
    if isinstance(value, list) and all(isinstance(part, (str, int, type(None))) for part in value):
        return tuple(value)
    return value


def _text(one: ast.expr) -> str:
    return ast.unparse(one)


def _calculated(sign: ast.operator, left: object, right: object, one: ast.AST) -> object:
    function = _CALCULATED.get(type(sign))
    if function is not None and _is_number(left) and _is_number(right):
        assert isinstance(left, (int, float))
        assert isinstance(right, (int, float))
        try:
            return function(left, right)
        except (ArithmeticError, ValueError):
            return unseen(ast.unparse(one))
    if isinstance(sign, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return [*left, *right]
    if isinstance(sign, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return left + right
    if isinstance(sign, ast.Mult) and isinstance(left, (list, str)) and type(right) is int and right <= 4096:
        return left * right
    if isinstance(sign, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
        return left | right
    return unseen(ast.unparse(one))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _compared(one: ast.Compare, left: object, right: object) -> object:
    if causes(left) or causes(right) or isinstance(left, Made) or isinstance(right, Made):
        return unseen(_text(one))
    sign = type(one.ops[0])
    if sign in _COMPARED:
        return _COMPARED[sign](left, right)
    if sign in _ORDERED and isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _ORDERED[sign](left, right)
    if sign in (ast.In, ast.NotIn) and isinstance(right, (list, dict, str)):
        try:
            return (left in right) == (sign is ast.In)
        except TypeError:
            return unseen(_text(one))
    return unseen(_text(one))


def _some(names: Mapping[str, object]) -> str:
    public = [name for name in names if not name.startswith("_")]
    shown = ", ".join(public[:8])
    return shown + (f" and {len(public) - 8} more" if len(public) > 8 else "") if public else "none"
