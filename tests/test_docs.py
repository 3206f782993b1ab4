"""The documentation holds: its code runs, its recipes and commands are valid, its tables are those of the code."""

import inspect
import json
import pkgutil
import re
import shlex
import shutil
import types
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
import pytest

import logra
from logra import config as cfg
from logra.build import build_run
from logra.cli import main as front
from logra.memory.meter import KINDS
from logra.rl.advantages import ADVANTAGES
from logra.rl.engines.fleet import FleetEngine
from logra.rl.rewards.builtin import BUILTINS
from logra.rl.rewards.extract import EXTRACTORS
from logra.rl.rewards.spec import STATUSES
from logra.rl.run_dir import read_metrics
from logra.rl.sources import HASH_ORDER_TASKS
from logra.sketch.sketcher import Sketcher

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [ROOT / "README.md", *DOCS]
TINY = ROOT / "recipes" / "tiny.yaml"
LANGUAGES = {"", "bash", "bibtex", "console", "json", "python", "text", "yaml"}
SECTIONS = {
    "model", "data", "reward", "method", "trust", "rollout", "algorithm", "train", "eval", "checkpoint", "journal", "sync",
    "log", "memory", "distributed",
}  # fmt: skip

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
doc_pages = pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)


class Block(NamedTuple):
    language: str
    line: int  # of its first line of text, 1-based
    text: str


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page."""
    found, start, info, indent = [], 0, "", 0
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if not (bare := line.lstrip()).startswith("```"):
            continue
        if not start:
            start, info, indent = number, bare[3:].strip(), len(line) - len(bare)
        else:
            text = "".join(text[indent:] + "\n" for text in lines[start : number - 1])
            found.append(Block(info, start + 1, text))
            start = 0
    assert not start, f"{page.name}: the block that begins in line {start} does not end"
    return [block for block in found if language in (None, block.language)]


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows of a page's tables, without their heads, by the heading they stand under."""
    found: dict[str, list[list[str]]] = {}
    heading, is_body = "", False
    for line in prose(page).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            is_body = False
        elif set(line) <= set("|- "):
            is_body = True
        elif is_body:
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def doc(name: str) -> Path:
    return ROOT / "docs" / f"{name}.md"


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A working directory with the recipes and one short finished run, runs/tiny."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    changes = {
        "output_dir": str(folder / "runs" / "tiny"), "train.steps": 2, "threads": 1, "checkpoint.every": 1,
        "trust.measure_every": 1, "method.dense_params": ["norms"],
        "algorithm.kl_coef": 0.01, "algorithm.dual_clip": 3.0, "eval.num_prompts": 8,
    }  # fmt: skip
    run = build_run(cfg.make_config(cfg.apply_overrides(cfg.read_yaml(TINY), changes)))
    try:
        run.fit()
    finally:
        run.close()
    return folder


# -- the text ------------------------------------------------------------------------------------------------


def test_there_are_pages():
    assert {page.stem for page in DOCS} >= {
        "configuration", "data", "library", "method", "metrics", "resume", "rewards", "sync",
    }  # fmt: skip


@doc_pages
def test_pages_are_ascii_with_lines_up_to_120(page):
    text = page.read_text()
    assert text.isascii()
    assert [n for n, line in enumerate(text.splitlines(), 1) if len(line) > 120 or line != line.rstrip()] == []


@pages
def test_every_block_says_a_language_that_is_tested(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pages
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"(?m)^#+ (.*)$", prose(file))
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {target}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pages
def test_dotted_names_exist(page):
    """`section.key` is a key of the configuration, `logra.x.y` a module or what it holds."""
    for name in re.findall(r"`(?:--)?([A-Za-z_]+(?:\.[A-Za-z_0-9]+)+)(?![\w(])", page.read_text()):
        first, *rest = name.split(".")
        if first == "logra":
            pkgutil.resolve_name(name)
        elif first in SECTIONS:
            assert is_key(first, rest), f"{page.name}: {name}"


def is_key(first: str, rest: list[str]) -> bool:
    if first == "eval" and rest[:1] == ["data"] and len(rest) > 1:
        return rest[1] in cfg.Data.model_fields
    if (first, rest[0]) == ("rollout", "vllm") and len(rest) > 1:
        return rest[1] in cfg.Vllm.model_fields
    if (first, rest[0]) == ("reward", "functions") and len(rest) > 2:
        return rest[2] in cfg.Reward.model_fields
    return rest[0] in section_of(first).yaml_keys()


# -- what runs -----------------------------------------------------------------------------------------------


@pages
def test_python_blocks_run(page, workspace, monkeypatch, capsys):
    """In order, in one namespace; a block that begins with `# NAME.py` is also written to that file."""
    monkeypatch.chdir(workspace)
    namespace = {"__name__": f"documentation_{page.stem.lower()}"}
    found = blocks(page, "python")
    assert found or page.stem not in ("library", "rewards", "data", "resume")
    for block in found:
        if name := re.match(r"# (\w+\.py)\n", block.text):
            Path(name[1]).write_text(block.text)
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


def is_recipe(data: dict[str, Any]) -> bool:
    return {"model", "data", "reward"} <= data.keys()


def read_block(block: Block, folder: Path) -> dict[str, Any]:
    path = folder / f"block{block.line}.yaml"
    path.write_text(block.text)
    return cfg.read_yaml(path)


@pages
def test_yaml_blocks_are_valid(page, tmp_path):
    """Whole recipes as they are; parts of one laid over the tiny recipe, section by section."""
    for block in blocks(page, "yaml"):
        data = read_block(block, tmp_path)
        if not is_recipe(data):
            base = cfg.read_yaml(TINY)
            merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
                      for key, value in data.items()}  # fmt: skip
            data = {**base, **merged}
        cfg.make_config(data)


def test_the_recipe_of_the_rewards_page_trains(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    (functions,) = [b for b in blocks(doc("rewards"), "python") if b.text.startswith("# my_rewards.py")]
    Path("my_rewards.py").write_text(functions.text)
    (recipe,) = [b for b in blocks(doc("rewards"), "yaml") if is_recipe(read_block(b, workspace))]
    Path("my_rewards.yaml").write_text(recipe.text)
    assert front.main(["train", "my_rewards.yaml", "--plain"]) == 0
    steps = read_metrics(workspace / "runs" / "my_rewards" / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["rewards/short_reply/error"] == 0 for record in steps)
    assert "rewards/compute_score/mean" in steps[0] and "rewards/ask_a_service/mean" in steps[0]


def commands(page: Path) -> list[list[str]]:
    text = "".join(block.text for block in blocks(page, "bash")).replace("\\\n", " ")
    split = [shlex.split(line, comments=True) for line in text.splitlines()]
    split = [words[next((i for i, w in enumerate(words) if "=" not in w), 0) :] for words in split]  # X=1 command
    return [words for words in split if words]


@pages
def test_bash_commands_are_valid(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(page):
        name, *arguments = [Path(words[0]).name, *words[1:]]
        if name == "make":
            assert all(re.search(rf"(?m)^{re.escape(a)}:", makefile) for a in arguments if "=" not in a), words
        if name.startswith("python"):
            assert all((ROOT / a).is_file() for a in arguments if a.endswith(".py")), words
        if name == "logra":
            check_command(arguments)


def check_command(arguments: list[str]) -> None:
    own, flags = front.split_flags(arguments)
    try:
        parsed = front.parser().parse_args(own)
    except SystemExit as ended:
        assert ended.code == 0, arguments  # --help, --version
        return
    recipe = getattr(parsed, "recipe", None)
    assert recipe is None or not recipe.startswith("recipes/") or Path(recipe).is_file(), recipe
    if parsed.command in ("train", "launch") and Path(parsed.recipe).is_file():
        assert front.main([*arguments, *([] if parsed.dry_run else ["--dry-run"])]) == 0
    elif parsed.command in ("train", "launch", "eval"):
        cfg.make_config(cfg.apply_overrides(cfg.read_yaml(TINY), cfg.parse_overrides(flags)))
    elif parsed.command != "plan":  # its flags are those of a recipe and --model, --method
        assert not flags, arguments


@pages
def test_console_blocks_show_what_is_printed(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for block in blocks(page, "console"):
        command, *expected = block.text.splitlines()
        assert command.startswith("$ logra ")
        front.main(shlex.split(command)[2:])
        printed = capsys.readouterr()
        assert (printed.out + printed.err).splitlines() == expected


# -- the configuration page ----------------------------------------------------------------------------------


def section_of(name: str) -> type[cfg.Section]:
    kind = cfg.Config.model_fields[name].annotation
    return next(k for k in (kind, *get_args(kind)) if isinstance(k, type) and issubclass(k, cfg.Section))


DOCUMENTED = {
    "Top level": (cfg.Config, set(cfg.Config.model_fields) - SECTIONS),
    "reward.functions": (cfg.Reward, set(cfg.Reward.model_fields)),
    "rollout.vllm": (cfg.Vllm, set(cfg.Vllm.model_fields)),
    **{name: (section_of(name), set(section_of(name).yaml_keys())) for name in SECTIONS},
}


def type_text(kind: Any, metadata: list[Any]) -> str:
    """A field's type and bounds as the page writes them."""
    options = [k for k in get_args(kind) if k is not type(None)] if get_origin(kind) in (Union, types.UnionType) else []
    if options:
        texts = [type_text(option, metadata) for option in options]
        return ", ".join(texts) + (" or null" if type(None) in get_args(kind) else "")
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        is_function = inner is cfg.Reward
        return "list of " + ("functions" if is_function else type_text(inner, [])) + bounds(metadata)
    if get_origin(kind) is dict:
        return "mapping"
    if get_origin(kind) is tuple:
        return "two floats"
    if issubclass(kind, cfg.Section):
        return "section"
    return {str: "text"}.get(kind, kind.__name__) + bounds(metadata)


def bounds(metadata: list[Any]) -> str:
    signs = {annotated_types.Gt: "> {.gt}", annotated_types.Ge: ">= {.ge}", annotated_types.Lt: "< {.lt}",
             annotated_types.Le: "<= {.le}", annotated_types.MinLen: "at least {.min_length}"}  # fmt: skip
    texts = [signs[type(bound)].format(bound) for bound in metadata]
    if not texts:
        return ""
    return (", " if texts[0].startswith("at") else " ") + ", ".join(texts)


@pytest.mark.parametrize("heading", DOCUMENTED)
def test_every_key_is_documented_with_its_type_and_default(heading):
    section, keys = DOCUMENTED[heading]
    rows = [row for row in tables(doc("configuration"))[heading] if len(row) == 4]
    assert [row[0] for row in rows] == [f"`{key}`" for key in section.yaml_keys() if key in keys]
    for key, kind, default, meaning in rows:
        field = section.model_fields[section.yaml_keys()[key.strip("`")]]
        exact = type_text(field.annotation, field.metadata)
        if len(exact) > 60:  # too many choices for a column: each is named below the table
            text = doc("configuration").read_text()
            assert kind == "see below" and all(f"`{choice}`" in text for choice in exact.split(", ")), key
        else:
            assert kind == exact, key
        assert meaning
        if field.is_required() or kind == "section":
            assert default == ("required" if field.is_required() else "see below"), key
        else:
            value = field.get_default(call_default_factory=True)
            shown = cfg.parse_value(default.strip("`"))
            assert (shown, type(shown)) == (list(value), list) if isinstance(value, tuple) else shown == value, key
            assert type(shown) is type(value) or isinstance(value, tuple), key


def test_sections_are_all_documented():
    sections = {name for name in cfg.Config.model_fields if name in SECTIONS}
    assert sections == SECTIONS == {n for n in DOCUMENTED if n != "Top level" and "." not in n}


def test_what_may_change_on_resuming_is_what_the_checkpoint_leaves_open():
    text = doc("configuration").read_text()
    stay, change = (
        set(names_in(re.search(rf"(?m)^- {what}: (.*(?:\n  .*)*)$", text)[1])) for what in ("Must stay", "May change")
    )
    config = cfg.load_config(TINY)
    assert stay == {*cfg.IDENTITY, "train.microbatch_size"}
    assert set(cfg.identity(config)) == {*cfg.IDENTITY, "microbatch_size"}
    assert change == set(cfg.Config.model_fields) - {*cfg.IDENTITY, "train"} | {"train.steps"}
    assert set(cfg.Train.model_fields) == {"steps", "microbatch_size", "head_chunk", "packed"}


def test_advantages_and_their_options_are_documented():
    rows = {names_in(row[0])[0]: row[-1] for row in tables(doc("configuration"))["algorithm"] if len(row) == 3}
    for name, function in ADVANTAGES.items():
        options = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert [name for name in names_in(rows[name])] == [option.name for option in options], name


def test_clips_by_loss_are_documented():
    rows = {names_in(row[0])[0]: row[-1] for row in tables(doc("configuration"))["algorithm"] if len(row) == 3}
    for loss in ("ppo", "gspo", "cispo"):
        numbers = [float(n) for n in re.findall(r"\d[\d.e-]*", rows[loss])]
        made = cfg.Algorithm(loss=loss)
        assert numbers == [made.clip_low, made.clip_high], loss


# -- the other pages -----------------------------------------------------------------------------------------


def test_every_metric_that_a_run_writes_is_documented_and_no_other(workspace):
    lines = (workspace / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    written = {name for line in lines for name in json.loads(line)}
    documented = [names_in(row[0])[0] for rows in tables(doc("metrics")).values() for row in rows]
    assert len(documented) == len(set(documented)) and len(written) > 40
    patterns = {name: re.sub(r"\bNAME\b", r"\\w+", re.sub(r"@[KN]$", r"@\\d+", name)) for name in documented}
    kinds = "|".join(re.escape(kind) for kind in KINDS)
    patterns = {name: pattern.replace("/KIND_", f"/({kinds})_") for name, pattern in patterns.items()}
    of_cuda = {"memory/reserved_bytes"}
    of_servers = {name for name in documented if name.startswith("rollout/")}  # tests/unit/engines_vllm/test_fleet.py
    assert all(f'"{name}"' in inspect.getsource(FleetEngine.metrics) for name in of_servers)
    for name in written:
        assert any(re.fullmatch(pattern, name) for pattern in patterns.values()), f"{name} is not documented"
    for name, pattern in patterns.items():
        assert name in of_cuda | of_servers or any(re.fullmatch(pattern, key) for key in written), (
            f"{name} is documented, but not written"
        )


def test_metric_names_in_prose_are_in_the_tables():
    documented = {names_in(row[0])[0] for rows in tables(doc("metrics")).values() for row in rows}
    for name in re.findall(r"`([a-z]+/[a-z_0-9]+)`", prose(doc("metrics"))):
        assert name in documented, name


def test_built_in_rewards_are_documented_with_their_parameters():
    rows = {names_in(row[0])[0]: row for row in tables(doc("rewards"))["Built-in functions"] if len(row) == 4}
    assert set(rows) == set(BUILTINS)
    for name, built in BUILTINS.items():
        parameters = inspect.signature(built.make).parameters
        shown = names_in(rows[name][1])
        assert [word for word in shown if word in parameters] == list(parameters), name
        for key, parameter in parameters.items():
            if parameter.default is not parameter.empty:
                values = [cfg.parse_value(word) for word in shown[shown.index(key) + 1 :]]
                assert parameter.default in values, (name, key)
        assert names_in(rows[name][2]) == sorted(built.needs), name


def test_extractors_and_statuses_are_documented():
    found = tables(doc("rewards"))
    assert {names_in(row[0])[0] for row in found["Built-in functions"] if len(row) == 2} == set(EXTRACTORS)
    assert sorted(names_in(row[0])[0] for row in found["Time limits and errors"]) == sorted(STATUSES)


def test_tasks_that_need_fixed_hashing_are_named():
    assert {name for name in names_in(prose(doc("data"))) if name in HASH_ORDER_TASKS} == HASH_ORDER_TASKS


def test_every_public_name_is_in_the_library_page():
    text = prose(doc("library"))
    for name in logra.__all__:
        assert re.search(rf"`logra\.{name}[`(]", text), name
    members = {name for name in {**vars(Sketcher)} if not name.startswith("_")}
    rows = tables(doc("library"))["logra.Sketcher"]
    shown = {name.partition("(")[0] for row in rows for name in names_in(row[0])}
    assert shown == members | {"names", "targets", "skipped", "update_index", "model", "options", "rank"}
    for call in (name for row in rows for name in names_in(row[0]) if "(" in name):
        signature = inspect.signature(getattr(Sketcher, call.partition("(")[0]))
        assert [p.strip().partition("=")[0] for p in call.partition("(")[2].rstrip(")").split(",") if p] == [
            name for name in signature.parameters if name != "self"
        ], call


def test_the_options_of_attach_are_documented_with_their_defaults():
    parameters = {n: p for n, p in inspect.signature(logra.attach).parameters.items() if p.kind is p.KEYWORD_ONLY}
    rows = tables(doc("library"))["logra.attach"]
    assert [row[0] for row in rows] == [f"`{name}`" for name in parameters]
    for name, default, meaning in rows:
        assert default == f"`{default_text(parameters[name.strip('`')].default)}`" and meaning, name


def default_text(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return re.sub(r"e-0", "e-", repr(value))
