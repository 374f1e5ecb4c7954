"""The training function: found and judged without running its file, then loaded in a worker."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.errors import TargetError, nearest

DEFAULT_FUNCTION = "train"


@dataclass(frozen=True)
class Target:
    """Where a training function is."""

    path: Path
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"


@dataclass(frozen=True)
class _Signature:
    """What a call needs to know of a function's parameters, in order."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]
    takes_any_positional: bool
    takes_any_keyword: bool


def check_target(target: str, params: Mapping[str, Any] | None = None) -> Target:
    """Find a training function by reading its file, which is not run.

    A name that the file imports, assigns or decorates is left for `load_target` to judge.

    Parameters
    ----------
    target : str
        ``FILE.py:function``, or ``FILE.py``, whose function is then ``train``.
    params : mapping, optional
        The keyword arguments that it will be called with beside the job.

    Raises
    ------
    TargetError
        There is no such file or function, the file is not valid Python, or the function does
        not take a job and these parameters.
    """
    path, name = _split(target)
    found = _find(_parse(target, path), target, name)
    if isinstance(found, ast.AsyncFunctionDef):
        remedy = "make it an ordinary function"
        raise TargetError(target=target, problem=f"{name!r} is asynchronous", remedy=remedy)
    if isinstance(found, ast.FunctionDef) and not found.decorator_list:
        _check_call(target, name, _signature_of_node(found), params or {})
    return Target(path, name)


def load_target(target: Target, params: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import the file of a target and return its function. What the file raises passes through.

    The file's folder is put on `sys.path`, as python does for a script, and the module is named
    after the file (never ``__main__``). A file in a package is imported as a part of it.
    """
    module = _import_file(target.path)
    try:
        function = getattr(module, target.function)
    except AttributeError:
        raise _no_function(str(target), target.function, vars(module)) from None
    if not callable(function):
        problem = f"{target.function!r} is no function but of type {type(function).__name__}"
        raise TargetError(target=str(target), problem=problem, remedy="name a function")
    check_function(function, params or {}, name=str(target))
    return function


def check_function(
    function: Callable[..., Any], params: Mapping[str, Any], name: str | None = None
) -> None:
    """Raise `TargetError` unless a function can be called with a job and these parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables tell nothing
        return
    short = getattr(function, "__name__", "the function")
    _check_call(name or short, short, _signature_of_object(signature), params)


# --- finding ------------------------------------------------------------------------------


def _split(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not colon:
        file, name = target, DEFAULT_FUNCTION
    if not file or not name.isidentifier():
        problem, remedy = "is no target", "write FILE.py or FILE.py:function"
        raise TargetError(target=target, problem=problem, remedy=remedy)
    return Path(file).absolute(), name


def _parse(target: str, path: Path) -> ast.Module:
    if path.suffix != ".py":
        problem, remedy = f"{path.name} is not a Python file", "give a file that ends in .py"
        raise TargetError(target=target, problem=problem, remedy=remedy)
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except FileNotFoundError:
        raise _no_file(target, path) from None
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        remedy = "give a readable file"
        raise TargetError(target=target, problem=problem, remedy=remedy) from error
    except SyntaxError as error:
        problem = f"syntax error in line {error.lineno}: {error.msg}"
        raise TargetError(target=target, problem=problem, remedy=f"correct {path}") from error
    except ValueError as error:  # null bytes
        problem = f"{path.name} is not a Python file ({error})"
        raise TargetError(target=target, problem=problem, remedy="give Python source") from error


def _no_file(target: str, path: Path) -> TargetError:
    files = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    guess = nearest(path.name, files)
    remedy = f"did you mean {path.parent / guess}?" if guess else "check the path"
    return TargetError(target=target, problem=f"there is no file {path}", remedy=remedy)


def _find(tree: ast.Module, target: str, name: str) -> ast.stmt | None:
    """Return the last definition of a name at the top of a module; None if it may be elsewhere."""
    functions: dict[str, ast.stmt] = {}
    other: set[str] = set()
    for statement in _top_level(tree.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[statement.name] = statement
        else:
            other |= _names_bound_by(statement)
    if name in other or "*" in other:
        return None
    if name not in functions:
        raise _no_function(target, name, functions)
    return functions[name]


def _no_function(target: str, name: str, known: Mapping[str, Any]) -> TargetError:
    public = [key for key, value in known.items() if key[0] != "_" and not inspect.ismodule(value)]
    guess = nearest(name, public)
    if guess:
        remedy = f"did you mean {guess!r}?"
    elif public:
        remedy = f"name one after a colon; the file has {', '.join(public[:8])}"
    else:
        remedy = f"define {name}(job, ...) there"
    return TargetError(target=target, problem=f"there is no function {name!r}", remedy=remedy)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those inside `if`, `try`, `with` and loops."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for inner in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(statement, inner, []))
        for handler in getattr(statement, "handlers", []):
            yield from _top_level(handler.body)


def _names_bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = [node for target in targets for node in ast.walk(target)]
        return {node.id for node in nodes if isinstance(node, ast.Name)}
    return set()


# --- judging ------------------------------------------------------------------------------


def _signature_of_node(node: ast.FunctionDef) -> _Signature:
    arguments = node.args
    positional = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args))
    keyword_only = tuple(a.arg for a in arguments.kwonlyargs)
    num_required = len(positional) - len(arguments.defaults)
    defaults = zip(keyword_only, arguments.kw_defaults, strict=True)
    required = {*positional[:num_required], *(name for name, value in defaults if value is None)}
    return _Signature(
        positional,
        keyword_only,
        frozenset(required),
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def _signature_of_object(signature: inspect.Signature) -> _Signature:
    parameters = list(signature.parameters.values())
    kinds = {p.kind for p in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in (*positional, *keyword_only) if p.default is p.empty]
    return _Signature(
        tuple(p.name for p in positional),
        tuple(p.name for p in keyword_only),
        frozenset(required),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


def _check_call(target: str, name: str, signature: _Signature, params: Mapping[str, Any]) -> None:
    if not signature.positional and not signature.takes_any_positional:
        problem = f"{name!r} takes no job"
        remedy = f"give it a first parameter: def {name}(job, ...)"
        raise TargetError(target=target, problem=problem, remedy=remedy)
    known = (*signature.positional[1:], *signature.keyword_only)
    for param in params:
        if param in signature.positional[:1]:
            problem = f"{param!r} is where {name!r} takes the job, so it cannot be given a value"
            raise TargetError(target=target, problem=problem, remedy="leave it out")
        if param not in known and not signature.takes_any_keyword:
            guess = nearest(param, known)
            listed = f"its parameters are {', '.join(known)}" if known else "it has none"
            remedy = f"did you mean {guess!r}?" if guess else listed
            problem = f"{name!r} has no parameter {param!r}"
            raise TargetError(target=target, problem=problem, remedy=remedy)
    missing = [key for key in known if key in signature.required and key not in params]
    if missing:
        problem = f"{name!r} needs a value for {', '.join(missing)}"
        remedy = f"give it with -p {missing[0]}=..., or a default in the function"
        raise TargetError(target=target, problem=problem, remedy=remedy)


# --- loading ------------------------------------------------------------------------------


def _import_file(path: Path) -> Any:
    path = path.resolve()
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    name = ".".join(parts)
    if len(parts) > 1:
        return importlib.import_module(name)
    return _import_single(name, path)


def _import_single(name: str, path: Path) -> Any:
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None or name in sys.stdlib_module_names:
        name = f"{name}__target"  # a file called test.py must not replace that module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        problem, remedy = f"{path} cannot be imported", "give a file that ends in .py"
        raise TargetError(target=str(path), problem=problem, remedy=remedy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
