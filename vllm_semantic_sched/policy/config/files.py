"""Finds policies, profiles, domains and scenarios: by name among the shipped ones, or by path."""

import itertools
from pathlib import Path
from typing import Any, Literal

import yaml

from vllm_semantic_sched.policy.config.section import PolicyError, nearest

_PACKAGE = Path(__file__).resolve().parents[2]

Kind = Literal["policy", "profile", "domain", "scenario"]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without the booleans yes/no/on/off, so that `mode: off` is a string, and without
    keys that occur twice, of which the last would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                problem = f"the key {key.value!r} occurs twice (line {line})"
                raise yaml.constructor.ConstructorError(problem=problem)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# By the first letter of a word: what it may be.
_Loader.yaml_implicit_resolvers = dict(yaml.SafeLoader.yaml_implicit_resolvers)
for _first in "yYnNoO":
    _Loader.yaml_implicit_resolvers[_first] = [
        (tag, pattern)
        for tag, pattern in yaml.SafeLoader.yaml_implicit_resolvers[_first]
        if tag != "tag:yaml.org,2002:bool"
    ]


def read_config(name_or_path: str | Path, kind: Kind) -> tuple[Any, str]:
    """Content of a YAML file and its name in messages; PolicyError if it cannot be read."""
    path = resolve_config(name_or_path, kind)
    source = f"{kind} {path}"
    try:
        # _Loader is a SafeLoader: it builds plain values only.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(f"{source}: cannot be read as YAML: {error}") from error
    return data, source


def shipped_configs() -> Path:
    """Folder of the shipped YAML files: in an installed package, or beside it in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def shipped_names(kind: Kind) -> list[str]:
    """Sorted names of the shipped files of a kind."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def summary_of(name: str, kind: Kind) -> str:
    """The first sentence of the comment at the head of a shipped file."""
    lines = (_folder(kind) / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    sentence, point, _ = text.partition(". ")
    return sentence.removesuffix(".") + "." if point or sentence else ""


def resolve_config(name_or_path: str | Path, kind: Kind) -> Path:
    """Find a file by shipped name (`ems`) or path; PolicyError, with the names, if it is none."""
    names = shipped_names(kind)
    given = str(name_or_path)
    if given in names:
        return _folder(kind) / f"{given}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise PolicyError(f"{kind} {given!r} is a folder; a YAML file is needed")
    near = nearest(given, names)
    hint = f" Did you mean {near}?" if near else ""
    raise PolicyError(
        f"{kind} {given!r}: no such file and no shipped {kind} of that name."
        f"{hint} Shipped: {', '.join(names)}"
    )


def _folder(kind: Kind) -> Path:
    name = "policies" if kind == "policy" else f"{kind}s"
    return shipped_configs() / name
