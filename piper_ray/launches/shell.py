"""Follows a shell script without running anything, to find the commands that it reaches, with their words.

If a condition cannot be resolved, both branches are followed, and values that they set differently are unresolved from
then on. Commands that only print, create folders or set up a machine are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from piper_ray.launches.launch import after_unseen, causes, text_beside, unseen
from piper_ray.launches.shell_words import Outside, ShellWords, State, Variable, command_parts, line_of, text_of
from piper_ray.model.errors import UsageError

_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>|&;$\n]*>")
"""A placeholder that users fill in, such as ``<path to data>``."""

_GOES_ON = re.compile(r"\\\s*\Z")

_MOST_STATEMENTS = 20_000
_MOST_NESTED = 12
_QUEUES = ("sbatch", "srun", "qsub", "bsub")
_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
_PRINTING = frozenset(
    ["echo", "printf", "mkdir", "cd", "pip", "pip3", "rm", "cp", "mv", "ls", "tee", "cat", "sed", "grep", "kill"]
)


@dataclass(frozen=True)
class ShellCommand:
    """A command that the script reaches. line: of the script."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Followed:
    """The commands that a script reaches. files: those that it writes, by name."""

    commands: tuple[ShellCommand, ...]
    files: Mapping[str, str]


class _Ends(Exception):
    """The script or the function ends here."""


def follow(text: str, outside: Outside) -> Followed:
    """Follows a script. Raises UsageError that names the line of invalid shell syntax."""
    script = _Script(outside)
    script.run_text(text, 0)
    return Followed(tuple(script.commands), script.words.state.files)


class _Script:
    def __init__(self, outside: Outside) -> None:
        self.words = ShellWords(State(), outside)
        self.commands: list[ShellCommand] = []
        self.statements = 0

    @property
    def state(self) -> State:
        return self.words.state

    def run_text(self, text: str, depth: int, line: int | None = None) -> None:
        """line: the line for all its commands, if the text is part of another text."""
        self.words.outside.uses_yq |= re.search(r"\$\(\s*yq\b", text) is not None
        parser = Parser(Language(tree_sitter_bash.language()))
        tree = parser.parse(text.encode())
        if tree.root_node.has_error:
            tree = parser.parse(_plainer(text).encode())
        if tree.root_node.has_error:
            wrong = _first_error(tree.root_node)
            raise UsageError(f"launch script: line {line or line_of(wrong)} is not understood as bash")
        try:
            self._all(tree.root_node.named_children, depth, line)
        except _Ends:
            return

    def _all(self, nodes: Sequence[Node], depth: int, line: int | None) -> None:
        for node in nodes:
            self._statement(node, depth, line)

    def _statement(self, node: Node, depth: int, line: int | None) -> None:
        self.statements += 1
        if self.statements > _MOST_STATEMENTS or depth > _MOST_NESTED:
            raise UsageError("launch script: its loops are too long to follow")
        kind = node.type
        if kind == "variable_assignment":
            self._assign(node)
        elif kind in ("variable_assignments", "declaration_command"):
            for child in node.named_children:
                if child.type == "variable_assignment":
                    self._assign(child)
        elif kind == "unset_command":
            for child in node.named_children:
                self.state.variables.pop(text_of(child), None)
        elif kind == "if_statement":
            self._if(node, depth, line)
        elif kind == "case_statement":
            self._case(node, depth, line)
        elif kind == "for_statement":
            self._for(node, depth, line)
        elif kind in ("while_statement", "c_style_for_statement"):
            self._loop(node, depth, line)
        elif kind == "function_definition":
            name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
            if name is not None and body is not None:
                self.state.functions[text_of(name)] = body
        elif kind == "list":
            self._list(node, depth, line)
        elif kind in ("pipeline", "compound_statement", "do_group", "else_clause", "negated_command"):
            if kind == "compound_statement" and text_of(node.children[0]) == "((":
                self._counted(node)
            else:
                self._all(node.named_children, depth, line)
        elif kind == "subshell":
            before = self.state.copied()
            with suppress(_Ends):
                self._all(node.named_children, depth, line)
            self.words.state = before
        elif kind == "redirected_statement":
            self._redirected(node, depth, line)
        elif kind == "command":
            self._command(node, depth, line, None)

    def _assign(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return
        if name.type == "subscript":
            named = name.child_by_field_name("name")
            if named is not None:
                self.state.variables[text_of(named)] = unseen(text_of(node)[:40])
            return
        found: Variable
        is_list = value is not None and value.type == "array"
        found = self.words.fields(value.named_children) if is_list and value is not None else self.words.text(value)
        if any(text_of(child) == "+=" for child in node.children):
            before = self.words.value(text_of(name)) or ([] if is_list else "")
            if isinstance(found, list):
                found = [*([before] if isinstance(before, str) else before), *found]
            elif isinstance(before, list):
                found = [*before, found]
            else:
                found = before + found
        self.state.variables[text_of(name)] = found

    def _counted(self, node: Node) -> None:
        """Marks variables that ``((i++))`` and the like change as unresolved."""
        for child in _all_under(node):
            if child.type in ("postfix_expression", "unary_expression", "assignment", "variable_assignment"):
                for name in (one for one in child.named_children if one.type == "variable_name"):
                    self.state.variables[text_of(name)] = unseen(text_of(node))

    def _if(self, node: Node, depth: int, line: int | None) -> None:
        """Its parts are a condition and the statements for it, again for each elif, and the statements for else."""
        ways: list[tuple[Node | None, list[Node]]] = []
        for part in (node, *(child for child in node.named_children if child.type in ("elif_clause", "else_clause"))):
            children = [child for child in part.named_children if child.type not in ("elif_clause", "else_clause")]
            if part.type == "else_clause":
                ways.append((None, children))
            else:
                ways.append((children[0], children[1:]))
        open_ways: list[list[Node]] = []
        for condition, then in ways:
            if condition is not None and condition.type in ("negated_command", "redirected_statement", "pipeline"):
                self._statement(condition, depth, line)
            elif condition is not None and condition.type == "command":
                self._command(condition, depth, line, None)
            self.words.supposes = False
            holds = True if condition is None else self.words.holds(condition)
            if holds and self.words.supposes and _ends(then):
                continue  # an error exit for a call without the expected arguments
            if holds is not False:
                open_ways.append(then)
            if holds:
                break
        else:
            open_ways.append([])
        self._one_of(open_ways, line_of(node), depth, line)

    def _one_of(self, ways: Sequence[Sequence[Node]], at: int, depth: int, line: int | None) -> None:
        """Follows the only branch, or each of several if it is unknown which one runs."""
        if len(ways) == 1:
            self._all(ways[0], depth + 1, line)
            return
        begin = self.state.copied()
        ends: list[State] = []
        for way in ways:
            self.words.state = begin.copied()
            try:
                self._all(way, depth + 1, line)
            except _Ends:
                continue  # a branch that ends the script does not reach the launch
            ends.append(self.state)
        self.words.state = begin
        if not ends:
            raise _Ends
        self.state.become(ends, at)

    def _case(self, node: Node, depth: int, line: int | None) -> None:
        value = node.child_by_field_name("value")
        self.words.unset_is_empty = True
        subject = self.words.text(value)
        self.words.unset_is_empty = False
        ways: list[Sequence[Node]] = []
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            body = [child for child in item.named_children if child not in patterns]
            if causes(subject):
                ways.append(body)
            elif any(fnmatchcase(subject, self.words.text(pattern)) for pattern in patterns):
                self._all(body, depth + 1, line)
                return
        if causes(subject):
            self._one_of([*ways, []], line_of(node), depth, line)

    def _for(self, node: Node, depth: int, line: int | None) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return
        for value in self.words.fields(node.children_by_field_name("value")):
            self.state.variables[text_of(variable)] = value
            self._statement(body, depth + 1, line)

    def _loop(self, node: Node, depth: int, line: int | None) -> None:
        """Follows one turn of a loop, which may run or not, unless the loop certainly has no turn."""
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        is_while = node.type == "while_statement"
        if body is None or (is_while and condition is not None and self.words.holds(condition) is False):
            return
        if not is_while:
            for name in (one for one in _all_under(node) if one.type == "variable_name"):
                if name.parent is not None and "assignment" in name.parent.type and name.parent.parent == node:
                    self.state.variables[text_of(name)] = unseen(f"${text_of(name)}")
        self._one_of([[body], []], line_of(node), depth, line)

    def _list(self, node: Node, depth: int, line: int | None) -> None:
        """``a && b`` and ``a || b``: commands are assumed to succeed."""
        left, right = node.named_children[0], node.named_children[-1]
        wanted = any(text_of(child) == "&&" for child in node.children)
        holds = self.words.holds(left) if left.type in ("test_command", "negated_command") else True
        if left.type != "test_command":
            self._statement(left, depth, line)
        if holds is None:
            self._one_of([[right], []], line_of(node), depth, line)
        elif holds is wanted:
            self._statement(right, depth, line)

    def _redirected(self, node: Node, depth: int, line: int | None) -> None:
        body = node.child_by_field_name("body")
        document = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        text, into = None, next(_destinations(node), None)
        if document is not None:
            inner = next((child for child in document.named_children if child.type == "heredoc_body"), None)
            start = next((child for child in document.named_children if child.type == "heredoc_start"), None)
            is_raw = start is not None and not text_of(start)[0].isalnum() and text_of(start)[0] != "_"
            text = "" if inner is None else text_of(inner) if is_raw else self.words.body(inner)
        if body is None:
            return
        if body.type == "command":
            self._command(body, depth, line, text)
            name = body.child_by_field_name("name")
            if text is not None and into is not None and name is not None and text_of(name) == "cat":
                self.state.files[self.words.text(into)] = text
        else:
            self._statement(body, depth, line)

    def _command(self, node: Node, depth: int, line: int | None, document: str | None) -> None:
        """document: the heredoc that the command reads."""
        own = [child for child in node.named_children if child.type == "variable_assignment"]
        words = self.words.fields(command_parts(node))
        at = line or line_of(node)
        if not words:
            return
        before = self.state
        if own:
            self.words.state = before.copied()
            for child in own:
                self._assign(child)
        try:
            self._called(words, depth, at, document)
        finally:
            if own:
                self.words.state = before

    def _called(self, words: list[str], depth: int, line: int, document: str | None) -> None:
        name = words[0]
        if name in self.state.functions:
            self._function(self.state.functions[name], words[1:], depth, line)
        elif name in ("exit", "return"):
            raise _Ends
        elif name == "exec" and len(words) > 1:
            self._called(words[1:], depth, line, document)
        elif name == "eval":
            self.run_text(" ".join(words[1:]), depth + 1, line)
        elif name in ("source", ".") and len(words) > 1:
            self._file(words[1], None, depth, line)
        elif name in ("read", "mapfile", "readarray"):
            is_seen = name == "read" and document is not None
            self.state.variables[words[-1]] = document.strip() if is_seen and document else unseen(" ".join(words))
        elif name == "set" and "--" in words:
            self.state.arguments = words[words.index("--") + 1 :]
        elif name == "shift" and self.state.arguments is not None:
            self.state.arguments = self.state.arguments[1:]
        elif name in _SHELLS and len(words) > 1 and not words[1].startswith("-"):
            self._file(words[1], words[2:], depth, line)
        elif name.endswith(".sh"):
            self._file(name, words[1:], depth, line)
        elif name in _QUEUES and (script := next((at for at, word in enumerate(words) if _is_script(word)), 0)):
            self._file(words[script], words[script + 1 :], depth, line)
        elif (inner := _of_shell(words)) is not None:
            self.run_text(inner, depth + 1, line)
        elif document is not None and (name in _SHELLS or name in _QUEUES):
            self.run_text(document, depth + 1, line)
        elif name not in _PRINTING:
            self.commands.append(ShellCommand(tuple(words), line))

    def _function(self, body: Node, arguments: list[str], depth: int, line: int) -> None:
        before, self.state.arguments = self.state.arguments, arguments
        with suppress(_Ends):
            self._statement(body, depth + 1, line)
        self.state.arguments = before

    def _file(self, name: str, arguments: list[str] | None, depth: int, line: int) -> None:
        """Follows another script: sourced, or run with arguments of its own (not None)."""
        outside = self.words.outside
        path, text = text_beside(after_unseen(name), outside.path)
        if text is None:
            outside.not_found.append(after_unseen(name))
            if arguments is not None:
                self.commands.append(ShellCommand((name, *arguments), line))
            return
        before, here = self.state, outside.path
        if arguments is not None:
            self.words.state = before.copied()
            self.state.arguments = arguments
        outside.path = path
        self.run_text(text, depth + 1, line)
        outside.path = here
        if arguments is not None:
            self.words.state = before


def _ends(nodes: Sequence[Node]) -> bool:
    """Whether these statements end the script or the function."""
    return any(node.type == "command" and text_of(node).split()[0] in ("exit", "return") for node in nodes)


def _plainer(text: str) -> str:
    """The script without syntax that the parser does not know: placeholders, a continued last line, ``&>>``."""
    text = _PLACEHOLDER.sub(lambda found: unseen(found[0]), text)
    return _GOES_ON.sub("\n", text).replace("&>>", "&>")


def _is_script(word: str) -> bool:
    """Whether the word names a script for a queue, and is not one of the queue's options."""
    return word.endswith((".sh", ".slurm", ".sbatch")) and not word.startswith("-")


def _of_shell(words: Sequence[str]) -> str | None:
    """The text that a command passes to a shell, such as ``srun bash -c``."""
    for at, word in enumerate(words):
        if word in _SHELLS:
            options = list(takewhile(lambda option: option.startswith("-"), words[at + 1 :]))
            if options and options[-1].endswith("c"):
                return next(iter(words[at + 1 + len(options) :]), None)
    return None


def _first_error(node: Node) -> Node:
    if node.type == "ERROR" or node.is_missing:
        return node
    return next((_first_error(child) for child in node.children if child.has_error), node)


def _all_under(node: Node) -> Iterator[Node]:
    for child in node.named_children:
        yield child
        yield from _all_under(child)


def _destinations(node: Node) -> Iterator[Node]:
    for child in _all_under(node):
        if child.type == "file_redirect" and any(text_of(one) in (">", ">>", "&>") for one in child.children):
            place = child.child_by_field_name("destination")
            if place is not None:
                yield place
