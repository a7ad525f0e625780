"""A Python file of a user's, imported as `python FILE` would run it; what goes wrong in it is told by its own line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tilefold.errors import SourceLoc, TilefoldError, UnsupportedError

#: Characters of an error's words that are shown.
MOST = 400


def imported(path: Path) -> ModuleType:
    """The file as a module; TilefoldError with the user's line where it cannot be imported."""
    file = str(path)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_target", path)
    if spec is None or spec.loader is None:
        raise TilefoldError(f"not a Python file: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` would, for the file's own imports
    try:
        spec.loader.exec_module(module)
    except SyntaxError as err:
        where = SourceLoc(str(err.filename or file), err.lineno, (err.text or "").strip()) if err.lineno else None
        raise TilefoldError(f"{file} is no Python: {err.msg}", loc=where) from None
    except UnicodeDecodeError:
        raise TilefoldError(f"{file} is no text") from None
    except SystemExit:
        raise TilefoldError(
            f"{file} ends the program when it is imported", hint="put that under `if __name__ == '__main__':`"
        ) from None
    except KeyboardInterrupt:
        raise
    # Hidden: whatever the user's file raises. Its line and message are what helps, not our frames above it.
    except BaseException as err:
        raise _raised(err, f"{file} cannot be imported", path) from err
    finally:
        sys.path.pop(0)
    return module


def made(module: ModuleType, name: str, *given: Any) -> Any:
    """What the file's function of this name gives; TilefoldError with its line where it raises."""
    function: Callable[..., Any] = getattr(module, name)
    try:
        return function(*given)
    # Hidden: whatever the user's function raises, as in `imported`.
    except Exception as err:
        raise _raised(err, f"{name}() fails", Path(str(module.__file__))) from err


@contextmanager
def checked(fn: Callable[..., Any], given: Sequence[Any], module: ModuleType) -> Iterator[None]:
    """Around what is done with a function of the file: where that fails and the function alone fails too, without any
    of ours, that is the error (TilefoldError), as for a dtype that an operator of PyTorch does not take, or a name that
    torch does not have, of which Dynamo says only that it cannot capture it."""
    try:
        yield
    except Exception as found:  # not hidden: raised again, unless the function fails by itself
        if isinstance(found, TilefoldError) and not isinstance(found, UnsupportedError):
            raise
        try:
            fn(*given)
        # Hidden: whatever the user's function raises, as in `imported`.
        except Exception as err:
            raise _raised(err, "the function fails on these arguments", Path(str(module.__file__))) from err
        raise


def _raised(err: BaseException, what: str, path: Path) -> TilefoldError:
    """An error of the user's file, with the innermost of its lines."""
    mine = [f for f in traceback.extract_tb(err.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    loc = SourceLoc(mine[-1].filename, mine[-1].lineno or 0, mine[-1].line or "") if mine else None
    return TilefoldError(f"{what}: {type(err).__name__}: {_told(str(err))}", loc=loc)


def _told(words: str) -> str:
    """An error's words without the tables behind them: torch's dispatcher names all kernels that it has."""
    if len(words) <= MOST:
        return words
    start = words.partition("\n\n")[0][:MOST]
    return start[: start.rfind(". ") + 1] or f"{start}..."
