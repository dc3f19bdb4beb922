"""The network in training: one step, and the weights to evaluate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train import ranks
from train.workloads import Schedule, Settings

AVERAGING = 0.98
"""The part of the averaged weights that a step keeps: they are a mean over about 50 steps."""

WARM_UP = 50
"""Steps in which the learning rate rises to its value."""


class Learner:
    """A network, its optimiser (Nesterov momentum) and the moving average of its weights.

    The average is what is evaluated: it takes the noise of a constant learning rate out of the
    curve, so that when a target is reached does not depend on when training was meant to end.
    """

    def __init__(self, settings: Settings, planned_steps: int) -> None:
        workload, images = settings.workload, settings.workload.images
        self._device = torch.device(settings.device)
        # Half precision is for GPUs: processors have no fast arithmetic for it, as a rule.
        self._half = None
        if self._device.type == "cuda":
            self._half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        torch.manual_seed(settings.seed)
        network = settings.network.make(len(images.mean), images.size, workload.classes)
        self._network = network.to(self._device, memory_format=torch.channels_last)
        # What computes the loss: with several ranks it averages their gradients.
        self._trained: torch.nn.Module = self._network
        if ranks.count() > 1:
            self._trained = DistributedDataParallel(self._network)
        average = get_ema_multi_avg_fn(AVERAGING)
        self._average = AveragedModel(self._network, multi_avg_fn=average, use_buffers=True)
        self._optimizer = torch.optim.SGD(
            self._network.parameters(),
            lr=settings.learning_rate,
            momentum=workload.momentum,
            weight_decay=workload.weight_decay,
            nesterov=True,
        )
        linear = settings.schedule is Schedule.LINEAR

        def rate(step: int) -> float:
            left = max(0.0, 1 - step / planned_steps) if linear else 1.0
            return min(1.0, (step + 1) / WARM_UP) * left

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._half is torch.float16)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._schedule.get_last_lr()[0]

    def step(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Learn from a batch; returns its mean loss, as a tensor on the device."""
        loss = F.cross_entropy(self._logits(self._trained, image), label)
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._schedule.step()
        self._average.update_parameters(self._network)
        return loss.detach()

    @torch.no_grad()
    def accuracy(self, batches: Iterable[dict[str, torch.Tensor]]) -> float:
        """The fraction of the examples of all ranks whose class the averaged network finds."""
        self._average.eval()
        if ranks.count() > 1:
            # Batch normalisation sees other batches in each rank; the first one's statistics count.
            for buffer in self._average.buffers():
                distributed.broadcast(buffer, src=0)
        right = total = 0
        for batch in batches:
            found = self._logits(self._average, batch["image"]).argmax(dim=1)
            right += int((found == batch["label"]).sum())
            total += len(found)
        right, total = ranks.total([right, total], self._device)
        return right / total

    def state_dict(self) -> dict[str, Any]:
        """All that training changes."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name, part in self._parts().items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        return {
            "network": self._network,
            "average": self._average,
            "optimizer": self._optimizer,
            "schedule": self._schedule,
            "scaler": self._scaler,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The averaged weights by name."""
        return self._average.module.state_dict()

    def _logits(self, network: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
        image = image.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self._device.type, self._half, enabled=self._half is not None):
            return network(image).float()
