import os
import signal

import pytest

from dali_echo.shards.trial import Trial
from tests.shards.images import BAD, GOOD


@pytest.fixture(scope="module")
def trial():
    return Trial()


def test_which_images_decode(trial):
    assert all(trial.decodes(image) for image in GOOD.values())
    assert not any(trial.decodes(image) for name, (image, _) in BAD.items() if image and name != "bomb")


def test_a_crash_is_an_answer_and_the_next_image_is_tried_anew(trial):
    assert trial.decodes(GOOD["jpeg"])
    os.kill(trial._process.pid, signal.SIGSEGV)
    trial._process.wait()
    assert not trial.decodes(GOOD["jpeg"])
    assert trial.decodes(GOOD["jpeg"])


def test_the_process_ends_with_its_owner():
    trial = Trial()
    trial.decodes(GOOD["jpeg"])
    process = trial._process
    del trial
    assert process.wait(timeout=60) != 0
