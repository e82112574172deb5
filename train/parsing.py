"""Recipe text -> a plain dict, and validation errors -> sentences.

YAML is read by the rules of YAML 1.2, because those of 1.1 (PyYAML's) change values in silence: `1e-3` is text, `no` is
False, `012` is 10, and of two equal keys the first is dropped. Here they are a float, the text "no", and two errors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

_FLOAT = re.compile(r"[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)")
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_PADDED = re.compile(r"[-+]?0[0-9]+")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core scalars, no repeated keys."""


class _Fault(yaml.MarkedYAMLError):
    """What a reader of the file did that we refuse to guess about."""


def _padded(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    raise _Fault(
        problem=f"{node.value} has a leading zero; write {int(node.value)} or quote it", problem_mark=node.start_mark
    )


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in seen:
            raise _Fault(problem=f"key {name!r} occurs twice; keep one", problem_mark=key.start_mark)
        seen.add(name)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1; of ours, the first pattern that fits decides
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("!padded", re.compile(_PADDED.pattern + "$"), list("-+0"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(_INT.pattern + "$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+0123456789."))
_Loader.add_constructor("!padded", _padded)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(text: str, *, source: str) -> Any:
    """The value that `text` holds. Raises ValueError naming `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ValueError(f"{source}{where}: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not YAML: {error}") from error


def apply_overrides(content: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`content` with every `a.b=c` set, c read as YAML. Raises ValueError for an override that is not of that form."""
    result = dict(content)
    for override in overrides:
        path, equals, value = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"override {override!r} is not of the form key.key=value, like optimiser.lr=1e-3.")
        node = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = node.get(key) or {}
            if not isinstance(inner, dict):
                raise ValueError(
                    f"override {override!r}: {'.'.join(keys[:depth])} is a value ({inner!r}), it has no keys."
                )
            node[key] = dict(inner)
            node = node[key]
        node[keys[-1]] = read_yaml(value, source=f"override {override!r}")
    return result


def explain(
    error: ValidationError, model: type[BaseModel], variants: dict[str, type[BaseModel]], *, source: str
) -> ValueError:
    """A ValueError with one line per fault. `variants` maps a union's tag to its model, as it stands in error paths."""
    lines = []
    for fault in error.errors():
        path = [str(part) for part in fault["loc"] if part not in variants]
        known = _fields(model, fault["loc"][:-1], variants)
        lines.append(f"  {'.'.join(path) or 'recipe'}: {_sentence(dict(fault), known)}")
    return ValueError("\n".join([f"{source}:", *lines]))


def nearest(word: str, known: Sequence[str]) -> str:
    """`did you mean X?`, or the whole list where nothing is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."


def _sentence(fault: dict[str, Any], known: Sequence[str]) -> str:
    kind, message, got = fault["type"], str(fault["msg"]), fault["input"]
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(fault['loc'][-1]), known)}"
    if kind == "missing":
        return "is required and has no default."
    if kind == "union_tag_invalid":
        tags = re.findall(r"'([^']*)'", str(fault["ctx"]["expected_tags"]))
        return f"unknown method {fault['ctx']['tag']!r}; {nearest(fault['ctx']['tag'], tags)}"
    if kind == "union_tag_not_found":
        return f"needs the key {str(fault['ctx']['discriminator']).strip(chr(39))}."
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message}, got {got!r}."


def _fields(model: type[BaseModel], path: tuple[int | str, ...], variants: dict[str, type[BaseModel]]) -> list[str]:
    """Names of the fields at `path` inside `model`."""
    found: list[type[BaseModel]] = [model]
    for part in path:
        if part in variants:
            found = [variants[str(part)]]
        else:
            inner = [one.model_fields[str(part)].annotation for one in found if str(part) in one.model_fields]
            found = [leaf for annotation in inner for leaf in _models(annotation)]
    return [name for one in found for name in one.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [leaf for part in get_args(annotation) for leaf in _models(part)]
