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
from wholebatch.train.config import _RANGES, TrainConfig, config_from_dict, load_config


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
            '[model]\ndtype = "float64"\n[proof]\ncheck_first_batch = false\n',
        )
    )
    assert config.batch.global_batch_samples == 64
    assert config.batch.micro_batch_samples == TrainConfig().batch.micro_batch_samples
    assert type(config.optimizer.learning_rate) is float
    assert config.model.dtype == "float64"
    assert not config.proof.check_first_batch


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nnum_updates = 7\nseed = 3\n")
    config = load_config(file, num_updates=9, folder=None)
    assert (config.run.num_updates, config.run.seed, config.run.folder) == (9, 3, "")


def test_settings_survive_a_trip_through_plain_data() -> None:
    config = load_config(num_updates=9)
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[bach]\n", "no section is called 'bach'; did you mean batch?"),
        ("[zzz]\n", "no section is called 'zzz'; there are run, batch, data, model, optimizer, proof"),
        ("[model]\nlayer = 2\n", "no key in [model] is called 'layer'; did you mean layers?"),
        ("[model]\nzzz = 2\n", "no key in [model] is called 'zzz'; there are layers, width"),
        ("model = 3\n", "model is a section, [model], not the value 3"),
        ("[model]\nlayers = 2.0\n", "model.layers is 2.0; it takes a whole number"),
        ("[model]\nlayers = true\n", "model.layers is True; it takes a whole number"),
        ('[model]\ndropout = "0"\n', "model.dropout is '0'; it takes a number"),
        ("[run]\nfolder = 3\n", "run.folder is 3; it takes a text in quotes"),
        ("[proof]\ncheck_first_batch = 1\n", "proof.check_first_batch is 1; it takes true or false"),
        ('[batch]\ntail = "pad"\n', "batch.tail is 'pad'; it can be 'partial' or 'drop'"),
        (
            "[model]\nwidth = 96\nheads = 5\n",
            "model.width 96 is not divisible by model.heads 5; heads that divide it: 2, 3, 4, 6",
        ),
        ("[model]\ndropout = nan\n", "model.dropout is nan; it goes from 0 to 0.99"),
        ("[run]\nnum_updates = 0\n", "run.num_updates is 0; it goes from 1 to"),
        ("[run\n", "is not TOML"),
        ("run = 5\n", "run is a section, [run], not the value 5"),
        (f"[optimizer]\nlearning_rate = {10**400}\n", "optimizer.learning_rate is 1000000000"),
        (f"[model]\nlayers = {10**400}\n", "(401 characters); it goes from 1 to 1000"),
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
    with pytest.raises(UsageError, match=r"small\.toml: run is a section, \[run\], not the value 5"):
        load_config(write(tmp_path, "run = 5\n"), num_updates=9)


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


def test_the_document_shows_every_setting_with_its_default() -> None:
    document = (Path(__file__).parent.parent / "docs" / "train.md").read_text()
    block = document.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(block) == TrainConfig().to_dict()
