"""Settings: a file changes what it names, and nothing that it misspells."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from wholebatch.errors import UsageError
from wholebatch.order import SampleOrder
from wholebatch.train.config import _RANGES, config_from_dict, config_text, load_config, with_changes
from wholebatch.train.settings import WARMUP_UPDATES, TrainConfig


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(text)
    return file


def test_without_a_file_the_defaults() -> None:
    assert load_config() == TrainConfig()


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            "[batch]\nglobal_batch_samples = 64\n[optimizer]\nlearning_rate = 1\n"
            '[precision]\nparameters = "float64"\n[proof]\ncheck_first_batch = false\n',
        )
    )
    assert config.batch.global_batch_samples == 64
    assert config.batch.micro_batch_samples == TrainConfig().batch.micro_batch_samples
    assert type(config.optimizer.learning_rate) is float
    assert config.precision.parameters == "float64"
    assert not config.proof.check_first_batch


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nnum_updates = 7\nseed = 3\n")
    config = load_config(file, ["run.num_updates=8", "run.num_updates = 9"])
    assert (config.run.num_updates, config.run.seed, config.run.folder) == (9, 3, "")


def test_settings_survive_a_trip_through_plain_data() -> None:
    config = load_config(None, ["run.num_updates=9"])
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bach]\n", "no section is called 'bach'; did you mean batch?"),
        ("[zzz]\n", "no section is called 'zzz'; there are run, batch, parallel, data, objective, model, "),
        ("[model]\nlayer = 2\n", "no key in [model] is called 'layer'; did you mean layers?"),
        ("[model]\nzzz = 2\n", "no key in [model] is called 'zzz'; there are source, size, layers, width"),
        ("model = 3\n", "model is a section, [model], not the value 3"),
        ("[model]\nlayers = 2.0\n", "model.layers is 2.0; it takes a whole number"),
        ("[model]\nlayers = true\n", "model.layers is True; it takes a whole number"),
        ('[model]\ndropout = "0"\n', "model.dropout is '0'; it takes a number"),
        ("[run]\nfolder = 3\n", "run.folder is 3; it takes a text in quotes"),
        ("[proof]\ncheck_first_batch = 1\n", "proof.check_first_batch is 1; it takes true or false"),
        ('[batch]\ntail = "pad"\n', "batch.tail is 'pad'; it can be 'partial' or 'drop'"),
        ("[data]\nfiles = 3\n", 'data.files is 3; it takes a list of texts, such as ["a.txt"]'),
        ("[data]\nfiles = [3]\n", "data.files is 3; it takes a text in quotes"),
        (
            "[data]\noptions = { a = [1, 2020-01-02] }\n",
            "data.options.a.1 is the date or time 2020-01-02; write it as a text, in quotes",
        ),
        ("[data]\noptions = { a = 10:20:30 }\n", "data.options.a is the date or time 10:20:30; write it"),
        ("[data]\noptions = 3\n", "data.options is 3; it takes a table, such as { momentum = 0.9 }"),
        ("[model]\ndropout = nan\n", "model.dropout is nan; it goes from 0 to 0.99"),
        ("[run]\nnum_updates = 0\n", "run.num_updates is 0; it goes from 1 to"),
        ("[run\n", "is not TOML"),
        ("run = 5\n", "run is a section, [run], not the value 5"),
        (f"[optimizer]\nlearning_rate = {10**400}\n", "optimizer.learning_rate is 1000000000"),
        (f"[model]\nlayers = {10**400}\n", "(401 characters); it goes from 0 to 1000"),
        (f"[model]\ndropout = 0x{'f' * 5000}\n", "model.dropout is a number of thousands of digits, which"),
        (f"[model]\nlayers = 0x{'f' * 5000}\n", "model.layers is a number of thousands of digits; it goes"),
        (f"[model]\nlayers = -{10**400}\n", "model.layers is -100000"),
        (f"[run]\nfolder = {10**400}\n", "(401 characters); it takes a text in quotes"),
        ("[optimizer]\nlearning_rate = inf\n", "optimizer.learning_rate is inf; it goes from 0 to"),
        (f"[run]\nseed = {2**53 + 1}\n", f"run.seed is {2**53 + 1}; it goes from 0 to {2**53}"),
    ],
)
def test_refusals_name_the_file_and_what_to_change(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        load_config(write(tmp_path, text))
    assert "small.toml" in str(caught.value)


def test_a_run_that_is_no_section_is_refused_with_changes_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"small\.toml with --set: run is a section, \[run\], not"):
        load_config(write(tmp_path, "run = 5\n"), ["model.layers=2"])


@pytest.mark.parametrize("seed", [0, 2**53])
def test_every_seed_that_is_taken_orders_the_samples(tmp_path: Path, seed: int) -> None:
    config = load_config(write(tmp_path, f"[run]\nseed = {seed}\n"))
    assert SampleOrder(num_samples=3, global_batch_samples=2, seed=config.run.seed).global_batch(0)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml can't be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_every_number_has_a_range_and_both_ends_are_checked() -> None:
    numbers: set[str] = set()
    default = TrainConfig()
    for section in dataclasses.fields(default):
        for key, value in dataclasses.asdict(getattr(default, section.name)).items():
            if type(value) in (int, float):
                numbers.add(f"{section.name}.{key}")
    assert numbers == set(_RANGES)
    for name, (low, high) in _RANGES.items():
        section_name, key = name.split(".")
        for outside in (low - 1, high * 2 + 1):
            tables: dict[str, Any] = {section_name: {key: outside}}
            with pytest.raises(UsageError, match=re.escape(f"{name} is {outside}")):
                config_from_dict(tables)


def test_settings_import_no_torch() -> None:
    code = "import sys, wholebatch.train.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_document_shows_every_setting_with_its_meaning() -> None:
    document = (Path(__file__).parent.parent / "docs" / "train.md").read_text()
    assert f"```toml\n{config_text(TrainConfig())}```\n" in document


# On the command line


def test_a_value_is_toml_and_what_is_none_is_a_text() -> None:
    config = load_config(
        None,
        [
            "batch.global_batch_samples=64",
            "optimizer.learning_rate = 1e-4",
            "model.source=models/my llama",
            'data.source="text"',
            'data.files=["a.txt", "b.txt"]',
            "proof.check_first_batch=false",
            "run.folder=runs/2026-01-02",
        ],
    )
    assert (config.batch.global_batch_samples, config.optimizer.learning_rate) == (64, 1e-4)
    assert (config.model.source, config.data.source) == ("models/my llama", "text")
    assert config.data.files == ["a.txt", "b.txt"]
    assert not config.proof.check_first_batch
    assert config.run.folder == "runs/2026-01-02"


def test_options_are_set_one_by_one_or_as_a_table() -> None:
    config = load_config(
        None,
        [
            "optimizer.options={betas = [0.9, 0.99]}",
            "optimizer.options.eps=1e-9",
            "data.options.path=a=b",
        ],
    )
    assert config.optimizer.options == {"betas": [0.9, 0.99], "eps": 1e-9}
    assert config.data.options == {"path": "a=b"}


def test_changes_leave_the_tables_that_they_were_given() -> None:
    tables: dict[str, Any] = {"optimizer": {"options": {"eps": 1e-8}}}
    assert with_changes(tables, ["optimizer.options.eps=1"]) == {"optimizer": {"options": {"eps": 1}}}
    assert tables == {"optimizer": {"options": {"eps": 1e-8}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run", "--set run: write section.key=value, such as batch.micro_batch_samples=8"),
        ("num_updates=3", "--set num_updates=3: write section.key=value"),
        ("run.=3", "--set run.=3: write section.key=value"),
        (".num_updates=3", "--set .num_updates=3: write section.key=value"),
        ("run.seed.x=3", "run.seed is {'x': 3}; it takes a whole number"),
        ("run.num_update=3", "no key in [run] is called 'num_update'; did you mean num_updates?"),
        ("bach.tail=drop", "no section is called 'bach'; did you mean batch?"),
        ("parallel.strategy=fsdp2", "'deepspeed' or 'pipeline'; did you mean 'fsdp'?"),
        ("batch.tail=pad", "batch.tail is 'pad'; it can be 'partial' or 'drop'"),
        ("run.num_updates=many", "run.num_updates is 'many'; it takes a whole number"),
        ("run.num_updates=0", "run.num_updates is 0; it goes from 1 to"),
        ("run.num_updates=", "run.num_updates is ''; it takes a whole number"),
    ],
)
def test_wrong_changes_are_refused(change: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_config(None, [change])


def test_a_change_below_a_plain_value_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nseed = 3\n")
    with pytest.raises(UsageError, match=r"--set run\.seed\.x=1: seed is no section, it has the value 3"):
        load_config(file, ["run.seed.x=1"])


# The warm-up of a schedule that gives no length


@pytest.mark.parametrize(
    ("schedule", "warmup_updates"),
    [
        ({}, WARMUP_UPDATES),
        ({"decay": "linear"}, WARMUP_UPDATES),
        ({"warmup_updates": 0}, 0),
        ({"warmup_updates": 7}, 7),
        ({"warmup_samples": 100}, 0),
        ({"warmup_items": 100, "decay_end_items": 1000}, 0),
        ({"decay_end_samples": 1000}, 0),
        ({"decay_end_updates": 100}, 0),
    ],
)
def test_a_schedule_warms_up_for_20_updates_only_where_no_length_is_given(
    schedule: dict[str, Any], warmup_updates: int
) -> None:
    assert config_from_dict({"schedule": schedule}).schedule.warmup_updates == warmup_updates


@pytest.mark.parametrize(("num_updates", "warmup_updates"), [(2, 0), (6, 1), (20, 4), (99, 19), (1000, 20)])
def test_the_default_warm_up_leaves_room_for_the_way_down(num_updates: int, warmup_updates: int) -> None:
    config = config_from_dict({"run": {"num_updates": num_updates}})
    assert config.schedule.warmup_updates == warmup_updates


# Names that no system takes, and tables in tables


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "run.folder=runs/" + "a" * 300,
            r"run.folder is 'runs/a{34}... \(307 characters\); a name has 255",
        ),
        ("model.source=" + "a/" * 2500, r"model.source is .* \(5002 characters\); .*, and a path 4095"),
        ('data.files=["a", "b\\u0000c"]', r"data.files is 'b\\x00c'; no file has a NUL in its name"),
        ('data.source="b\\u0000c:d"', r"data.source is 'b\\x00c:d'; no file has a NUL"),
        ('data.tokenizer="\\u0000"', r"data.tokenizer is '\\x00'; no file has a NUL"),
    ],
)
def test_names_that_no_file_has_are_refused(change: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(None, [change])


def test_lists_in_lists_in_lists_are_refused(tmp_path: Path) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    file = write(tmp_path, f"[data]\nfiles = {deep}\n")
    with pytest.raises(UsageError, match="has more lists or tables in each other than can be read"):
        load_config(file)
    with pytest.raises(UsageError, match=r"data.files is '\[{20}.*; it takes a list of texts"):
        load_config(None, [f"data.files={deep}"])


# Written out


AWKWARD = [
    'data.source=C:\\\\texts "mine".py:rows',
    'data.files=["a b.txt", "\u00e4.txt", "c\\td", "\U0001f600", "e\\u007ff"]',
    'data.options={ "a key" = { b = [1, 2.5, true, "x"] }, plain = -3, "" = 1e300 }',
    "optimizer.options={ betas = [0.9, 0.99] }",
    "optimizer.learning_rate=1e-05",
    "precision.initial_loss_scale=4294967296.0",
    "run.seed=9007199254740992",
    "schedule.warmup_samples=300",
    "model.compile=true",
]


@pytest.mark.parametrize("changes", [[], AWKWARD])
def test_what_is_printed_reads_back_as_the_same(tmp_path: Path, changes: list[str]) -> None:
    config = load_config(None, changes)
    assert load_config(write(tmp_path, config_text(config))) == config
    assert tomllib.loads(config_text(config)) == config.to_dict()


def test_every_key_is_printed_below_its_meaning() -> None:
    lines = config_text(TrainConfig()).splitlines()
    above = {line.split(" = ")[0]: lines[n - 1] for n, line in enumerate(lines) if " = " in line}
    assert all(above[key].startswith("# ") for key in ("num_updates", "tail", "compile", "options"))
    keys = [line for n, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    bare = [line for n, line in enumerate(lines) if line in keys and not lines[n - 1].startswith("# ")]
    assert len(keys) == sum(len(table) for table in TrainConfig().to_dict().values())
    assert bare == []
    assert "# samples of one update, over all replicas; 0 where it is given in items." in lines
    assert max(map(len, lines)) <= 98
