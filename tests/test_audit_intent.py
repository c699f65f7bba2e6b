"""What frameworks say of the number of micro-batches, read from their live objects."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ranks import run_ranks
from wholebatch.audit.intent import _CLASSES, find_intents
from wholebatch.audit.trace import Intent


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide frameworks that other tests have imported, and their objects with them."""
    hidden = {module for places in _CLASSES.values() for module, _ in places} | {"accelerate.state"}
    for name in hidden:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return monkeypatch


def install(monkeypatch: pytest.MonkeyPatch, module: str, name: str, **members: Any) -> type:
    """A class as a framework that is not installed here has it, in a module of its name."""
    kind = type(name, (), {"__module__": module} | members)
    made = ModuleType(module)
    setattr(made, name, kind)
    monkeypatch.setitem(sys.modules, module, made)
    return kind


def test_without_frameworks_only_flags_speak(alone: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    flags = Intent(micro_batches=4, source="--expect-micro-batches")
    assert find_intents(None) == ()
    assert find_intents(flags) == (flags,)


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    find_intents(None)
    assert set(sys.modules) == before


def test_composer_cuts_its_batches_by_samples(alone: pytest.MonkeyPatch) -> None:
    trainer = install(alone, "composer.trainer.trainer", "Trainer")()
    loader = SimpleNamespace(batch_size=8)
    trainer.state = SimpleNamespace(device_train_microbatch_size=3, train_dataloader=loader)
    (found,) = find_intents(None)
    assert (found.framework, found.micro_batches, found.global_batch_samples) == ("composer", 3, 8)
    trainer.state.device_train_microbatch_size = "auto"
    assert find_intents(None)[0].micro_batches is None


def make_engine(monkeypatch: pytest.MonkeyPatch, managed: bool = True, boundary: bool | None = None) -> Any:
    kind = install(
        monkeypatch,
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        gradient_accumulation_steps=lambda _: 4,
        train_batch_size=lambda _: 32,
        managed_gradient_accumulation=lambda _: managed,
    )
    engine = kind()
    engine._is_gradient_accumulation_boundary = boundary
    return engine


def test_deepspeed_says_both_numbers(alone: pytest.MonkeyPatch) -> None:
    engine = make_engine(alone)
    (found,) = find_intents(None)
    assert (found.framework, found.micro_batches, found.global_batch_samples) == ("deepspeed", 4, 32)
    assert found.source == "DeepSpeedEngine.gradient_accumulation_steps()"
    del engine


@pytest.mark.parametrize(("managed", "boundary"), [(False, None), (True, False)])
def test_a_script_that_sets_the_boundary_itself_is_not_held_to_the_configuration(
    alone: pytest.MonkeyPatch, managed: bool, boundary: bool | None
) -> None:
    engine = make_engine(alone, managed, boundary)
    (found,) = find_intents(None)
    assert (found.framework, found.micro_batches) == ("deepspeed", None)
    del engine


def test_only_whole_numbers_are_numbers(alone: pytest.MonkeyPatch) -> None:
    trainer = install(alone, "lightning.pytorch.trainer.trainer", "Trainer")()
    for said, known in ((True, None), (2.5, None), (0, None), ("4", None), (4.0, 4), (1, 1)):
        trainer.accumulate_grad_batches = said
        assert find_intents(None)[0].micro_batches == known


def test_older_deepspeed_without_the_switch_is_managed(alone: pytest.MonkeyPatch) -> None:
    engine = make_engine(alone)
    del type(engine).managed_gradient_accumulation
    assert find_intents(None)[0].micro_batches == 4


def test_trl_is_told_from_transformers(alone: pytest.MonkeyPatch) -> None:
    base = install(alone, "transformers.trainer", "Trainer")
    sft = type("SFTTrainer", (base,), {"__module__": "trl.trainer.sft_trainer"})()
    config = type("SFTConfig", (), {"__module__": "trl.trainer.sft_config"})()
    config.gradient_accumulation_steps, config.train_batch_size = 8, 2
    sft.args = config
    (found,) = find_intents(None)
    assert (found.framework, found.micro_batches, found.global_batch_samples) == ("trl", 8, 16)
    assert found.source == "SFTConfig.gradient_accumulation_steps"


def test_half_made_and_hostile_objects_say_nothing(alone: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> Any:
        raise RuntimeError("not yet")

    half = install(
        alone, "lightning.pytorch.trainer.trainer", "Trainer", accumulate_grad_batches=property(fail)
    )()
    other = install(alone, "transformers.trainer", "Trainer")()
    numbers = [True, 2.5, 0, "4", float("nan"), float("inf"), None]
    kind = install(alone, "transformers.training_args", "TrainingArguments")
    many = [kind() for _ in numbers]
    for one, number in zip(many, numbers, strict=True):
        one.gradient_accumulation_steps = number
    proxy = type("Proxy", (), {"__class__": property(fail), "__getattr__": lambda *_: fail(0)})()
    unhashable = type("Meta", (type,), {"__hash__": None})("Odd", (), {})()
    found = find_intents(None)
    assert [(one.framework, one.micro_batches) for one in found] == [
        ("lightning", None),
        ("transformers", None),
    ]
    del half, other, proxy, unhashable


def test_whoever_runs_the_loop_comes_before_engines_and_flags_before_all(alone: pytest.MonkeyPatch) -> None:
    engine = make_engine(alone)
    trainer = install(alone, "lightning.pytorch.trainer.trainer", "Trainer")()
    trainer.accumulate_grad_batches = 4
    flags = Intent(micro_batches=2, source="--expect-micro-batches")
    assert [one.framework for one in find_intents(flags)] == ["", "lightning", "deepspeed"]
    del engine


# The installed frameworks, each in a process of its own: their objects and states outlive a test.


def accelerators(_rank: int, _n: int) -> list[Any]:
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    found = [find_intents(None)]
    plain = Accelerator(cpu=True)
    found.append(find_intents(None))
    plain.gradient_accumulation_steps = 4
    found.append(find_intents(None))
    del plain
    gc.collect()
    found.append(find_intents(None))
    return found


@pytest.mark.slow
def test_accelerate_says_it_where_it_is_no_default() -> None:
    nothing, default, four, outlived = run_ranks(accelerators, 1)[0]
    assert nothing == ()
    said = Intent(source="Accelerator.gradient_accumulation_steps", framework="accelerate")
    assert default == (said,)
    assert [one.micro_batches for one in four] == [4]
    assert outlived == four


def trainers(_rank: int, _n: int, folder: str) -> list[Any]:
    warnings.simplefilter("ignore")
    import torch
    from transformers import Trainer, TrainingArguments

    def arguments(number: int) -> TrainingArguments:
        return TrainingArguments(
            output_dir=folder,
            gradient_accumulation_steps=number,
            per_device_train_batch_size=3,
            use_cpu=True,
            report_to=[],
        )

    one, four = arguments(1), arguments(4)
    found = [find_intents(None)]
    del four
    gc.collect()
    found.append(find_intents(None))
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=one)
    found.append(find_intents(None))
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments(4))
    gc.collect()
    found.append(find_intents(None))
    del trainer
    return found


@pytest.mark.slow
def test_transformers_arguments_count_fully_with_a_trainer(tmp_path: Path) -> None:
    loose, default, used, replaced = run_ranks(trainers, 1, str(tmp_path))[0]
    assert sorted(str(one.micro_batches) for one in loose) == ["4", "None"]
    assert [one.micro_batches for one in default] == [None]
    assert used[0].micro_batches == 1
    assert used[0].global_batch_samples == 3
    assert (replaced[0].micro_batches, replaced[0].global_batch_samples) == (4, 12)
    assert {one.framework for one in replaced} == {"transformers"}  # its own Accelerator does not speak


def lightnings(_rank: int, _n: int) -> list[Any]:
    warnings.simplefilter("ignore")
    import lightning
    from lightning.fabric import Fabric

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, accumulate_grad_batches=3, **quiet)
    found = [find_intents(None)]
    model = lightning.LightningModule()
    model.automatic_optimization = False
    trainer.strategy.connect(model)
    found.append(find_intents(None))
    del trainer
    gc.collect()
    fabric = Fabric(accelerator="cpu", devices=1)
    found.append(find_intents(None))
    del fabric
    return found


@pytest.mark.slow
def test_lightning_says_it_and_fabric_only_its_name() -> None:
    automatic, by_hand, fabric = run_ranks(lightnings, 1)[0]
    assert [(one.framework, one.micro_batches) for one in automatic] == [("lightning", 3)]
    assert [(one.framework, one.micro_batches) for one in by_hand] == [("lightning", None)]
    assert Intent(source="Fabric", framework="fabric") in fabric
