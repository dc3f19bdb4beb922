from __future__ import annotations

import itertools

import torch

from pipelines.classification import EchoStage
from tests.train.conftest import TEST, TRAIN
from train.feed import Feed, held_out


def first(feed: Feed, count: int) -> list[torch.Tensor]:
    return [batch["image"] for batch in itertools.islice(feed, count)]


def test_the_seed_determines_the_batches(settings, tiny):
    one, again, other = (first(Feed(settings(seed=seed), tiny), 3) for seed in (5, 5, 6))
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))


def test_counts_are_of_what_was_given_out(settings, tiny):
    feed = Feed(settings(echo_stage=EchoStage.DECODE, echo_factor=4), tiny)
    assert feed.epoch_size == TRAIN
    assert (feed.fresh, feed.emitted, feed.wait_s) == (0, 0, 0.0)
    for number, batch in enumerate(itertools.islice(feed, 9), start=1):
        assert len(batch["label"]) == 16
        assert feed.emitted == 16 * number
        assert 0 < feed.fresh <= 16 * number
    assert feed.fresh < feed.emitted
    assert feed.wait_s > 0


def test_without_echo_all_examples_are_fresh(settings, tiny):
    feed = Feed(settings(), tiny)
    for _ in itertools.islice(feed, 25):
        assert feed.fresh == feed.emitted
    # Beyond an epoch.
    assert feed.emitted == 25 * 16 > feed.epoch_size == TRAIN
    assert feed.upstream_wait_s == feed.wait_s


def test_held_out_examples_are_the_first(settings, tiny):
    whole = torch.cat([batch["image"] for batch in held_out(settings(), tiny)])
    assert len(whole) == TEST
    some = torch.cat([batch["image"] for batch in held_out(settings(eval_examples=7), tiny)])
    assert torch.equal(some, whole[:7])
    assert len(held_out(settings(eval_examples=10_000), tiny)) == 1
