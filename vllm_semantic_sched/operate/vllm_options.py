"""Options of `vllm serve`, read as vLLM reads them: from its command line and the YAML file that
`--config` names, with underscores or hyphens, and parts of JSON by dots."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_LONG_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
}
# An urgent request waits for the step under way, and vLLM's 2,048 prompt tokens take seconds.
_STEP_TOKENS_PER_CORE = 64
_MOST_STEP_TOKENS = 2048


def given_options(options: Sequence[str]) -> dict[str, str]:
    """The values of options by name, with hyphens and in full; of several, the last. The command
    line counts before the YAML file; lists and mappings, and options with dots, are JSON."""
    values = dict(_options_of_file(options))
    parts: dict[str, dict[str, Any]] = {}
    for option, following in itertools.pairwise([*options, ""]):
        word, equals, value = option.partition("=")
        name, path = _name_of(word)
        value = value if equals else following
        if path:
            _put(parts.setdefault(name, {}), path, value)
        else:
            values[name] = value
    # vLLM puts them behind all others.
    return values | {name: json.dumps(part) for name, part in parts.items()}


def take_option(options: list[str], name: str) -> str | None:
    """Remove an option from the command line; its value, also from the YAML file, where it stays.
    None if absent."""
    value = given_options(options).get(name)
    index = 0
    while index < len(options):
        word, equals, _ = options[index].partition("=")
        if _name_of(word)[0] == name:
            del options[index : index + (1 if equals else 2)]
        else:
            index += 1
    return value


def short_steps(options: Sequence[str], cores: int) -> list[str]:
    """Options that make the steps of a machine without a GPU short, unless the user's say how many
    tokens a step may have."""
    given = given_options(options)
    if given.keys() & {"--max-num-batched-tokens", "--no-enable-chunked-prefill"}:
        return []
    seats = int(given.get("--max-num-seqs") or 0)
    tokens = min(_MOST_STEP_TOKENS, _STEP_TOKENS_PER_CORE * cores)
    return ["--max-num-batched-tokens", str(max(seats, tokens))]  # vLLM takes no fewer than seats


def _name_of(word: str) -> tuple[str, str]:
    """An option's name, in full, and the path within its JSON."""
    name, _, path = word.partition(".") if word.startswith("-") else (word, "", "")
    name = name.replace("_", "-")
    return _LONG_NAMES.get(name, name), path


def _put(mapping: dict[str, Any], path: str, text: str) -> None:
    """Set the part of a mapping that a path with dots names; `+` at its end: a list's elements."""
    *keys, last = path.split(".")
    for key in keys:
        inner = mapping.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        mapping = inner
    if last.endswith("+"):
        before = mapping.get(last[:-1])
        mapping[last[:-1]] = [*(before if isinstance(before, list) else ()), *text.split(",")]
        return
    try:
        mapping[last] = json.loads(text)
    except ValueError:
        mapping[last] = text


def _options_of_file(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of the YAML file, if there is one. vLLM says what is wrong with it."""
    if "--config" not in options[:-1]:
        return
    try:
        config = yaml.safe_load(Path(options[options.index("--config") + 1]).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        name = _name_of(f"--{key}")[0]
        if isinstance(value, bool):
            if value:
                yield name, ""
            else:
                yield f"--no-{name[2:]}", ""
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            yield name, text
