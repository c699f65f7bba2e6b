"""What a user names as ``module:name`` or ``file.py:name``: import it, and call it with care."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from wholebatch.errors import JudgeError, UsageError, WholebatchError
from wholebatch.whereabouts import told

# What the names of modules begin with that are made of a file; the rest tells where it lies.
MODULE_OF_A_FILE = "wholebatch_"


def find_target(target: str, *, what: str, key: str | None = None) -> Any:
    """Import the thing that ``target`` names.

    A file's folder, and for a module the current one, can be imported from while that is done.

    Args:
        target: ``module:name`` or ``file.py:name``.
        what: it should be, in words, such as "a problem".
        key: the setting that names it, which begins every message; None where no setting does.

    Returns:
        The function or value of that name.

    Raises:
        UsageError: not of this form, or there is no such file, module or name.
        JudgeError: importing it failed.
    """
    try:
        return _found(target, what)
    except (UsageError, JudgeError) as error:
        if key is None:
            raise
        raise type(error)(f"{key}: {error}") from error.__cause__


def _found(target: str, what: str) -> Any:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{target!r} does not name {what}; write module:name or file.py:name")
    module = _import(place)
    if not hasattr(module, name):
        raise UsageError(f"{place} has no {name!r}; it has {', '.join(_public(module)) or 'nothing'}")
    return getattr(module, name)


def guarded(call: Callable[[], Any], what: str) -> Any:
    """Call the user's code; its exceptions become a JudgeError that names them.

    Args:
        call: without arguments.
        what: begins the message, such as "importing problem.py failed".

    Raises:
        JudgeError: from any exception but our own.
    """
    try:
        return call()
    except WholebatchError:
        raise
    except (Exception, SystemExit) as error:  # an exit code of theirs is no verdict
        raise JudgeError(f"{what} with {told(error)}") from error


def check_options(function: Callable[..., Any], options: Mapping[str, Any], *, what: str) -> None:
    """Refuse options that a function does not take, before it is called.

    Args:
        function: of the user's own.
        options: its keyword arguments.
        what: begins the message, such as "model.options for mine.py:model".

    Raises:
        UsageError: an option that it does not have, or one that it needs and is not given.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise UsageError(f"{what} are {dict(options)}: {error}; it takes {signature}") from error


def _import(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"there is no file {place}; give the path of a Python file, or module:name")
        name = _module_name(path)
        if name in sys.modules:  # two things of one file share its classes
            return sys.modules[name]
        loader = importlib.machinery.SourceFileLoader(name, str(path))
        module = importlib.util.module_from_spec(
            importlib.machinery.ModuleSpec(name, loader, origin=str(path))
        )
        module.__file__ = str(path.resolve())
        with _importable_from(path.parent):
            sys.modules[name] = module  # dataclasses look their own module up there
            try:
                guarded(lambda: loader.exec_module(module), f"importing {place} failed")
            except BaseException:
                del sys.modules[name]
                raise
        return module
    with _importable_from(Path.cwd()):
        # Finding a module imports the packages that it is in.
        if not guarded(lambda: _module_exists(place), f"importing {place} failed"):
            raise UsageError(f"there is no module {place!r} here; give module:name, or file.py:name")
        imported: ModuleType = guarded(lambda: importlib.import_module(place), f"importing {place} failed")
        return imported


def _module_name(path: Path) -> str:
    """A name that no other file has, nor the same file once it is changed."""
    found = path.stat()
    mark = f"{path.resolve()}\n{found.st_mtime_ns}\n{found.st_size}"
    return f"{MODULE_OF_A_FILE}{path.stem}_{hashlib.blake2b(mark.encode(), digest_size=6).hexdigest()}"


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


@contextmanager
def _importable_from(folder: Path) -> Iterator[None]:
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _public(module: ModuleType) -> list[str]:
    """The functions and classes that the module itself defines."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return [name for name in own if not name.startswith("_")]
