"""A study from the user's own file: `study.py:study` names a `Study`, or a function that returns one."""

import importlib.util
import re
import sys
from pathlib import Path

from loadmaster.core.errors import FileError, InputError, LoadmasterError, UnknownNameError
from loadmaster.train.study import Study

_SOURCE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def load_study(source: str) -> Study:
    """Read the file and take the study out of it."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise InputError(f"{source!r} names no study; write file.py:name, for example study.py:study")
    path, name = match.groups()
    if not Path(path).is_file():
        raise FileError(f"no such file {path!r}; give the file that defines the study")
    spec = importlib.util.spec_from_file_location(f"loadmaster_user_{Path(path).stem}", path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # it may import its neighbours, now and when it runs
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            known = [key for key, value in vars(module).items() if isinstance(value, Study)]
            raise UnknownNameError(f"study of {path}", name, known)
        found = getattr(module, name)
        study = found if isinstance(found, Study) else found() if callable(found) else found
    except LoadmasterError:
        raise
    except (Exception, SystemExit) as problem:
        text = " ".join(str(problem).split())[:300]
        raise InputError(f"{path}:{name} raised {type(problem).__name__}: {text}") from problem
    if not isinstance(study, Study):
        raise InputError(f"{path}:{name} is {type(study).__name__}; it must be a loadmaster.train.Study")
    return study
