"""Expands words of a shell script: variables, defaults, quotes, arrays and arithmetic.

Also the values that a shell script has set at one point, and those assumed from outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase, translate
from pathlib import Path
from typing import TypeVar

from tree_sitter import Node

from piper_ray.launches.launch import after_unseen, causes, is_wholly_unseen, readable, text_beside, unseen

Variable = str | list[str]
_Value = TypeVar("_Value")


@dataclass
class Outside:
    """The input of a script. variables: set by the user, like environment variables. taken_as_unset: collects the names
    of others that were read. path: of the script, if it is a file. uses_yq: whether a script reads words from YAML."""

    variables: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    taken_as_unset: dict[str, str] = field(default_factory=dict)
    gets_arguments: bool = False
    uses_yq: bool = False
    not_found: list[str] = field(default_factory=list)


@dataclass
class State:
    """Variables, functions and written files. arguments: of the script or the function; None if unknown."""

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    arguments: list[str] | None = None

    def copied(self) -> State:
        """A copy that can change independently. Values are never changed in place."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions), files=dict(self.files))

    def become(self, others: Sequence[State], line: int) -> None:
        """Takes the state after one of the others, when it is unknown which. line: of the condition."""
        self.variables = _common([one.variables for one in others], lambda name: unseen(f"{name} (see line {line})"))
        self.functions = {name: body for one in others for name, body in one.functions.items()}
        self.files = _common([one.files for one in others], lambda name: unseen(f"{name} (see line {line})"))
        if any(one.arguments != others[0].arguments for one in others):
            self.arguments = None
        else:
            self.arguments = others[0].arguments


def _common(tables: Sequence[Mapping[str, _Value]], differing: Callable[[str], _Value]) -> dict[str, _Value]:
    found: dict[str, _Value] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        first = values[0]
        same = first is not None and all(value == first for value in values)
        found[name] = first if same and first is not None else differing(name)
    return found


_Segment = tuple[bool, list[str]]
"""Whether blanks split it into words, and its fields: several for an array."""

_ESCAPED = re.compile(r"\\(\n|.)", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r'\\(\n|["$`\\])')
_EXPANSIONS = ("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution")
_BETWEEN = re.compile(r"\\.|\s+", re.DOTALL)
_UNREAD = re.compile(r"(?<!\\)(\$[\w{(@*#]|`)")
_DEFAULTS = (":-", "-", ":=", "=")
_SPECIAL = {"?": "0", "#": "", "@": "", "*": ""}


def text_of(node: Node) -> str:
    """The source of a node."""
    return (node.text or b"").decode().lstrip(" \t") if "name" in node.type else (node.text or b"").decode()


def line_of(node: Node) -> int:
    """The line in which the node begins, from 1."""
    return node.start_point[0] + 1


def command_parts(node: Node) -> list[Node]:
    """The nodes of a command's words, its name first."""
    return [
        child.named_children[0] if child.type == "command_name" else child
        for child in node.named_children
        if child.type not in ("variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect")
    ]


def _gap(node: Node, begin: int) -> str:
    """The text between the previous word and this one."""
    above = node.parent
    while above is not None and above.start_byte > begin:
        above = above.parent
    if above is None or above.text is None:
        return " "
    return above.text[begin - above.start_byte : node.start_byte - above.start_byte].decode()


class ShellWords:
    """Expands nodes of the syntax tree with the values that a script has set so far."""

    def __init__(self, state: State, outside: Outside) -> None:
        self.state = state
        self.outside = outside
        self.unset_is_empty = False  # true within conditions
        self.supposes = False  # whether a variable was assumed to be unset

    def fields(self, nodes: Sequence[Node]) -> list[str]:
        """The words of a command that these nodes expand to."""
        found: list[str] = []
        together: list[_Segment] = []
        end = -1
        for node in (one for one in nodes if one.type != "comment"):
            for piece in _BETWEEN.findall(_gap(node, end)) if end >= 0 else ():
                if piece.isspace():
                    found += _split(iter(together))
                    together = []
                elif piece != "\\\n":  # an escaped blank, which the tree places between words
                    together.append((False, [piece[1:]]))
            together += self._segments(node, quoted=False)
            end = node.end_byte
        return found + _split(iter(together))

    def text(self, node: Node | None) -> str:
        """The single text that a node expands to if it is not split."""
        if node is None:
            return ""
        return "".join(" ".join(fields) for _, fields in self._segments(node, quoted=True, within=False))

    def _segments(self, node: Node, *, quoted: bool, within: bool = True) -> Iterator[_Segment]:
        """within: whether ``quoted`` means that the node stands in quotes, and not that its value should be quoted."""
        kind = node.type
        if quoted and within and kind in _EXPANSIONS:
            source = text_of(node)
            led = source[: len(source) - len(source.lstrip(" \t\n\\"))]  # the tree makes it a part of the node
            yield False, [_ESCAPED_IN_QUOTES.sub(_unescaped, led)]
        if kind in ("word", "number", "extglob_pattern", "regex", "variable_name", "test_operator"):
            if node.named_child_count and kind in ("number", "word"):
                yield from self._joined(node, quoted=quoted)
            elif _UNREAD.search(text_of(node)):
                yield False, [unseen(text_of(node))]  # the parser took it for plain text
            else:
                yield False, [_ESCAPED.sub(_unescaped, text_of(node))]
        elif kind == "raw_string":
            yield False, [text_of(node)[1:-1]]
        elif kind == "ansi_c_string":
            yield False, [text_of(node)[2:-1].replace("\\n", "\n").replace("\\t", "\t")]
        elif kind in ("string", "translated_string"):
            inner = [*self._joined(node, quoted=True, quotes=('"', '$"'))]
            filled = [one for one in inner if one[1] and one != (False, [""])]
            if filled or len(node.named_children) != 1 or all(one[1] for one in inner):
                yield False, [""]  # but not for "$@" without arguments
            yield from filled
        elif kind == "concatenation":
            yield from self._joined(node, quoted=quoted)
        elif kind == "simple_expansion":
            yield self._variable(text_of(node.children[-1]), quoted=quoted)
        elif kind == "expansion":
            yield from self._expansion(node, quoted=quoted)
        elif kind == "arithmetic_expansion":
            yield False, [self._arithmetic_text(node)]
        elif kind == "command_substitution":
            yield not quoted, [self._printed(node)]
        elif kind in ("string_content", "heredoc_content"):
            yield False, [_ESCAPED_IN_QUOTES.sub(_unescaped, text_of(node))]
        else:
            yield False, [unseen(text_of(node)[:40])]

    def _joined(self, node: Node, *, quoted: bool, quotes: Sequence[str] = ()) -> Iterator[_Segment]:
        """The parts of a node, and the text between them that the tree leaves out."""
        source, at = node.text or b"", 0
        for child in node.children:
            begin = child.start_byte - node.start_byte
            if begin > at:
                yield False, [_ESCAPED_IN_QUOTES.sub(_unescaped, source[at:begin].decode())]
            at = child.end_byte - node.start_byte
            if child.is_named:
                yield from self._segments(child, quoted=quoted)
            else:
                sign = _ESCAPED_IN_QUOTES.sub(_unescaped, text_of(child))
                if sign == "$" and not quoted:
                    sign = unseen(text_of(node))  # the parser did not recognise the variable
                yield False, [sign[: -len(sign.strip())] if sign.strip() in quotes else sign]
        if at < len(source):
            yield False, [_ESCAPED_IN_QUOTES.sub(_unescaped, source[at:].decode())]

    def _sets_arrays(self) -> bool:
        """Whether the script sets its arrays itself, as far as it is there."""
        return not self.outside.not_found and any(isinstance(one, list) for one in self.state.variables.values())

    def _suppose(self, name: str, usual: str) -> None:
        self.supposes = True
        if name.isdigit():
            self.outside.gets_arguments = True
        else:
            self.outside.taken_as_unset.setdefault(name, readable(usual))

    def body(self, node: Node) -> str:
        """The text of a heredoc."""
        return "".join(" ".join(fields) for _, fields in self._joined(node, quoted=True))

    def value(self, name: str) -> str | list[str] | None:
        """The value of a variable; None if nothing sets it."""
        if name.isdigit() and name != "0":
            given = self.state.arguments
            if given is None:
                return self.outside.variables.get(name)
            return given[int(name) - 1] if int(name) <= len(given) else None
        return self.state.variables.get(name, self.outside.variables.get(name))

    def _variable(self, name: str, *, quoted: bool) -> _Segment:
        if name in ("@", "*"):
            self.outside.gets_arguments |= self.state.arguments is None
            return not quoted, list(self.state.arguments or [])
        if name == "#" and (self.state.arguments is not None or self.unset_is_empty):
            self.supposes |= self.state.arguments is None
            return False, [str(len(self.state.arguments or []))]
        found = self.value(name)
        if isinstance(found, list):
            return not quoted, found[:1]
        if found is None and self.unset_is_empty and name != "0" and name not in _SPECIAL:
            self._suppose(name, "")
            found = ""
        return not quoted, [unseen(f"${name}") if found is None else found]

    def _expansion(self, node: Node, *, quoted: bool) -> Iterator[_Segment]:
        inner = node.children[1:-1]
        signs = [text_of(child) for child in inner if not child.is_named]
        named = next(
            (child for child in inner if child.type.endswith("variable_name") or child.type == "subscript"), None
        )
        if named is None or (inner[0] is not named and text_of(inner[0]) != "#"):
            yield not quoted, [unseen(text_of(node))]
            return
        found, all_of = self._named(named)
        if inner[0] is not named:
            yield False, [unseen(text_of(node)) if found is None else str(len(found))]
            return
        name = text_of(named).rstrip(" ")
        rest = inner[inner.index(named) + 1 :]
        sign = signs[0] if signs else ""
        operand = rest[1:]
        is_empty = found is None or (sign.startswith(":") and found in ("", []))
        if sign in _DEFAULTS:
            if is_empty:
                default = self._default(operand, node)
                if found is None:
                    self._suppose(name, default)
                if sign.endswith("="):
                    self.state.variables[name] = default
                yield not quoted, [default]
                return
        elif sign in (":+", "+"):
            if found is None:
                self._suppose(name, "")
            yield not quoted, ["" if is_empty else self._default(operand, node)]
            return
        elif sign and sign not in (":?", "?"):
            yield not quoted, [self._changed(found, signs, operand, node)]
            return
        if found is None and all_of and named.type == "subscript" and self._sets_arrays():
            self._suppose(text_of(named).partition("[")[0], "")  # an array, which no environment has
            yield not quoted, []
            return
        if found is None:
            yield self._variable(name, quoted=quoted) if named.type != "subscript" else (False, [unseen(f"${name}")])
        elif isinstance(found, list):
            yield not quoted, found if all_of else found[:1]
        else:
            yield not quoted, [found]

    def _default(self, operand: Sequence[Node], node: Node) -> str:
        """The operand of an expansion."""
        if not operand:
            return ""
        source, begin = node.text or b"", operand[0].start_byte
        pieces, at = [], begin
        for child in operand:
            pieces.append(source[at - node.start_byte : child.start_byte - node.start_byte].decode())
            pieces.append(self.text(child) if child.is_named else text_of(child))
            at = child.end_byte
        return "".join(pieces)

    def _named(self, named: Node) -> tuple[str | list[str] | None, bool]:
        """The value of a variable or of an element of an array, and whether it is the whole array."""
        if named.type != "subscript":
            if text_of(named) in ("@", "*"):
                self.outside.gets_arguments |= self.state.arguments is None
                return list(self.state.arguments or []), True
            return self.value(text_of(named)), False
        name, index = named.child_by_field_name("name"), named.child_by_field_name("index")
        found = self.value(text_of(name)) if name is not None else None
        place = text_of(index) if index is not None else ""
        if place in ("@", "*"):
            return ([found] if isinstance(found, str) and found else found or found), True
        number = self.number(index)
        if isinstance(found, list) and number is not None:
            return (found[number] if -len(found) <= number < len(found) else ""), False
        return None, False

    def _changed(self, found: str | list[str] | None, signs: Sequence[str], operand: Sequence[Node], node: Node) -> str:
        """A value without a prefix or a suffix, with parts replaced, or in other letters."""
        if not isinstance(found, str) or causes(found):
            return unseen(text_of(node))
        sign = signs[0]
        pattern = self.text(operand[0]) if operand else ""
        if sign in ("#", "##"):
            places = range(len(found) + 1) if sign == "#" else range(len(found), -1, -1)
            return next((found[at:] for at in places if fnmatchcase(found[:at], pattern)), found)
        if sign in ("%", "%%"):
            places = range(len(found), -1, -1) if sign == "%" else range(len(found) + 1)
            return next((found[:at] for at in places if fnmatchcase(found[at:], pattern)), found)
        if sign in ("/", "//"):
            others = [self.text(child) for child in operand if child.is_named]
            by = others[1] if len(others) > 1 else ""
            expression = translate(others[0] if others else "").removesuffix(r"\Z").removesuffix(r"\z")
            return re.sub(expression, lambda _: by, found, count=1 if sign == "/" else 0)
        if sign in (",,", "^^"):
            return found.lower() if sign == ",," else found.upper()
        return unseen(text_of(node))

    def _printed(self, node: Node) -> str:
        """The output of a command, for the few commands that only print."""
        commands = node.named_children
        if len(commands) == 1 and commands[0].type == "command":
            words = self.fields(command_parts(commands[0]))
            if words[:1] == ["echo"] and not any(word.startswith("-") for word in words[1:2]):
                return " ".join(words[1:])
            if words[:1] == ["expr"] and len(words) == 4 and not any(map(causes, words)):
                found = _calculated(words[2], *(_whole(word) for word in (words[1], words[3])))
                if found is not None:
                    return str(found)
            if words[:1] == ["cat"] and len(words) == 2:
                text = self.state.files.get(words[1])
                if text is None:
                    _, text = text_beside(after_unseen(words[1]), self.outside.path)
                if text is not None:
                    return text.rstrip("\n")
        return unseen(text_of(node).lstrip("\\ \t\n"))

    def _arithmetic_text(self, node: Node) -> str:
        value = self.number(node.named_children[0]) if node.named_child_count == 1 else None
        return unseen(text_of(node)) if value is None else str(value)

    def number(self, node: Node | None) -> int | None:
        """The value of an arithmetic expression; None if it is unknown."""
        if node is None:
            return None
        kind = node.type
        if kind == "parenthesized_expression" and node.named_child_count == 1:
            return self.number(node.named_children[0])
        if kind == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            sign = node.child_by_field_name("operator")
            return _calculated(text_of(sign) if sign else "", self.number(left), self.number(right))
        if kind == "unary_expression":
            value = self.number(node.named_children[-1])
            sign_text = text_of(node.children[0])
            return None if value is None else {"-": -value, "+": value, "!": int(not value)}.get(sign_text)
        if kind == "ternary_expression" and node.named_child_count == 3:
            chosen = self.number(node.named_children[0])
            return None if chosen is None else self.number(node.named_children[1 if chosen else 2])
        if kind == "variable_name" or (kind == "word" and text_of(node).isidentifier()):
            found = self.value(text_of(node))
            return _whole(found) if isinstance(found, str) else None
        if kind in ("number", "word", "simple_expansion", "expansion", "string", "arithmetic_expansion", "subscript",
                    "command_substitution", "concatenation"):  # fmt: skip
            if kind == "subscript":
                found, _ = self._named(node)
                return _whole(found) if isinstance(found, str) else None
            return _whole(self.text(node))
        return None

    def holds(self, node: Node) -> bool | None:
        """Whether a condition holds; None if it is unknown."""
        before, self.unset_is_empty = self.unset_is_empty, True
        try:
            return self._holds(node)
        finally:
            self.unset_is_empty = before

    def _holds(self, node: Node) -> bool | None:
        kind = node.type
        if kind in ("test_command", "parenthesized_expression"):
            if text_of(node.children[0]) == "((":
                number = self.number(node.named_children[0])
                return None if number is None else bool(number)
            return self._holds(node.named_children[0]) if node.named_child_count == 1 else None
        if kind == "compound_statement" and text_of(node.children[0]) == "((" and node.named_child_count == 1:
            number = self.number(node.named_children[0])
            return None if number is None else bool(number)
        if kind in ("negated_command", "unary_expression") and text_of(node.children[0]) == "!":
            inner = self._holds(node.named_children[-1])
            return None if inner is None else not inner
        if kind == "unary_expression":
            return self._filled(text_of(node.children[0]), self.text(node.named_children[-1]))
        if kind == "list" or (kind == "binary_expression" and _sign(node) in ("&&", "||", "-a", "-o")):
            found = [self._holds(child) for child in node.named_children if child.type != "test_operator"]
            wanted = _sign(node) in ("||", "-o")
            if wanted in found:
                return wanted
            return None if None in found else not wanted
        if kind == "binary_expression":
            left, right = node.child_by_field_name("left"), node.child_by_field_name("right")
            return self._compared(_sign(node), left, right)
        if kind == "command":
            return {"true": True, "false": False, ":": True}.get(text_of(node))
        if kind in ("string", "word", "simple_expansion", "expansion", "raw_string", "number", "concatenation"):
            return self._filled("-n", self.text(node))
        return None

    def _filled(self, test: str, text: str) -> bool | None:
        if test not in ("-n", "-z") or is_wholly_unseen(text):
            return None
        return bool(text) == (test == "-n")

    def _compared(self, sign: str, left: Node | None, right: Node | None) -> bool | None:
        if sign in ("==", "=", "!=", "=~"):
            one, other = self.text(left), self.text(right)
            if causes(one) or causes(other):
                return None
            if sign == "=~":
                try:
                    return re.search(other, one) is not None
                except re.error:
                    return None
            quoted = right is not None and right.type in ("string", "raw_string")
            return (one == other if quoted else fnmatchcase(one, other)) == (sign != "!=")
        named = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
        number = _calculated(named.get(sign, sign), self.number(left), self.number(right))
        return None if number is None else bool(number)


def _sign(node: Node) -> str:
    sign = node.child_by_field_name("operator")
    found = sign or next((child for child in node.children if not child.is_named), None)
    return text_of(found) if found is not None else ""


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*[-+]?[0-9]{1,30}\s*", text) else None


def _calculated(sign: str, left: int | None, right: int | None) -> int | None:
    if left is None or right is None or (sign in ("/", "%") and right == 0):
        return None
    if sign in ("/", "%"):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return quotient if sign == "/" else left - quotient * right
    if sign == "**":
        return left**right if 0 <= right <= 64 else None
    known = {
        "+": left + right, "-": left - right, "*": left * right,
        "==": int(left == right), "!=": int(left != right), "<": int(left < right), "<=": int(left <= right),
        ">": int(left > right), ">=": int(left >= right),
        "&&": int(bool(left and right)), "||": int(bool(left or right)),
    }  # fmt: skip
    return known.get(sign)


def _split(segments: Iterator[_Segment]) -> list[str]:
    """Splits adjoining segments into words."""
    words: list[str] = []
    is_open = False  # whether the next text continues the last word
    for splits, fields in segments:
        parts = [fields] if not splits else [field.split() for field in fields]
        if not splits:
            for number, text in enumerate(fields):
                if is_open and number == 0:
                    words[-1] += text
                else:
                    words.append(text)
                is_open = True
            continue
        for number, (text, pieces) in enumerate(zip(fields, parts, strict=True)):
            if number or text[:1].isspace():
                is_open = False
            for piece in pieces:
                if is_open:
                    words[-1] += piece
                else:
                    words.append(piece)
                is_open = False
            is_open = bool(pieces and not text[-1:].isspace()) or (is_open and not pieces and not text)
    return words
