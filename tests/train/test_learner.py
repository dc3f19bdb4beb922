from __future__ import annotations

import itertools

import pytest
import torch

from pipelines.classification import EchoStage
from train.feed import Feed
from train.learner import Learner
from train.workloads import Schedule


def trained(settings, shards, steps=6):
    feed, learner = Feed(settings, shards), Learner(settings, steps)
    for batch in itertools.islice(feed, steps):
        learner.step(**batch)
    return learner.weights()


@pytest.mark.parametrize("stage", list(EchoStage))
def test_the_seed_determines_the_weights(settings, tiny, stage):
    chosen = settings(echo_stage=stage, echo_factor=2)
    first, second = trained(chosen, tiny), trained(chosen, tiny)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = trained(settings(echo_stage=stage, echo_factor=2, seed=1), tiny)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_schedules(settings):
    image, label = torch.zeros(2, 1, 28, 28), torch.zeros(2, dtype=torch.int64)
    rates = {}
    for schedule in Schedule:
        learner = Learner(settings(schedule=schedule, learning_rate=1.0), planned_steps=100)
        rates[schedule] = []
        for _ in range(100):
            rates[schedule].append(learner.learning_rate)
            learner.step(image, label)
    assert rates[Schedule.CONSTANT][0] == pytest.approx(0.02)
    assert rates[Schedule.CONSTANT][49:] == [1.0] * 51
    assert rates[Schedule.LINEAR][75] == pytest.approx(0.25)
    assert rates[Schedule.LINEAR][-1] == pytest.approx(0.01)


def test_what_is_evaluated_is_the_average(settings):
    learner = Learner(settings(learning_rate=0.5), planned_steps=10)
    image = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    label = torch.arange(8) % 4
    # With a single class, all ten networks that might be evaluated would agree.
    seen = []
    for _ in range(10):
        learner.step(image, label)
        seen.append(learner._network[-1].weight.detach().clone())
    expected = seen[0]
    for weight in seen[1:]:
        expected = 0.98 * expected + 0.02 * weight
    torch.testing.assert_close(learner.weights()["10.weight"], expected)
