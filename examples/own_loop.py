"""Own data set, network, loss and loop: ``python examples/own_loop.py --resume auto``; repeat it after a kill."""

import sys

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

sys.path.insert(0, ".")  # the repository's folder
from training import open_run
from utils.plugin import dataset, loss, network
from utils.train_validation import TraVal


class Bars(Dataset):
    def __getitem__(self, number):
        noise = torch.randint(99, (16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        return noise.index_fill_(number % 2, torch.tensor(number % 16), 255), number % 2


dataset("bars", channels=1, image_size=16, fixed_size=True, augment=["shift"])(
    lambda path: (Subset(Bars(), range(1000)), Subset(Bars(), range(1000, 1200)), ("horizontal", "vertical"))
)
network("small")(
    lambda classes, channels, image_size: nn.Sequential(
        nn.Conv2d(channels, 16, 5), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, classes)
    )
)
loss("brier")(lambda logits, targets: (logits.softmax(1) - nn.functional.one_hot(targets, 2)).square().sum(1).mean())

if __name__ == "__main__":
    own = ["--plugin", __file__, "--dataname", "bars", "--arch", "small", "--loss", "brier"]
    with open_run([*own, *sys.argv[1:]]) as run:
        model, train, optimizer, criterion, scaler, val = run.parts
        traval = TraVal(model, train, optimizer, criterion, scaler, run.args, val, writer=run.writer, extras=run.extras)
        for epoch in run.epochs(traval):
            traval.train(epoch)
            traval.validation(epoch)
