"""Own data set, network and loss: ``python examples/own_loop.py --epochs 5``. Repeat it after a kill: it goes on."""

import sys

import torch
from torch import nn

sys.path.insert(0, ".")  # the repository's folder
from main import main
from utils.plugin import dataset, loss, network


class Stripes(torch.utils.data.Dataset):
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        image = torch.randint(99, (16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        image[number % 16] = 255
        return (image if number % 2 else image.T), number % 2


dataset("stripes", channels=1, image_size=16, fixed_size=True, augment=("shift",))(
    lambda path: (Stripes(range(1000)), Stripes(range(1000, 1200)), ("vertical", "horizontal"))
)
network("small")(
    lambda classes, channels, image_size: nn.Sequential(
        nn.Conv2d(channels, 16, 5), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, classes)
    )
)
loss("brier")(lambda logits, targets: (logits.softmax(1) - nn.functional.one_hot(targets)).square().sum(1).mean())

if __name__ == "__main__":
    own = ["--plugin", __file__, "--dataname", "stripes", "--arch", "small", "--loss", "brier", "--resume", "auto"]
    sys.exit(main([*own, *sys.argv[1:]]))
