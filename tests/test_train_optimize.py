"""The optimizer of the training job: groups, classes by name, options, fused kernels, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.finish import Finish
from wholebatch.train import optimize
from wholebatch.train.optimize import check_optimizer, make_optimizer, optimizer_class, parameter_groups
from wholebatch.train.settings import OptimizerConfig


class Tied(nn.Module):
    """An embedding that is the output layer too, a norm, and a frozen layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, dtype=dtype)
        self.norm = nn.LayerNorm(4, dtype=dtype)
        self.frozen = nn.Linear(4, 4, dtype=dtype).requires_grad_(False)
        self.output = nn.Linear(4, 5, dtype=dtype)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.output(self.frozen(self.norm(self.embedding(ids))))
        return out


def settings(**given: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"weight_decay": 0.0} | given))


def layer(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(4, 8, dtype=dtype)


# Groups


def test_matrices_decay_apart_from_vectors_and_each_parameter_is_there_once() -> None:
    model = Tied()
    groups = parameter_groups(model, OptimizerConfig(weight_decay=0.2))
    assert [group["weight_decay"] for group in groups] == [0.2, 0.0]
    assert [list(map(id, group["params"])) for group in groups] == [
        [id(model.embedding.weight)],
        [id(model.norm.weight), id(model.norm.bias), id(model.output.bias)],
    ]


@pytest.mark.parametrize(("decayed", "decay"), [("all", 0.2), ("matrices", 0.0)])
def test_one_group_where_all_decay_alike(decayed: Any, decay: float) -> None:
    (group,) = parameter_groups(Tied(), OptimizerConfig(weight_decay=decay, decayed=decayed))
    assert (group["weight_decay"], len(group["params"])) == (decay, 4)


def test_no_group_is_empty() -> None:
    (group,) = parameter_groups(nn.Linear(4, 4, bias=False), OptimizerConfig())
    assert len(group["params"]) == 1


def test_a_model_of_which_nothing_trains_is_refused() -> None:
    with pytest.raises(UsageError, match=r"none of the model's 2 parameters requires a gradient"):
        parameter_groups(layer().requires_grad_(False), OptimizerConfig())


def test_decay_shrinks_the_matrices_alone() -> None:
    model = layer()
    optimizer = make_optimizer(
        parameter_groups(model, OptimizerConfig(weight_decay=0.5)),
        OptimizerConfig(weight_decay=0.5, learning_rate=0.1),
    )
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight, before[0] * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, before[1])


# Classes


def named_classes() -> list[str]:
    found = [name for name, value in vars(torch.optim).items() if isinstance(value, type)]
    return sorted(
        name
        for name in found
        if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
        and name not in ("Optimizer", "LBFGS", "SparseAdam")
    )


def test_the_classes_of_torch_are_found() -> None:
    assert {"AdamW", "SGD", "Adagrad", "Muon", "Rprop"} <= set(named_classes())


@pytest.mark.parametrize("name", named_classes())
def test_every_class_of_torch_steps_in_a_window(name: str) -> None:
    model = nn.Linear(4, 8, bias=False)
    chosen = settings(name=name, learning_rate=0.05)
    optimizer = make_optimizer(parameter_groups(model, chosen), chosen)
    assert type(optimizer) is getattr(torch.optim, name)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]
    Finish(optimizers=[optimizer], clip_grad_norm=1.0, scaler=None, schedules=[])  # a window takes it
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_settings_reach_the_class() -> None:
    chosen = OptimizerConfig(
        learning_rate=0.01, weight_decay=0.3, options={"betas": [0.8, 0.9], "eps": 1e-6}
    )
    (group,) = make_optimizer(layer().parameters(), chosen).param_groups
    assert group["betas"] == (0.8, 0.9)
    assert isinstance(group["betas"], tuple)
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.01, 0.3, 1e-6)


def test_a_group_keeps_its_own_weight_decay_and_one_without_gets_that_of_the_settings() -> None:
    model = layer()
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "weight_decay": 0.7},
    ]
    optimizer = make_optimizer(groups, OptimizerConfig(weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.7]
    assert "weight_decay" not in groups[0]  # what was given is left as it is


OWN_CLASSES = """
import torch

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, widths=(1, 2), names=None):
        super().__init__(params, {"lr": lr, "widths": widths, "names": names})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad

class Open(Plain):
    def __init__(self, params, **options):
        options.pop("weight_decay", None)
        super().__init__(params, **options)

class Rateless(torch.optim.Optimizer):
    def __init__(self, params, momentum=0.9):
        super().__init__(params, {"momentum": momentum})

    def step(self, closure=None):
        pass

def function(params):
    pass
"""


@pytest.fixture
def own_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder; the name is this test file's alone."""
    (tmp_path / "own_optimizers_of_a_test.py").write_text(OWN_CLASSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_optimizers_of_a_test", raising=False)
    return "own_optimizers_of_a_test"


def test_a_class_of_the_users_own(own_module: str) -> None:
    options = {"widths": [3, 4], "names": ["a"]}
    chosen = settings(name=f"{own_module}:Plain", learning_rate=0.5, options=options)
    model = layer()
    optimizer = make_optimizer(parameter_groups(model, chosen), chosen)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["widths"], group["names"]) == (0.5, (3, 4), ["a"])
    assert "weight_decay" not in group
    before = model.bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.bias, before - 0.5)


def test_a_class_in_a_file(own_module: str) -> None:
    assert optimizer_class(f"{own_module}.py:Plain").__name__ == "Plain"


def test_a_class_that_takes_any_option_gets_all(own_module: str) -> None:
    chosen = OptimizerConfig(name=f"{own_module}:Open", weight_decay=0.1, options={"widths": [3]})
    (group,) = make_optimizer(layer().parameters(), chosen).param_groups
    assert (group["lr"], group["widths"]) == (3e-3, [3])


# Fused kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_where_torch_has_it(name: str, dtype: torch.dtype) -> None:
    (group,) = make_optimizer(layer(dtype).parameters(), settings(name=name)).param_groups
    assert group["fused"] is True


def test_a_fused_kernel_that_moves_nothing_is_not_taken() -> None:
    half = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    optimizer = make_optimizer([half], settings(name="SGD", learning_rate=0.5))
    half.grad = torch.ones_like(half)
    optimizer.step()
    assert bool((half == 0.5).all())


def test_not_fused_for_a_dtype_that_the_kernel_refuses() -> None:
    turned = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    (group,) = make_optimizer([turned], settings(name="AdamW")).param_groups
    assert not group["fused"]


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_options_decide_about_the_kernel(option: dict[str, bool]) -> None:
    (group,) = make_optimizer(layer().parameters(), settings(options=option)).param_groups
    assert not group["fused"]
    assert option.items() <= group.items()


def test_no_class_but_torchs_own_is_fused() -> None:
    class AdamW(torch.optim.AdamW):
        pass

    assert not optimize._fuses(AdamW, list(layer().parameters()))
    assert optimize._fuses(torch.optim.AdamW, list(layer().parameters()))


# Refusals

REFUSED = [
    ({"name": "Adamw2"}, r"optimizer.name = 'Adamw2' is no optimizer; did you mean AdamW or"),
    ({"name": "adamw"}, r"'adamw' is no optimizer; did you mean AdamW"),
    ({"name": "Optimizer"}, r"'Optimizer' is no optimizer; it has"),
    ({"name": "lr_scheduler"}, r"'lr_scheduler' is no optimizer; it has ASGD, Adadelta"),
    ({"name": "nowhere.at.all:X"}, r"optimizer.name: there is no module 'nowhere.at.all' here; give"),
    ({"name": ":X"}, r"optimizer.name: ':X' does not name an optimizer; write module:name or file.py"),
    ({"name": "math:sqrt"}, r"'math:sqrt' is no optimizer; it is no subclass of torch.optim.Optimizer"),
    (
        {"options": {"beta": [0.9]}},
        r"options.beta = \[0.9\]: AdamW has no such option; did you mean",
    ),
    ({"options": {"lr": 0.1}}, r"options.lr = 0.1 would be given twice; set optimizer.learning_rate"),
    ({"options": {"weight_decay": 0.1}}, r"options.weight_decay = 0.1 would be given twice; set optimizer"),
    ({"options": {"params": 3}}, r"optimizer.options.params = 3: AdamW has no such option"),
    ({"name": "Rprop", "weight_decay": 0.1}, r"weight_decay = 0.1, and Rprop has no weight decay; set it"),
    ({"options": {"betas": [0.9, 9.0]}}, r"does not take these settings: Invalid beta parameter at index"),
    ({"options": {"betas": 3}}, r"does not take these settings: .*int.*optimizer.options = \{'betas': 3\}"),
    ({"learning_rate": -1.0}, r"Invalid learning rate: -1.0 \(optimizer.learning_rate = -1.0"),
    ({"options": {"fused": True, "foreach": True}}, r"does not take these settings: .*cannot be"),
    ({"name": "Muon"}, r"'Muon' moves matrices only, and 1 of 2 parameters are not .* shape \(8,\)"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_optimizer(layer().parameters(), settings(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"betas": [0.9]}}, r"does not take these settings: .*optimizer.options = \{'betas': "),
        (
            {"options": {"betas": [0.9, 0.99, 0.999]}},
            r"optimizer.options = \{'betas': .*\} can't make an upd",
        ),
        (
            {"options": {"differentiable": True}},
            r"\{'differentiable': True\} can't make an update: .*in-place",
        ),
        (
            {"name": "SparseAdam", "weight_decay": 0.0},
            r"'SparseAdam' .* can't make an update: .*take another",
        ),
        ({"options": {"beta": [0.9]}}, r"options.beta = \[0.9\]: AdamW has no such option"),
        ({"name": "Rprop", "weight_decay": 0.1}, r"weight_decay = 0.1, and Rprop has no weight decay"),
        ({"name": "LBFGS"}, r"'LBFGS': its step needs a closure"),
    ],
)
def test_settings_with_which_no_update_could_be_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=message):
        check_optimizer(settings(**given))


def test_settings_with_which_updates_are_made_pass(own_module: str) -> None:
    for name in named_classes():
        if name != "SparseAdam":
            check_optimizer(settings(name=name, weight_decay=0.0))
    check_optimizer(settings(options={"capturable": True}))  # for another device than the probe's
    check_optimizer(settings(options={"betas": [0.5, 0.9], "amsgrad": True, "fused": True}))
    check_optimizer(settings(name=f"{own_module}:Plain"))


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'LBFGS': its step needs a closure that computes the loss"):
        make_optimizer(layer().parameters(), settings(name="LBFGS"))


def test_own_classes_that_do_not_fit_are_refused(own_module: str) -> None:
    with pytest.raises(UsageError, match=r"optimizer.name: own_optimizers_of_a_test has no 'Plane'"):
        optimizer_class(f"{own_module}:Plane")
    with pytest.raises(UsageError, match=r"test:function' is no optimizer; it is no subclass"):
        optimizer_class(f"{own_module}:function")
    with pytest.raises(UsageError, match=r"its class takes no lr, so optimizer.learning_rate = 0.003 and"):
        make_optimizer(layer().parameters(), settings(name=f"{own_module}:Rateless"))
