"""Links, commands, policy keys, metrics and code names in the documentation exist."""

import io
import json
import re
import runpy
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import docs_site
import pytest
import reference
import yaml
from alerts import RULES

import vllm_semantic_sched
from vllm_semantic_sched.cli import main, parse
from vllm_semantic_sched.engine.metrics.table import COUNTERS, GAUGES, HISTOGRAMS
from vllm_semantic_sched.engine.startup.settings import EngineSettings
from vllm_semantic_sched.lab.bench.page import figures_of_picture
from vllm_semantic_sched.policy.config import Policy, load_policy, parse_policy
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.config.section import keys_of, parse_section
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.sections import Settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = DOCS / "measurements" / "predictor-report"
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "SECURITY.md",
        *sorted(DOCS.rglob("*.md")),
        *ROOT.glob("scripts/**/*.md"),
    )
    if GENERATED not in page.parents
]
FOLDERS = "scripts|configs|tests|docs|patches|policy|predict|engine|sim|bench|cli|admin"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def blocks_of(page: Path, *languages: str) -> list[str]:
    """Code blocks in one of the languages; `""` for blocks without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)
    return [block for language, block in found if language in languages]


# Links and paths


@cache
def anchors_of(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


def links_of(page: Path) -> list[tuple[str, str]]:
    """Relative targets and their anchors; the target is empty for a link within the page."""
    return re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text_of(page))


@every_page
def test_links_resolve(page: Path) -> None:
    for target, anchor in links_of(page):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors_of(path), f"{target}#{anchor}"


@every_page
def test_named_paths_exist(page: Path) -> None:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text_of(page)):
        assert (ROOT / path).exists() or (ROOT / "vllm_semantic_sched" / path).exists(), path


def test_pages_named_by_other_files_exist() -> None:
    files = [ROOT / "pyproject.toml"]
    for folder in ("vllm_semantic_sched", "configs", "scripts", "tests", "patches"):
        paths = (ROOT / folder).rglob("*")
        files += [path for path in paths if path.suffix in (".py", ".yaml", ".sh")]
    for file in files:
        for named in re.findall(r"\bdocs/[\w/-]+\.(?:md|png)", text_of(file)):
            assert (ROOT / named).exists(), f"{file.relative_to(ROOT)}: {named}"


def test_every_page_is_reachable_from_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            linked = ((page.parent / target).resolve() for target, _ in links_of(page) if target)
            ahead += [target for target in linked if target.suffix == ".md" and target.exists()]
    assert {page for page in PAGES if DOCS in page.parents} <= reached


# The site


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without mkdocs: values with a tag of Python are None."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def entries_of(navigation: object) -> list[str]:
    """The pages of a navigation, in its order."""
    match navigation:
        case str(page):
            return [page]
        case dict():
            return [page for part in navigation.values() for page in entries_of(part)]
        case list():
            return [page for part in navigation for page in entries_of(part)]
    raise TypeError(navigation)


def test_navigation_of_the_site_has_every_page_once() -> None:
    site = yaml.load(text_of(ROOT / "mkdocs.yml"), SiteLoader)
    entries = entries_of(site["nav"])
    inside = {docs_site.page_of(page) for page in DOCS.rglob("*.md")}
    outside = {docs_site.page_of(page) for page in docs_site.files_outside()}
    assert len(inside) > 20
    assert len(entries) == len(set(entries))
    assert inside - set(entries) == set(), "pages without an entry in mkdocs.yml"
    assert set(entries) - inside - outside == set(), "entries without a page"


def test_links_of_the_site_stay_inside_it() -> None:
    """A link out of docs/ leads to a page that the hook adds, and one to a folder is its text."""
    page = DOCS / "measurements" / "README.md"
    links = "[a](../../README.md#try-it) [b](kv-swap.md) [c](../../configs/policy-keys.yaml)"
    moved = "[a](../index.md#try-it) [b](kv-swap.md) [c](../configs/policy-keys.yaml.md)"
    assert docs_site.with_site_links(links, page) == moved
    assert docs_site.with_site_links("[d](../../configs/) [e](https://f.org)", page) == (
        "d [e](https://f.org)"
    )
    assert ROOT / "configs" / "policy-keys.yaml" in docs_site.files_outside()


def test_pipes_in_code_of_tables_have_no_backslash_on_the_site() -> None:
    row = r"| `a\|b` | c \| d | `e` |"
    assert docs_site.with_plain_pipes(row) == r"| `a|b` | c \| d | `e` |"
    outside = r"grep `a\|b`"
    assert docs_site.with_plain_pipes(outside) == outside


# Figures


def numbers_in(text: str) -> list[str]:
    """Whole and decimal numbers that are not part of a word."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?", text)


def test_readme_figures_match_the_measurements() -> None:
    """Each row's figures occur in the pages that it links, or in the comparison of schedulers."""
    checked = 0
    for row in re.findall(r"^\| .+ \|$", text_of(ROOT / "README.md"), re.MULTILINE):
        targets = re.findall(r"\((docs/measurements/[\w-]+\.md)", row)
        pages = [ROOT / name for name in targets or ["docs/measurements/comparison.md"]]
        known = {number for page in pages for number in numbers_in(text_of(page))}
        cells = row.strip("| ").split(" | ")[1:]
        # A row of costs has its figures in the first of two further cells.
        for figure in numbers_in(" ".join(cells if len(cells) > 2 else cells[:1])):
            assert figure in known, f"{figure} in: {row}"
            checked += 1
    assert checked >= 6


def test_readme_says_what_its_picture_shows() -> None:
    """The picture carries the figures that it was drawn from."""
    shown = figures_of_picture(DOCS / "comparison.png")
    caption = text_of(ROOT / "README.md").partition("What `scripts/demo.sh` draws")[2]
    for schedulers in shown.values():
        assert len(schedulers) == 4
        for figure in schedulers.values():
            assert f"{figure} s with" in " ".join(caption.partition("\n\n")[0].split())


def test_figures_of_the_policies_match_the_measurements() -> None:
    """The table to choose a policy by repeats figures of the page that it links."""
    measured = text_of(DOCS / "measurements" / "tiers-and-overload.md")
    rows = {
        name: row for name, row in re.findall(r"^\| `(\w+)` \| (.+) \|$", measured, re.MULTILINE)
    }
    chosen = re.findall(
        r"^\| `(\w+)` \| .+? \| ([\d./ |]+) \|$", text_of(DOCS / "policies.md"), re.MULTILINE
    )
    scenario = yaml.safe_load(text_of(ROOT / "configs/scenarios/presets.yaml"))
    assert {name for name, _ in chosen} == set(scenario["schedulers"]) == set(rows)
    for name, cells in chosen:
        assert set(numbers_in(cells)) <= set(numbers_in(rows[name])), name


# Commands


def command_lines(page: Path, start: str) -> list[str]:
    """Commands in code blocks that begin like that, without their line continuations."""
    blocks = "\n".join(blocks_of(page, "bash", "sh", ""))
    indented = "\n".join(re.findall(r"^    (.+)$", text_of(page), re.MULTILINE))
    lines = re.sub(r"\\\n\s*", "", f"{blocks}\n{indented}").splitlines()
    return [line for line in lines if re.match(start, line)]


def mentions(page: Path, start: str) -> list[str]:
    """Commands in running text that begin like that."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`([^`]+)`", re.sub(r"\n(?!\n)", " ", prose))
    return [" ".join(text.split()) for text in found if re.match(start, text)]


@every_page
def test_semsched_commands_parse(page: Path, capsys) -> None:
    for line in command_lines(page, "semsched "):
        try:
            parse(shlex.split(line.partition(" > ")[0], comments=True)[1:])
        except SystemExit:
            pytest.fail(f"{line}\n{capsys.readouterr().err}")


def test_plan_of_the_simulator_page_can_be_made(tmp_path, capsys) -> None:
    compared, *others = command_lines(DOCS / "simulator.md", "semsched plan --policy ")
    assert not others
    *words, _ = shlex.split(compared)[1:]  # the folder
    assert main([*words, str(tmp_path), "--set", "workload.requests=20", "--quiet"]) == 0
    header = (tmp_path / "plan.csv").read_text().splitlines()[0]
    assert header == ",fcfs,tiers"


@cache
def help_of(*command: str) -> str | None:
    """What a command prints for --help; None if there is no such command. In this process: a new
    one would import the same modules again for each command."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit) as ended,
    ):
        if command[0] == "semsched":
            parse([*command[1:], "--help"])
        else:
            patch.setattr(sys, "argv", [*command, "--help"])
            runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    return None if ended.value.code else printed.getvalue()


@every_page
def test_mentioned_semsched_commands_and_options_exist(page: Path) -> None:
    for text in dict.fromkeys(mentions(page, r"semsched [a-z]")):
        words = shlex.split(text)
        names = [word for word in words[1:3] if re.fullmatch(r"[a-z-]+", word)]
        printed = help_of("semsched", *names) or help_of("semsched", *names[:1])
        assert printed is not None, text
        options = words[: words.index("--")] if "--" in words else words
        for option in (word for word in options if word.startswith("--")):
            assert option in printed, f"{text}: {option}"


@every_page
def test_scripts_and_their_options_exist(page: Path) -> None:
    start = r"(python )?scripts/[a-z_/]+\.(py|sh)"
    for text in dict.fromkeys(command_lines(page, start) + mentions(page, start)):
        words = shlex.split(text.removeprefix("python "), comments=True)
        assert (ROOT / words[0]).exists(), text
        end = words.index("--") if "--" in words else len(words)
        options = [word.split("=")[0] for word in words[1:end] if word.startswith("--")]
        described = text_of(ROOT / words[0])
        if options and words[0].endswith(".py"):
            described = help_of(words[0]) or ""
        for option in options:
            assert option in described, f"{text}: {option}"


@every_page
def test_server_options_of_this_package_are_valid(page: Path) -> None:
    text = re.sub(r"\\\n\s*", "", text_of(page))
    for given in re.findall(r"--additional-config '([^']+)'", text):
        settings = parse_section(EngineSettings, json.loads(given)["semantic_sched"], "page")
        if "/" not in settings.policy:
            load_policy(settings.policy)
    for given in re.findall(r"--kv-transfer-config '([^']+)'", text):
        assert json.loads(given)


@every_page
def test_names_of_the_package_exist(page: Path) -> None:
    names = set(re.findall(r"\bvllm_semantic_sched(?:\.\w+)+", text_of(page)))
    for name in names:
        parent, _, last = name.rpartition(".")
        known = vllm_semantic_sched.__all__ if parent == "vllm_semantic_sched" else ()
        assert last in known or find_spec(name), name
    for block in blocks_of(page, "python"):
        for module, imported in re.findall(r"from (vllm_semantic_sched\S*) import (\w+)", block):
            source = find_spec(module)
            assert source is not None and source.origin is not None, module
            assert re.search(rf"\b{imported}\b", Path(source.origin).read_text("utf-8")), imported


# Policy keys


def with_groups(names: set[str]) -> set[str]:
    """Dotted names and all their beginnings."""
    parts = [name.split(".") for name in names]
    beginnings = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    return beginnings | {name.removesuffix("[]") for name in beginnings}


@every_page
def test_named_keys_exist(page: Path) -> None:
    known = with_groups({key.name for model in (Policy, Settings) for key in keys_of(model)})
    sections = {name for name in known if "." not in name}
    for name in re.findall(r"`([a-z_]+(?:\[\])?(?:\.[a-z_]+)+)(?::[^`]*)?`", text_of(page)):
        is_file = name.endswith((".py", ".jsonl", ".json", ".md", ".yaml"))
        if name.split(".")[0] in sections and not is_file:
            assert name in known, name


@every_page
def test_yaml_blocks_are_valid(page: Path) -> None:
    for block in blocks_of(page, "yaml"):
        data = yaml.safe_load(block.replace("mode: off", "mode: 'off'"))
        if "workload" in data:
            parse_scenarios(data, "page")
        else:
            parse_policy(data)


def test_keys_named_by_the_alerts_exist() -> None:
    known = with_groups({key.name for key in keys_of(Policy)})
    sections = {name for name in known if "." not in name}
    text = " ".join(rule["annotations"]["description"] for rule in RULES)
    for name in re.findall(r"[a-z_]+(?:\[\])?(?:\.[a-z_]+)+", text):
        if name.split(".")[0] in sections:
            assert name in known, name


def test_life_of_a_request_names_its_files() -> None:
    text = text_of(DOCS / "architecture.md")
    begin = text.index("## Life of a request")
    life = text[begin : text.index("\n## ", begin)]
    files = set(re.findall(r"`((?:policy|predict|engine)/[\w/]+\.py)`", life))
    assert {"policy/step.py", "engine/scheduler.py", "predict/service.py"} <= files


@pytest.mark.parametrize(
    ("path", "function"),
    [
        (["README.md", "docs/architecture.md", "policy/order/waiting.py"], "def peek"),
        (
            ["README.md", "docs/architecture.md", "policy/step.py", "policy/preemption.py"],
            "def choose_victims",
        ),
    ],
)
def test_readme_leads_to_the_code(path, function) -> None:
    """Each file names the next one, and the last one has the function."""
    files = [ROOT / name for name in path]
    files = [
        file if file.exists() else ROOT / "vllm_semantic_sched" / name
        for file, name in zip(files, path, strict=True)
    ]
    for here, ahead in zip(files, path[1:], strict=False):
        module = ahead.removesuffix(".py").replace("/", ".")
        assert ahead in text_of(here) or module in text_of(here), (here, ahead)
    assert function in text_of(files[-1])


def test_every_shipped_policy_is_described() -> None:
    text = text_of(DOCS / "policies.md")
    cells = "".join(re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE))
    assert set(shipped_names("policy")) <= set(re.findall(r"`(\w+)`", cells))


# Generated tables and metrics


@pytest.mark.parametrize("page", [reference.PAGE, reference.COMMANDS_PAGE])
def test_generated_tables_are_current(page: Path, tmp_path) -> None:
    copy = tmp_path / page.name
    copy.write_text(text_of(page), "utf-8")
    reference.insert(copy)
    assert text_of(copy) == text_of(page), "run `python scripts/reference.py`"


def test_every_environment_variable_is_listed() -> None:
    folders = [ROOT / "vllm_semantic_sched", ROOT / "scripts"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    sources = [text_of(path) for path in files if path.suffix in (".py", ".sh")]
    read = {name for source in sources for name in re.findall(r"SEMSCHED_[A-Z_]+", source)}
    page = text_of(reference.COMMANDS_PAGE)
    listed = re.findall(r"^\| `(SEMSCHED_[A-Z_]+)` \|", page, re.MULTILINE)
    assert read == set(listed)


def test_policy_keys_file_is_current_and_sets_defaults() -> None:
    text = text_of(reference.KEYS)
    assert reference.policy_keys() == text, "run `python scripts/reference.py`"
    data = yaml.safe_load(text)
    assert parse_policy(data) == Policy()
    for key in keys_of(Policy):
        if "[]" not in key.name and key.default:
            section = data
            for name in key.name.split("."):
                section = section[name]


def test_effect_is_that_of_the_smallest_listed_group() -> None:
    assert reference.effect_of("tiers[].slo.ttft") == reference.effect_of("tiers[].slo")
    assert reference.effect_of("tiers[].queue.timeout").codes == (Code.QUEUE_TIMEOUT,)
    assert reference.effect_of("predictor.mode") == reference.effect_of("predictor")
    with pytest.raises(KeyError):
        reference.effect_of("no_such_key.inner")


def test_each_key_lists_metrics_that_exist() -> None:
    counters = {f"{name}_total" for name in COUNTERS}
    for key in keys_of(Policy):
        assert set(reference.effect_of(key.name).metrics) <= counters | {*GAUGES, *HISTOGRAMS}


@every_page
def test_named_metrics_and_their_labels_exist(page: Path) -> None:
    metrics = {f"{name}_total": metric for name, metric in COUNTERS.items()} | GAUGES | HISTOGRAMS
    metrics |= {f"{name}_count": metric for name, metric in HISTOGRAMS.items()}
    named = re.findall(r"\bsemsched:([a-z_0-9]+)(?:\{([^}`]*)\})?", text_of(page))
    named += [(name, "") for name in re.findall(r"`([a-z_]+_total)[`{]", text_of(page))]
    for name, selector in named:
        name = name.removeprefix("ray_semsched_")
        assert name in metrics, name
        labels = {"engine", *metrics[name].labels}
        for label, value in re.findall(r"(\w+)(?:=\"([^\"]*)\")?,?", selector):
            assert label in labels, f"{name}{{{selector}}}"
            values = {word for words in metrics[name].labels.values() for word in words}
            assert not (value and values) or value in values or label == "engine", selector


def test_operations_page_lists_every_alert() -> None:
    listed = re.findall(r"^\| `(Semsched\w+)` \|", text_of(DOCS / "operations.md"), re.MULTILINE)
    assert listed == [rule["alert"] for rule in RULES]
