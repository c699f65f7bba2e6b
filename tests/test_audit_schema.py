"""The JSON of an audit: the names that other programs read, strictly JSON, and as its page says."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from audit_judgements import TOTAL, UNEQUAL, judgement
from house import ROOT
from wholebatch.audit import audit_loop
from wholebatch.audit.schema import SCHEMA_VERSION, judgement_document
from wholebatch.audit.trace import Intent

TOP = {
    "schema_version",
    "wholebatch",
    "command",
    "verdict",
    "severities",
    "ranks",
    "replicas",
    "intent",
    "updates",
    "findings",
    "unjudged",
}
UPDATE = {
    "index",
    "optimizer",
    "micro_batches",
    "replicas",
    "items",
    "total_weight",
    "min_weight",
    "max_weight",
    "events",
    "terms",
}
FINDING = {
    "kind",
    "severity",
    "update",
    "factor",
    "ratio",
    "message",
    "file",
    "line",
    "caused_by",
    "across",
    "mend",
    "effect",
    "page",
}


def document(**fields):
    told = judgement(
        num_updates=2, num_ranks=2, verdict="findings", findings=[UNEQUAL, TOTAL], lost=[(1, 0)], **fields
    )
    return judgement_document(told, command=["train.py", "--lr", "0.1"])


def test_the_promised_names_are_there():
    told = document(intent=Intent(micro_batches=2, source="--expect-micro-batches"), unjudged=["x"])
    assert set(told) >= TOP
    assert set(told["updates"][0]) >= UPDATE
    assert set(told["findings"][0]) >= FINDING
    assert told["schema_version"] == SCHEMA_VERSION == 1
    assert told["wholebatch"] == version("wholebatch")
    assert told["command"] == ["train.py", "--lr", "0.1"]
    assert (told["verdict"], told["ranks"], told["replicas"]) == ("findings", 2, 2)
    assert told["intent"] == {
        "micro_batches": 2,
        "global_batch_samples": None,
        "source": "--expect-micro-batches",
        "framework": None,
    }
    assert told["unjudged"] == ["x"]
    assert told["severities"] == {"wrong": 2, "cost": 0, "note": 0}


def test_an_update_in_numbers():
    told = document()
    assert [update["index"] for update in told["updates"]] == [1, 2]
    update = told["updates"][1]
    assert (update["micro_batches"], update["replicas"], update["items"]) == (2, 2, 1152)
    assert math.isclose(update["total_weight"], 640 / 1152)
    assert (update["min_weight"], update["max_weight"]) == (0.0, 1.0)
    (term,) = update["terms"]
    assert (term["key"], term["unit"], term["items"], term["file"], term["line"]) == (
        "NllLoss/0",
        "item",
        1152,
        "src/train.py",
        27,
    )
    weights = [
        (w["rank"], w["micro_batch"], w["items"], w["max_weight"], w["lost"]) for w in update["weights"]
    ]
    assert weights == [
        (0, 1, 512, 1.0, None),
        (1, 1, 512, 0.0, "cleared"),
        (0, 2, 64, 1.0, None),
        (1, 2, 64, 1.0, None),
    ]
    kinds = [(e["kind"], e["micro_batch"], e["line"]) for e in update["events"] if e["rank"] == 1]
    assert kinds == [
        ("clear", None, 20),
        ("backward", 1, 27),
        ("logged", None, 28),
        ("backward", 2, 27),
        ("logged", None, 28),
        ("clip", None, 30),
        ("step", None, 31),
    ]


def test_a_finding_in_words_and_numbers():
    first, second = document()["findings"]
    assert (first["kind"], first["severity"], first["across"]) == (
        "unequal_item_weights",
        "wrong",
        "micro_batches",
    )
    assert (first["update"], first["updates"], first["factor"]) == (2, [2, 3, 5], None)
    assert (first["file"], first["line"], first["caused_by"]) == ("src/train.py", 27, None)
    assert first["page"] == "docs/defects/unequal_item_weights.md"
    assert (first["ratio"], second["ratio"]) == (None, None)
    ratios = judgement_document(judgement(num_updates=2, findings=[replace(UNEQUAL, ratio=8.25)]))
    assert ratios["findings"][0]["ratio"] == 8.25
    assert (second["factor"], second["caused_by"]) == (0.25, "unequal_item_weights")
    assert (second["file"], second["line"], second["effect"]) == (None, None, None)


def test_it_is_strict_json_also_where_a_number_is_not_finite():
    told = judgement()
    window = replace(told.evidence.windows[0], total=math.nan, highest=math.inf)
    told = replace(told, evidence=replace(told.evidence, windows=[window]))
    found = judgement_document(told)
    back = json.loads(json.dumps(found, allow_nan=False))
    assert back == found
    assert (back["updates"][0]["total_weight"], back["updates"][0]["max_weight"]) == (None, None)
    assert back["command"] == []


def test_what_never_stepped_is_no_update():
    told = judgement(num_updates=2)
    windows = [told.evidence.windows[0], replace(told.evidence.windows[1], complete=False)]
    told = replace(told, evidence=replace(told.evidence, windows=windows))
    found = judgement_document(told)
    assert ([u["index"] for u in found["updates"]], [u["index"] for u in found["left_over"]]) == ([1], [2])


def test_whole_numbers_of_items_are_integers_and_sums_of_class_weights_are_not():
    told = judgement()
    window = told.evidence.windows[0]
    found = judgement_document(told)["updates"][0]
    assert json.dumps([found["items"], found["terms"][0]["items"], found["weights"][0]["items"]]) == (
        "[576, 576, 512]"
    )
    term = replace(window.terms[0], num_units=2.5)
    window = replace(window, num_items=2.5, terms=(term,))
    told = replace(told, evidence=replace(told.evidence, windows=[window]))
    found = judgement_document(told)["updates"][0]
    assert (found["items"], found["terms"][0]["items"]) == (2.5, 2.5)


def keys_of(value) -> set[str]:
    """All names at any depth."""
    if isinstance(value, dict):
        return set(value) | {key for entry in value.values() for key in keys_of(entry)}
    return {key for entry in value for key in keys_of(entry)} if isinstance(value, list) else set()


def test_its_page_describes_every_name_and_no_other():
    page = (ROOT / "docs" / "audit-schema.md").read_text()
    described = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert described == keys_of(document())


def assert_is_part_of(shown: Any, found: Any) -> None:
    """What a page shows of a document: its names with their values, numbers to four digits."""
    if isinstance(shown, dict):
        for name, value in shown.items():
            assert_is_part_of(value, found[name])
    elif isinstance(shown, list):
        assert len(shown) == len(found)
        for one, other in zip(shown, found, strict=True):
            assert_is_part_of(one, other)
    elif isinstance(shown, float):
        assert math.isclose(shown, found, rel_tol=1e-4)
    else:
        assert (type(shown), shown) == (type(found), found)


def test_the_example_of_its_page_is_what_such_a_loop_gives():
    page = (ROOT / "docs" / "audit-schema.md").read_text()
    shown = json.loads(page.split("```json\n")[1].split("```")[0])
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(number, 3), torch.randint(2, (number,))) for number in (5, 15)]

    def train():
        for x, y in batches:
            (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()

    found = judgement_document(audit_loop(train), command=shown["command"])
    (line,) = [finding["line"] for finding in found["findings"]]
    code = (ROOT / "tests" / "test_audit_schema.py").read_text().splitlines()[line - 1]
    assert code.strip().startswith("(torch.nn.functional.cross_entropy")
    for finding in found["findings"]:
        finding |= {"file": "train.py", "line": 21}
    for entry in [*found["updates"], *found["findings"]]:
        entry["optimizer"] = 0  # of all that live in this process, whichever tests ran before
    assert_is_part_of(shown, found)
