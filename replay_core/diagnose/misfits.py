"""What Python says where a name, an argument or a module is not as code expects it: versions or a mistake.

    told = misfit(text)      # the exception's line, and the frames under it
    told.short, told.cause, told.next_step

Only what a library asks of a library is a matter of versions alone. A script's own call, an object of its own, a
package that was never installed and a folder that hides one have other remedies.
"""

from __future__ import annotations

import re

from msgspec import Struct

from replay_core.regexes import regex

#: A package by the folder it is installed in; trainers are run from a checkout of theirs, too.
_LIBRARY = regex(
    r"/(?:site|dist)-packages/([\w.-]+?)(?:/|\.py)|/lib/(python3)\.\d+/(?!(?:site|dist)-packages)"
    r"|/(verl|openrlhf|slime|trl|megatron|deepspeed|skyrl\w*|areal|prime_rl|nemo_rl|llamafactory|swift|rllm|miles|roll"
    r"|open_instruct|open_r1|torchtune|vllm|sglang|transformers)/(?=\w)"
)
_FRAME = regex(r'^File "([^"]+)", line \d+, in ')
_CALLS = regex(
    r"(?P<name>[\w.<>]+)\(\) (?:missing \d+ required (?P<kind>positional|keyword-only) arguments?: "
    r"(?P<missing>.{1,160})"
    r"|got an unexpected keyword argument '(?P<unknown>\w+)'|takes (?:from )?[\d to]+ positional arguments? but "
    r".{1,40})"
)
_OF_MODULE = regex(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_OF_OBJECT = regex(r"'(?P<kind>[\w.]+)' object has no attribute '(?P<name>\w+)'")
_ABSENT = regex(r"No module named '?(?P<module>[\w.]+)'?(?P<hidden>; '[\w.]+' is not a package)?")
_CIRCULAR = regex(r"partially initialized module '(?P<module>[\w.]+)'")
_NAME = regex(r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)' \((?P<path>[^)]*)\)")
#: Packages that leave a folder of their own name where a script runs, or share it with a folder people make.
_FOLDERS = ("wandb", "datasets", "evaluate", "trl", "ray", "tokenizers", "vllm", "verl", "swanlab", "mlflow", "rewards")
#: What every version of these has.
_ALWAYS = {
    "wandb": ("init", "login", "log", "finish", "Table", "Api", "run", "config"),
    "datasets": ("load_dataset", "Dataset", "DatasetDict", "load_from_disk"),
    "ray": ("init", "get", "remote", "put", "shutdown"),
    "trl": ("GRPOTrainer", "SFTTrainer"), "vllm": ("LLM", "SamplingParams"), "torch": ("nn", "tensor", "cuda"),
    "numpy": ("array", "zeros"), "random": ("seed", "random", "randint"), "json": ("loads", "dumps"),
    "logging": ("getLogger", "basicConfig"), "transformers": ("AutoTokenizer", "AutoModelForCausalLM"),
    "openai": ("OpenAI",), "evaluate": ("load",), "swanlab": ("init", "log"), "mlflow": ("log_metric", "start_run"),
}  # fmt: skip


class Misfit(Struct, frozen=True):
    """The cause in a few words, whole, and what to do."""

    short: str
    cause: str
    next_step: str


def misfit(text: str) -> Misfit | None:
    """What an exception of names and arguments means, by its words and the place it was raised at; None of others."""
    first, *frames = text.splitlines()
    places = [found[1] for each in frames if (found := _FRAME.match(each))]
    if (found := _CIRCULAR.search(first)) is not None:
        return _hidden(found["module"], "is imported while it is still being imported", places)
    if (found := _ABSENT.search(first)) is not None:
        return _absent(found["module"], found["hidden"] is not None)
    if (found := _OF_MODULE.search(first)) is not None:
        module, name = found["module"], found["name"]
        if name in _ALWAYS.get(module, ()):
            return _hidden(module, f"has no {name}, which every version has", places)
        return _versions(f"{module} has no {name}", module.split(".")[0], places)
    if (found := _NAME.search(first)) is not None:
        module, name, path = found["module"], found["name"], found["path"]
        if path == "unknown location" or (path.startswith("/") and not _library(path)):
            return _hidden(module, f"has no {name}", places, path)
        return _versions(f"{module} has no {name}", module.split(".")[0], places)
    if (found := _CALLS.search(first)) is not None:
        return _call(found, places)
    if (found := _OF_OBJECT.search(first)) is not None and places and found["kind"] != "NoneType":
        return _of_object(found["kind"], found["name"], places)
    return None


def _library(path: str) -> str | None:
    """The package a file belongs to; None of a script's own."""
    found = _LIBRARY.search(path)
    return next(filter(None, found.groups())) if found else None


def _hidden(module: str, what: str, places: list[str], path: str = "") -> Misfit:
    top = module.split(".")[0]
    where = f" ({path})" if path and path != "unknown location" else ""
    return Misfit(
        f"another {top} is imported in the package's place{where}: it {what}",
        f"a file or folder named {top} lies where the script runs (or earlier in sys.path) and hides the package"
        + (f"; {top} itself leaves a folder of that name there, which is found where the package is not installed"
           if top in ("wandb", "swanlab", "mlflow") else "")
        + "; or the package is half installed, so that only its folder is left",
        f"python -c 'import {top}; print({top}.__path__ if hasattr({top}, \"__path__\") else {top}.__file__)' there; "
        f"rename the file or folder, pip install --force-reinstall {top}",
    )  # fmt: skip


def _absent(module: str, hidden: bool) -> Misfit:
    top = module.split(".")[0]
    if hidden:
        return _hidden(top, f"is no package and holds no {module}", [])
    if "." in module:
        return Misfit(
            f"versions do not fit: the installed {top} has no {module}",
            f"versions do not fit: what imports {module} was written for another version of {top}, where it lies "
            f"elsewhere or not yet; or a folder named {top} hides the package",
            f"pip show {top}; install the version that the framework pins",
        )
    return Misfit(
        f"{module} is not installed",
        f"the Python that runs this has no {module}: it was never installed in this environment (another one is "
        "active, a Ray worker or container has one of its own), or it is the project's own and its folder is not in "
        "sys.path",
        f"which python; python -m pip install {module} in the environment of the process that failed; of the project's "
        "own code pip install -e . or PYTHONPATH",
    )


def _call(found: re.Match[str], places: list[str]) -> Misfit:
    name = found["name"].rpartition(".<locals>.")[2]
    if found["missing"]:
        what = f"{name}() is called without {found['missing'].replace(' and ', ', ').strip()}"
    elif found["unknown"]:
        what = f"{name}() does not take {found['unknown']}"
    else:
        what = f"{name}() is called with more arguments than it takes"
    # Python tells of it at the caller; a wrapper of the library that is called stands between.
    caller = next((_library(each) for each in reversed(places)), None)
    scripts = [each for each in places if _library(each) is None]
    if not places:
        return Misfit(
            f"a call does not fit: {what}",
            f"{what}: the call and the function's definition are of two versions (of the library, or of one's own "
            "code)",
            "python -c 'import inspect; print(inspect.signature(...))' of the installed one; change the call, or "
            "install the version it was written for",
        )
    libraries = [package for each in places if (package := _library(each)) is not None]
    if scripts and (caller is None or len(set(libraries)) <= 1):
        return Misfit(
            f"the script's call is wrong: {what}",
            f"the script calls a function that it does not know as it is ({scripts[-1]}): {what}; the function has "
            "another signature than the script takes for granted, in every version or in the installed one",
            f"print inspect.signature of {name} there and change the call; or install the version that the script was "
            "written for",
        )
    return _versions(what, caller, places)


def _of_object(kind: str, name: str, places: list[str]) -> Misfit | None:
    """An attribute that a script asks of an object of its own; of libraries among each other it is versions."""
    library = _library(places[-1])
    if library is not None:
        return None
    return Misfit(
        f"a {kind} has no {name}",
        f"the script asks a {kind} for {name}, which it has not ({places[-1]}): a name mistyped or never set on this "
        "path, an object of another class than the code takes it for (a wrapper, as of FSDP, DDP or PEFT, hides the "
        f"model's), or a library whose {kind} is of another version",
        f"print type(...) and dir(...) there; a wrapped model's own lies under .module or .base_model; else pip show "
        f"of the library {kind} comes from",
    )


def _versions(what: str, package: str | None, places: list[str]) -> Misfit:
    asked = next((library for each in reversed(places) if (library := _library(each)) not in (None, package)), None)
    both = " ".join(dict.fromkeys(each for each in (package, asked) if each and each != "python3")) or "both"
    return Misfit(
        f"versions do not fit: {what}",
        f"versions do not fit: {what} in the version that is installed"
        + (f", and {asked} was written for another" if asked and asked != "python3" else ""),
        f"pip show {both}; install the versions that the framework pins",
    )
