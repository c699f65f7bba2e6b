"""The way of a newcomer, as README.md has it: from a JSONL file and a model folder to a verified update."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from house import ROOT
from test_documents import blocks_of, environment
from tiny_models import save_folder
from wholebatch.run_folder import read_run
from wholebatch.train.models.huggingface import quiet

pytestmark = pytest.mark.slow


def commands() -> list[str]:
    """The lines of the block under "Your own text and model", continued ones joined."""
    section = (ROOT / "README.md").read_text().split("## Your own text and model")[1]
    block = blocks_of(section.split("\n## ")[0])[0]
    return block.text.replace("\\\n", " ").strip().splitlines()


def make_files(folder: Path) -> None:
    """my.jsonl with questions and answers, and my-model, a tiny Llama with its tokenizer."""
    import transformers

    sums = [(a, b) for a in range(12) for b in range(12)]
    rows = [{"prompt": f"What is {a} plus {b}?", "completion": f" It is {a + b}."} for a, b in sums]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    marks = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), marks, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **names).save_pretrained(
        folder / "my-model"
    )
    sizes = {"vocab_size": tokens.get_vocab_size(), "max_position_embeddings": 128}
    with quiet(transformers):  # its progress bar leaves a thread
        save_folder("llama", folder / "my-model", **sizes)


def test_five_commands_of_the_readme_reach_a_verified_update(tmp_path: Path) -> None:
    steps = commands()
    assert len(steps) == 5, "the issue allows five"
    assert [step.split()[0] for step in steps] == ["make", ".", "wholebatch", "wholebatch", "wholebatch"]
    make_files(tmp_path)
    for step in steps[2:]:
        words = re.sub(r"^wholebatch", f"{sys.executable} -m wholebatch", step)
        done = subprocess.run(
            words,
            shell=True,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, (step, done.stderr)
    assert "first batch  equal yes" in done.stdout
    run = read_run(tmp_path / "runs" / "first")
    assert run.header.proof is not None
    assert run.header.proof["equal"] is True
    assert run.header.model["name"] == "LlamaForCausalLM"
    losses = [record.loss_per_item or 0.0 for record in run.records]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "runs" / "first" / "model" / "model.safetensors").is_file()
