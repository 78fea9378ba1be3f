"""Values of a Python source as far as they are written out. Nothing is imported, and nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.importing.syntax import (
    COMPARISONS,
    Function,
    computed,
    expressions,
    field_default,
    is_branch,
    last_name,
    text_of,
)

_DEEPEST = 40
_LONGEST = 10_000


class Dotted(str):
    """A name of another module, as `torch.bfloat16` and `IntervalStrategy.STEPS` are."""


class Unresolved(Exception):
    """The value is known only when the script runs; the text is the expression."""


@dataclass(slots=True)
class Value:
    """A value, and a word on where it comes from when callers may change it."""

    value: Any
    note: str = ""


@dataclass(slots=True)
class _Scope:
    """Names of the module or of one function."""

    assigned: dict[str, list[tuple[int, ast.expr | None]]] = field(default_factory=dict)
    """Name -> line and value of each assignment; None for one in a loop, a branch or of several names."""
    parameters: dict[str, ast.expr | None] = field(default_factory=dict)


class Source:
    """A parsed script.

    given: the arguments of the command line that starts it, None for one that is known only when the line is
    run. With them the defaults of all other arguments hold, too. Absent: callers may pass anything.
    entry: the function whose parameters they are, where it is none of a parser's (`fire`).
    """

    def __init__(
        self, tree: ast.Module, given: Mapping[str, Any] | None = None, entry: str | None = None
    ) -> None:
        self.tree = tree
        self.given = given
        self._entry = entry
        self.used: set[str] = set()
        """Arguments of the command line whose values were asked for."""
        self.deciding: set[str] = set()
        """Those that choose a side of an `if`."""
        self.imported: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.defaults: dict[str, list[tuple[ast.expr, str]]] = {}
        self.calls: list[tuple[ast.Call, Function | None]] = []
        self._scopes: dict[Function | None, _Scope] = {None: _Scope()}
        self._around: dict[Function, Function | None] = {}
        # with the line known, a parameter is what the only call of its function gives it
        self._sites = [] if given is None else Source(tree).calls
        self._walk(tree.body, None, branch=False)

    def calls_of(self, *names: str) -> Iterator[tuple[ast.Call, Function | None]]:
        """Calls by the last part of their name, in the order of the file."""
        for call, scope in self.calls:
            if last_name(call.func) in names or self.imported.get(last_name(call.func)) in names:
                yield call, scope

    def name_of(self, node: ast.expr) -> str:
        """The last part of a called name, with `import … as` resolved."""
        name = last_name(node)
        return self.imported.get(name, name) if isinstance(node, ast.Name) else name

    def value(self, node: ast.expr, scope: Function | None, depth: int = 0) -> Value:
        """The value of an expression. Unresolved where it is not written out."""
        if depth > _DEEPEST:
            raise Unresolved(text_of(node))
        found = self._literal(node, scope, depth + 1)
        if isinstance(found.value, str | list | dict | tuple) and len(found.value) > _LONGEST:
            raise Unresolved(text_of(node))
        return found

    def assignments(self, name: str, scope: Function | None) -> list[tuple[int, ast.expr | None]]:
        """All assignments of a name, of the function's else of the module's."""
        found = (self._scopes[place].assigned.get(name) for place in self._places(scope))
        return next((assigned for assigned in found if assigned), [])

    def _places(self, scope: Function | None) -> Iterator[Function | None]:
        """Where a name is looked for: the function, those around it, the module."""
        while scope is not None:
            yield scope
            scope = self._around.get(scope)
        yield None

    def _walk(self, body: list[ast.stmt], scope: Function | None, *, branch: bool) -> None:
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    known = alias.asname or alias.name.partition(".")[0]
                    self.imported[known] = alias.name.rpartition(".")[2] if alias.asname else known
            elif isinstance(statement, Function):
                self._function(statement, scope)
            elif isinstance(statement, ast.ClassDef):
                self._class(statement)
            else:
                self._statement(statement, scope, branch=branch)

    def _function(self, function: Function, around: Function | None) -> None:
        self.functions[function.name] = function
        self._around[function] = around
        scope = self._scopes[function] = _Scope()
        arguments = function.args
        plain = [*arguments.posonlyargs, *arguments.args]
        missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
        for argument, default in zip(plain, [*missing, *arguments.defaults], strict=True):
            scope.parameters[argument.arg] = default
        for argument, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            scope.parameters[argument.arg] = given
        self._walk(function.body, function, branch=False)

    def _class(self, definition: ast.ClassDef) -> None:
        for statement in definition.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                default = field_default(statement.value)
                if default is not None:
                    said = f"default of {definition.name}.{statement.target.id}"
                    self.defaults.setdefault(statement.target.id, []).append((default, said))
            elif isinstance(statement, Function):
                self._function(statement, None)

    def _statement(self, statement: ast.stmt, scope: Function | None, *, branch: bool) -> None:
        self._assign(statement, scope, branch=branch)
        for node in expressions(statement):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call):
                    self.calls.append((inner, scope))
                    self._argument(inner)
        taken = self._side(statement, scope)
        for name, inner_body in ast.iter_fields(statement):
            if not isinstance(inner_body, list) or (taken and name != taken):
                continue
            statements = [part for part in inner_body if isinstance(part, ast.stmt)]
            handlers = [part for part in inner_body if isinstance(part, ast.ExceptHandler | ast.match_case)]
            chosen = not taken and (is_branch(statement) or name in ("orelse", "handlers"))
            self._walk(statements, scope, branch=chosen or branch)
            for handler in handlers:
                self._walk(handler.body, scope, branch=True)

    def _side(self, statement: ast.stmt, scope: Function | None) -> str:
        """Which side of an `if` the command line chooses: `body`, `orelse`; empty where that is not known."""
        if self.given is None or not isinstance(statement, ast.If):
            return ""
        before, self.used = self.used, set()
        try:
            test = self.value(statement.test, scope)
            return "" if test.note else "body" if test.value else "orelse"
        except Unresolved:
            return ""
        finally:
            self.deciding |= self.used
            self.used = before

    def _assign(self, statement: ast.stmt, scope: Function | None, *, branch: bool) -> None:
        assigned = self._scopes[scope].assigned
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.AugAssign | ast.For):
            targets = [statement.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    plain = value if part is target and not branch else None
                    assigned.setdefault(part.id, []).append((statement.lineno, plain))

    def _argument(self, call: ast.Call) -> None:
        """`parser.add_argument("--lr", default=1e-4)`."""
        if last_name(call.func) != "add_argument" or not call.args:
            return
        names = [
            arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
        long = next((name for name in names if name.startswith("--")), names[0] if names else "")
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        default = keywords.get("default")
        action = text_of(keywords["action"]).strip("'\"") if "action" in keywords else ""
        if default is None and action in ("store_true", "store_false"):
            default = ast.Constant(action == "store_false")
        if default is None and self.given is not None:
            default = ast.Constant(None)
        if default is not None:
            plain = long.lstrip("-").replace("-", "_")
            self.defaults.setdefault(plain, []).append((default, f"default of {long}"))

    def _literal(self, node: ast.expr, scope: Function | None, depth: int) -> Value:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bytes | complex) or node.value is ...:
                raise Unresolved(text_of(node))
            return Value(node.value)
        if isinstance(node, ast.Name):
            return self._name(node, scope, depth)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, depth)
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            return self._collection(node, scope, depth)
        if isinstance(node, ast.JoinedStr):
            parts = [self.value(part, scope, depth) for part in node.values]
            return Value("".join(str(part.value) for part in parts), _first(parts))
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return self.value(node.value, scope, depth)
        if isinstance(node, ast.UnaryOp | ast.BinOp | ast.BoolOp | ast.IfExp | ast.Compare):
            return self._operation(node, scope, depth)
        return self._call_or_item(node, scope, depth)

    def _call_or_item(self, node: ast.expr, scope: Function | None, depth: int) -> Value:
        if isinstance(node, ast.Subscript):
            return self._item(node, scope, depth)
        if isinstance(node, ast.Call):
            return self._call(node, scope, depth)
        raise Unresolved(text_of(node))

    def _collection(
        self, node: ast.List | ast.Tuple | ast.Set | ast.Dict, scope: Function | None, depth: int
    ) -> Value:
        if isinstance(node, ast.Dict):
            return self._dict(node, scope, depth)
        items = [self.value(item, scope, depth) for item in node.elts]
        return Value([item.value for item in items], _first(items))

    def _name(self, node: ast.Name, scope: Function | None, depth: int) -> Value:
        for place in self._places(scope):
            names = self._scopes.get(place, _Scope())
            found = names.assigned.get(node.id)
            if found is not None:
                value = found[0][1]
                if len(found) > 1 or value is None:
                    raise Unresolved(node.id)
                return self.value(value, place, depth)
            if node.id in names.parameters:
                if place is not None and place.name == self._entry and node.id in (self.given or ()):
                    return self._of_line(node.id)
                if self.given is not None and place is not None and place.name != self._entry:
                    return self._passed(node.id, place, depth)
                default = names.parameters[node.id]
                if default is None:
                    raise Unresolved(node.id)
                if place is not None and place.name == self._entry:
                    return Value(self.value(default, None, depth).value)
                return Value(self.value(default, None, depth).value,
                             f"default of the parameter {node.id}; callers may pass others")  # fmt: skip
        raise Unresolved(node.id)

    def _passed(self, name: str, function: Function, depth: int) -> Value:
        """What the only call of a function gives a parameter, or its default."""
        calls = [(call, scope) for call, scope in self._sites if last_name(call.func) == function.name]
        if len(calls) != 1 or any(isinstance(arg, ast.Starred) for arg in calls[0][0].args):
            raise Unresolved(name)
        call, scope = calls[0]
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        places = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        named |= dict(zip(places, call.args, strict=False))
        given = named.get(name)
        if given is not None:
            return self.value(given, scope, depth)
        default = self._scopes[function].parameters[name]
        if default is None or None in named:
            raise Unresolved(name)
        return Value(self.value(default, None, depth).value)

    def _attribute(self, node: ast.Attribute, depth: int) -> Value:
        base = node.value
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and base.id in self.imported:
            return Value(Dotted(text_of(node)))
        defaults = self.defaults.get(node.attr, [])
        if isinstance(node.value, ast.Name) and self.given is not None and node.attr in self.given:
            return self._of_line(node.attr)
        if isinstance(node.value, ast.Name) and len(defaults) == 1:
            expression, said = defaults[0]
            if self.given is not None:
                return Value(self.value(expression, None, depth).value)
            return Value(
                self.value(expression, None, depth).value, f"{said}; the command line may say another"
            )
        raise Unresolved(text_of(node))

    def _of_line(self, name: str) -> Value:
        """An argument of the command line."""
        value = (self.given or {})[name]
        self.used.add(name)
        if value is None:
            raise Unresolved(f"--{name}")
        return Value(value)

    def _dict(self, node: ast.Dict, scope: Function | None, depth: int) -> Value:
        made: dict[Any, Any] = {}
        notes = []
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope, depth)
            notes.append(value)
            if key is None:
                if not isinstance(value.value, dict):
                    raise Unresolved(text_of(node))
                made.update(value.value)
            else:
                name = self.value(key, scope, depth).value
                if not isinstance(name, str | int | float | bool):
                    raise Unresolved(text_of(node))
                made[name] = value.value
        return Value(made, _first(notes))

    def _operation(self, node: ast.expr, scope: Function | None, depth: int) -> Value:
        if isinstance(node, ast.Compare):
            return self._compared(node, scope, depth)
        if isinstance(node, ast.BoolOp):
            parts = [self.value(part, scope, depth) for part in node.values]
            return next((v for v in parts if bool(v.value) is isinstance(node.op, ast.Or)), parts[-1])
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand, scope, depth)
            if isinstance(node.op, ast.Not):
                return Value(not inner.value, inner.note)
            if isinstance(node.op, ast.USub) and isinstance(inner.value, int | float):
                return Value(-inner.value, inner.note)
        elif isinstance(node, ast.IfExp):
            test = self.value(node.test, scope, depth)
            chosen = self.value(node.body if test.value else node.orelse, scope, depth)
            return Value(chosen.value, chosen.note or test.note)
        elif isinstance(node, ast.BinOp):
            left, right = self.value(node.left, scope, depth), self.value(node.right, scope, depth)
            result = computed(node.op, left.value, right.value)
            if result is not None:
                return Value(result, left.note or right.note)
        raise Unresolved(text_of(node))

    def _compared(self, node: ast.Compare, scope: Function | None, depth: int) -> Value:
        left, right = self.value(node.left, scope, depth), self.value(node.comparators[0], scope, depth)
        compare = COMPARISONS.get(type(node.ops[0]))
        if compare is None or len(node.ops) > 1:
            raise Unresolved(text_of(node))
        try:
            return Value(bool(compare(left.value, right.value)), left.note or right.note)
        except TypeError:
            raise Unresolved(text_of(node)) from None

    def _item(self, node: ast.Subscript, scope: Function | None, depth: int) -> Value:
        holder, key = self.value(node.value, scope, depth), self.value(node.slice, scope, depth)
        try:
            return Value(holder.value[key.value], holder.note)
        except (TypeError, KeyError, IndexError, ValueError):
            raise Unresolved(text_of(node)) from None

    def _call(self, node: ast.Call, scope: Function | None, depth: int) -> Value:
        name, said = last_name(node.func), text_of(node.func)
        if said == "dict" and not node.args:
            return Value({
                str(keyword.arg): self.value(keyword.value, scope, depth).value
                for keyword in node.keywords if keyword.arg is not None
            })  # fmt: skip
        if said in ("os.environ.get", "os.getenv") and len(node.args) == 2:
            inner = self.value(node.args[1], scope, depth)
            return Value(inner.value, f"default of {text_of(node.args[0])} in the environment")
        if said in ("int", "float", "str") and len(node.args) == 1 and not node.keywords:
            inner = self.value(node.args[0], scope, depth)
            try:
                return Value({"int": int, "float": float, "str": str}[said](inner.value), inner.note)
            except (TypeError, ValueError):
                raise Unresolved(text_of(node)) from None
        if said in ("os.path.join", "Path", "pathlib.Path") and node.args:
            parts = [self.value(arg, scope, depth) for arg in node.args]
            if all(isinstance(part.value, str) for part in parts):
                return Value("/".join(part.value for part in parts), _first(parts))
        raise Unresolved(text_of(node) if name else "an expression")


def _first(values: list[Value]) -> str:
    return next((value.note for value in values if value.note), "")
