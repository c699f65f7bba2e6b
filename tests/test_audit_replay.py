"""The replay: one captured window again, as one big batch and one by one, beside what was read."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wholebatch.audit.replay.capture import WindowCapture
from wholebatch.audit.replay.replaying import replay
from wholebatch.audit.trace import Replayed


class FusedMean(torch.autograd.Function):
    """A squared error that gives backward nothing to recognise; in float64 as in what it is given."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, divisor: float) -> Tensor:
        difference = scores - targets
        ctx.save_for_backward(difference)
        ctx.divisor = divisor
        return (difference * difference).sum() / divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (difference,) = ctx.saved_tensors
        return gradients[0] * 2 * difference / ctx.divisor, None, None


class Criterion(nn.Module):
    """The mean over samples, or the bare sum."""

    def __init__(self, *, mean: bool = True) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return FusedMean.apply(scores, targets, float(len(targets)) if self.mean else 1.0)


class TokenCriterion(nn.Module):
    """A mean over tokens with labels that are not -100, by an autograd function."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        scores, labels = scores.reshape(-1, scores.shape[-1]), labels.reshape(-1)
        real = labels >= 0
        wanted = nn.functional.one_hot(labels.clamp(min=0), scores.shape[-1]).to(scores)
        return FusedMean.apply(scores[real], wanted[real], float(real.sum()))


class Watched:
    """A stand-in for the watch: tells a capture of outermost module calls and of backwards."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.capture = WindowCapture()
        self.capture.begin(models)
        self.models = models
        self._depth = 0

    def __enter__(self) -> Watched:
        self._hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._before),
            torch.nn.modules.module.register_module_forward_hook(
                self._after, with_kwargs=True, always_call=True
            ),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
            # torch leaves the mark of a hook that is both always called and told the named arguments
            torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(hook.id, None)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._depth and torch.is_grad_enabled():
            self.capture.forward_begins(module, args)  # a global hook is not told the named ones
        self._depth += 1

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        # torch leaves the named arguments out where forward raised, as a checkpoint does to stop early
        if not self._depth and torch.is_grad_enabled() and len(rest) == 2:
            self.capture.forward_called(module, args, *rest)

    def backward(self, loss: Tensor, loss_scale: float = 1.0) -> None:
        self.capture.backward_called(loss, None, loss_scale)
        loss.backward()

    def read(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        named = [pair for model in self.models for pair in model.named_parameters()]
        return {name: p.grad.clone() / loss_scale for name, p in named if p.grad is not None}


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)]
    return nn.Sequential(*(layer for layer in layers if dropout or not isinstance(layer, nn.Dropout)))


def batches(sizes: Sequence[int], features: int = 4) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, features, generator=numbers), 2 + torch.randn(n, 1, generator=numbers))
        for n in sizes
    ]


def replayed(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    data: Sequence[tuple[Tensor, Tensor]],
    weigh: Callable[[Tensor, int], Tensor],
    **how: Any,
) -> Replayed:
    with Watched([model]) as watched:
        for inputs, targets in data:
            watched.backward(weigh(criterion(model(inputs), targets), len(inputs)))
    return replay(watched.capture, watched.read(), 3, **how)


def test_a_right_mean_reads_the_big_batch_once():
    found = replayed(mlp(), Criterion(), batches([3, 3, 3]), lambda loss, _: loss / 3)
    assert found.unable is None
    assert found.update == 3
    assert found.dtype == "float64"
    assert found.factor == pytest.approx(1.0, abs=1e-6)
    assert found.difference < found.rounding < 1e-3
    assert found.split_difference < found.rounding
    assert found.split_from_big < found.replay_rounding < 1e-10
    assert found.joined == "inputs"
    assert found.compared == "read"
    assert not found.additive
    assert found.num_samples == 9


def test_a_mean_that_nobody_divides_reads_the_big_batch_a_times():
    found = replayed(mlp(), Criterion(), batches([3, 3, 3, 3]), lambda loss, _: loss)
    assert found.factor == pytest.approx(4.0, abs=1e-5)
    assert max(found.difference, found.split_difference) < found.rounding


def test_a_mean_of_means_over_unequal_numbers_is_no_multiple_of_the_big_batch():
    found = replayed(mlp(), Criterion(), batches([1, 7]), lambda loss, _: loss / 2)
    assert found.split_difference < found.rounding < found.difference / 100
    assert found.split_from_big == pytest.approx(found.difference, rel=1e-3)


def test_unequal_numbers_weighted_by_their_share_are_right():
    found = replayed(mlp(), Criterion(), batches([1, 7]), lambda loss, n: loss * n / 8)
    assert found.factor == pytest.approx(1.0, abs=1e-6)
    assert max(found.difference, found.split_difference) < found.rounding


@pytest.mark.parametrize(("divisor", "factor"), [(8.0, 1 / 8), (1.0, 1.0)])
def test_a_sum_is_told_from_a_mean(divisor: float, factor: float):
    found = replayed(mlp(), Criterion(mean=False), batches([1, 7]), lambda loss, _: loss / divisor)
    assert found.additive
    assert found.num_samples == 8
    assert found.factor == pytest.approx(factor, rel=1e-6)
    assert found.difference < found.rounding


def test_what_was_read_is_judged_and_not_only_what_was_replayed():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for place, (inputs, targets) in enumerate(batches([3, 3])):
            watched.backward(criterion(model(inputs), targets) / 2)
            if place == 0:
                model.zero_grad()  # inside the window
    found = replay(watched.capture, watched.read(), 1)
    assert found.split_difference > 100 * found.rounding
    assert found.difference > 100 * found.rounding
    assert found.split_from_big < 1e-12


def test_a_loss_scale_is_taken_out():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            watched.backward(
                criterion(model(inputs), targets) / 2 * torch.tensor(1024.0), loss_scale=1024.0
            )
    found = replay(watched.capture, watched.read(1024.0), 1)
    assert found.factor == pytest.approx(1.0, abs=1e-6)
    assert found.split_difference < found.rounding


def test_on_several_ranks_the_share_of_this_one_is_compared_with_its_own_big_batch():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            watched.backward(criterion(model(inputs), targets))
    read = {name: torch.randn_like(tensor) for name, tensor in watched.read().items()}
    found = replay(watched.capture, read, 1, num_ranks=2)
    assert found.compared == "split"
    assert found.factor == pytest.approx(2.0, abs=1e-9)
    assert found.split_difference < found.rounding  # of the losses


def test_two_losses_of_one_micro_batch_are_added_as_the_loop_did():
    model, one, other = mlp(), Criterion(), nn.L1Loss()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            scores = model(inputs)
            watched.backward((one(scores, targets) + 0.1 * other(scores, targets)) / 2)
    found = replay(watched.capture, watched.read(), 1)
    assert found.factor == pytest.approx(1.0, abs=1e-6)
    assert found.difference < found.rounding


def test_reshaping_between_the_calls_is_done_again():
    class Flat(nn.Module):
        def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
            return TokenCriterion()(scores, labels)

    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)), Flat()
    ids = [torch.randint(0, 9, (2, 5)), torch.randint(0, 9, (3, 5))]
    with Watched([model]) as watched:
        for each in ids:
            scores = model(each)[..., :-1, :].contiguous().view(-1, 9).float()
            watched.backward(criterion(scores, each[:, 1:].reshape(-1)) * len(each) / 5)
    found = replay(watched.capture, watched.read(), 1)
    assert found.unable is None
    assert found.joined == "inputs"
    assert found.factor == pytest.approx(1.0, abs=1e-6)
    assert found.difference < found.rounding


def test_lengths_that_differ_are_put_together_at_the_loss():
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)), TokenCriterion()
    ids = [torch.randint(0, 9, (2, 3)), torch.randint(0, 9, (2, 7))]
    with Watched([model]) as watched:
        for each in ids:
            watched.backward(criterion(model(each).view(-1, 9), each.view(-1)) / 2)
    found = replay(watched.capture, watched.read(), 1)
    assert found.unable is None
    assert found.joined == "last call"
    assert found.split_difference < found.rounding < found.difference / 100


def test_padding_is_used_only_where_it_leaves_the_loss_alone():
    class Model(nn.Module):
        def __init__(self, *, ignores: bool) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
            self.loss, self.ignores = TokenCriterion(), ignores

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.body(ids), labels if self.ignores else labels.clamp(min=0))

    for ignores in (True, False):
        torch.manual_seed(0)
        model = Model(ignores=ignores)
        with Watched([model]) as watched:
            for length in (3, 7):
                ids = torch.randint(0, 9, (2, length))
                watched.backward(model(ids, ids) * length / 10)
        found = replay(watched.capture, watched.read(), 1)
        if ignores:
            assert found.unable is None
            assert found.factor == pytest.approx(1.0, abs=1e-6)
            assert found.difference < found.rounding
        else:
            assert found.unable is not None
            assert "padding changes the loss" in found.unable


def test_dropout_is_drawn_as_it_was_and_left_out_of_the_big_batch():
    model, criterion = mlp(dropout=0.5), Criterion()
    found = replayed(model, criterion, batches([3, 3]), lambda loss, _: loss / 2)
    assert found.split_difference < found.rounding
    assert found.compared == "split"
    assert found.factor == pytest.approx(1.0, abs=1e-9)
    assert found.split_from_big < 1e-12
    model = mlp(dropout=0.5)
    assert replayed(model, criterion, batches([3, 3]), lambda loss, _: loss).factor == pytest.approx(2.0)


def test_other_randomness_is_not_replayed():
    class Noisy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs + torch.randn_like(inputs))

    found = replayed(Noisy(4, 1), Criterion(), batches([3, 3]), lambda loss, _: loss / 2)
    assert found.unable is not None
    assert "draw random numbers besides dropout" in found.unable


def plain_python(scores: Tensor, targets: Tensor) -> Tensor:
    return FusedMean.apply(scores, targets, float(len(targets)))


@pytest.mark.parametrize(
    ("model", "criterion", "says"),
    [
        (mlp(), plain_python, "a function outside any module (FusedMeanBackward"),
        (nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)), Criterion(), "BatchNorm1d 1 normalises by"),
        (
            mlp(),
            lambda scores, y: Criterion()(scores * scores, y),
            "one module's input from another's output",
        ),
    ],
)
def test_what_can_not_be_replayed_says_why(model: nn.Module, criterion: Any, says: str):
    found = replayed(model, criterion, batches([3, 3]), lambda loss, _: loss / 2)
    assert found.unable is not None
    assert says in found.unable


@pytest.mark.parametrize(("divisors", "says"), [((3.0, 3.0), None), ((3.0, 4.0), "divisor was 3.0 in one")])
def test_a_function_that_is_applied_outside_any_module(divisors: Sequence[float], says: str | None):
    model = mlp()
    with Watched([model]) as watched:
        capture = watched.capture
        for (inputs, targets), divisor in zip(batches([3, 3]), divisors, strict=True):
            arguments = (model(inputs), targets, divisor)
            capture.forward_begins(capture.stand_in(FusedMean), arguments)
            loss = FusedMean.apply(*arguments)
            capture.forward_called(capture.stand_in(FusedMean), arguments, {}, loss)
            watched.backward(loss)
    found = replay(watched.capture, watched.read(), 1)
    if says is not None:
        assert says in str(found.unable)
        return
    assert found.unable is None
    assert found.additive
    assert found.factor == pytest.approx(1.0, abs=1e-6)  # each micro-batch divided by 3, and so does this
    assert found.difference < found.rounding


def test_samples_that_change_each_other_are_no_wrong_update():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            scores = self.linear(inputs)
            return scores - scores.mean(0)

    found = replayed(Centred(), Criterion(), batches([3, 3]), lambda loss, _: loss / 2)
    assert found.unable is not None
    assert "change each other's outputs in Centred" in found.unable


def test_two_backwards_of_one_forward_and_vectors_are_not_replayed():
    model, criterion = mlp(), Criterion()
    (inputs, targets), *_ = batches([3])
    with Watched([model]) as watched:
        loss = criterion(model(inputs), targets)
        watched.capture.backward_called(loss, None)
        watched.capture.backward_called(loss, None)
    assert "without any module call" in str(replay(watched.capture, {}, 1).unable)
    with Watched([model]) as watched:
        watched.capture.backward_called(model(inputs), torch.ones(3, 1))
    assert "not one number" in str(replay(watched.capture, {}, 1).unable)


def test_the_state_of_the_beginning_is_what_is_replayed():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            watched.backward(criterion(model(inputs), targets) / 2)
            inputs.zero_()  # a loader that reuses its memory
    read = watched.read()
    with torch.no_grad():
        for parameter in model.parameters():  # the step, before anybody replays
            parameter.sub_(10 * parameter.grad)
    model.eval()
    found = replay(watched.capture, read, 1)
    assert found.split_difference < found.rounding
    assert found.difference < found.rounding


def test_nothing_is_changed_by_a_replay():
    model = nn.Sequential(mlp(dropout=0.5), nn.BatchNorm1d(1))
    model[1].eval()
    criterion = Criterion()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1) or None)
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            watched.backward(criterion(model(inputs), targets))
    model[0][2].eval()
    torch.rand(1), random.random(), np.random.rand()
    state = copy.deepcopy(model.state_dict())
    grads = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    hooks = (len(torch.nn.modules.module._global_forward_hooks), len(model._forward_hooks))
    found = replay(watched.capture, watched.read(), 1)
    assert found.split_difference < found.rounding  # with dropout, as it was on then
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name][0]
        assert torch.equal(parameter.grad, grads[name][1])
    assert modes == [module.training for module in model.modules()]
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert hooks == (len(torch.nn.modules.module._global_forward_hooks), len(model._forward_hooks))


def test_a_loss_that_reaches_past_its_copy_is_refused_and_leaves_no_gradient():
    model = mlp()
    first, _, last = model

    class Reaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = last

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return FusedMean.apply(self.last(first(inputs)), targets, 1.0)  # from outside

    reaching = Reaching()
    with Watched([model]) as watched:
        for inputs, targets in batches([3]):
            watched.backward(reaching(inputs, targets))
    read = watched.read()
    assert "past its own copy" in str(replay(watched.capture, read, 1).unable)
    assert all(torch.equal(read[name], p.grad) for name, p in model.named_parameters())


def test_a_kernel_that_knows_float32_only_runs_in_float32():
    class Only(Criterion):
        def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
            if scores.dtype != torch.float32:
                raise TypeError("float32 only")
            return super().forward(scores, targets)

    found = replayed(mlp(), Only(), batches([3, 3]), lambda loss, _: loss)
    assert found.dtype == "float32"
    assert found.factor == pytest.approx(2.0, abs=1e-5)
    assert max(found.difference, found.split_difference) < found.rounding


def test_checkpointed_parts_are_run_again_on_the_copy():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(dropout=0.5)

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.body, inputs, use_reentrant=False)

    found = replayed(Checkpointed(), Criterion(), batches([3, 3]), lambda loss, _: loss / 2)
    assert found.unable is None
    assert found.split_difference < found.rounding
    assert found.factor == pytest.approx(1.0, abs=1e-9)


def test_a_released_capture_says_so():
    capture = WindowCapture()
    assert replay(capture, {}, 1).unable == "no window was captured"
    capture.begin([mlp()])
    assert replay(capture, {}, 1).unable == "the window had no backward"
    capture.release()
    assert not capture.state
    assert replay(capture, {}, 1).unable == "no window was captured"


def llama(**changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        **changes,
    )
    return transformers.LlamaForCausalLM(config)


def texts(lengths: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
    """Padded micro-batches, each to its own longest text."""
    numbers = torch.Generator().manual_seed(0)
    made = []
    for each in lengths:
        mask = (torch.arange(max(each))[None] < torch.tensor(each)[:, None]).long()
        ids = torch.randint(3, 50, mask.shape, generator=numbers) * mask
        labels = torch.where(mask == 1, ids, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


UNEQUAL = [[3, 5], [12, 9], [2, 2]]


def test_a_language_model_with_texts_of_unequal_length_is_padded_to_one_big_batch():
    for weigh, right in ((lambda loss, _: loss / 3, False), (lambda loss, n: loss * n / 27, True)):
        model = llama(attention_dropout=0.0)
        with Watched([model]) as watched:
            for batch in texts(UNEQUAL):
                num_items = int((batch["labels"][:, 1:] >= 0).sum())
                watched.backward(weigh(model(**batch).loss, num_items))
        found = replay(watched.capture, watched.read(), 1)
        assert found.unable is None
        assert found.joined == "inputs"
        assert found.split_difference < found.rounding
        assert (found.difference < found.rounding) is right
        assert (found.split_from_big < 1e-5) is right  # its norms compute in float32
        assert found.num_samples == 6
        assert not right or found.factor == pytest.approx(1.0, abs=1e-5)


def test_a_language_model_that_is_told_the_number_of_items_divides_itself():
    model = llama()
    with Watched([model]) as watched:
        for batch in texts(UNEQUAL):
            watched.backward(model(**batch, num_items_in_batch=torch.tensor(27)).loss)
    found = replay(watched.capture, watched.read(), 1)
    assert found.unable is None
    assert not found.additive
    assert found.factor == pytest.approx(1.0, abs=1e-5)
    assert found.difference < found.rounding


def test_a_language_model_with_dropout_in_its_attention():
    model = llama(attention_dropout=0.3)
    with Watched([model]) as watched:
        for batch in texts([[5, 5], [5, 5]]):
            watched.backward(model(**batch).loss)
    found = replay(watched.capture, watched.read(), 1)
    assert found.unable is None
    assert found.split_difference < found.rounding
    assert found.compared == "split"
    assert found.factor == pytest.approx(2.0, abs=1e-6)


def test_numbers_that_differ_between_micro_batches_are_named():
    model = llama()
    with Watched([model]) as watched:
        for batch, number in zip(texts([[5, 5], [5, 5]]), (8, 9), strict=True):
            watched.backward(model(**batch, num_items_in_batch=number).loss)
    found = replay(watched.capture, watched.read(), 1)
    assert found.unable is not None
    assert "num_items_in_batch was 8 in one micro-batch and 9 in another" in found.unable


def test_a_model_in_a_wrapper_is_run_without_it():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        wrapped = nn.DataParallel(model)
        for inputs, targets in batches([3, 3]):
            watched.backward(criterion(wrapped(inputs), targets))
    found = replay(watched.capture, watched.read(), 1)
    assert found.factor == pytest.approx(2.0, abs=1e-5)
    assert found.split_difference < found.rounding


def test_autocast_is_bounded_by_its_own_rounding_and_replayed_in_float64():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = model(inputs)
            watched.backward(criterion(scores.float(), targets))
    found = replay(watched.capture, watched.read(), 1)
    assert found.dtype == "float64"
    assert found.factor == pytest.approx(2.0, rel=2e-2)
    assert 1e-5 < found.split_difference < found.rounding
    assert found.split_from_big < 1e-12


def test_only_what_the_optimizer_read_is_compared():
    model, criterion = mlp(), Criterion()
    with Watched([model]) as watched:
        for inputs, targets in batches([3, 3]):
            watched.backward(criterion(model(inputs), targets))
    read = {name: tensor for name, tensor in watched.read().items() if name.startswith("0.")}
    found = replay(watched.capture, read, 1)
    assert found.factor == pytest.approx(2.0, abs=1e-5)
    assert found.split_difference < found.rounding
    assert "holds what the optimizer stepped" in str(
        replay(watched.capture, {"x": read["0.bias"]}, 1).unable
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_a_compiled_model_with_its_loss_is_run_uncompiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch shows progress by it: no thread left

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return (self.body(inputs) - targets).pow(2).mean()

    for weigh, factor in ((0.5, 1.0), (1.0, 2.0)):
        model = WithLoss()
        compiled = torch.compile(model, backend="aot_eager")
        with Watched([model]) as watched:
            for inputs, targets in batches([3, 3]):
                watched.backward(compiled(inputs, targets) * weigh)
        found = replay(watched.capture, watched.read(), 1)
        assert found.unable is None
        assert found.factor == pytest.approx(factor, abs=1e-5)
        assert max(found.difference, found.split_difference) < found.rounding
