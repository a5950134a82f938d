"""Own parts for training, in one file: ``python main.py --plugin examples/plugin.py --arch mixer --loss poly``.

A decorator enters each part under a name that flags and recipes then know. docs/plugins.md says what each is given.
"""

import sqlite3

import torch
from torch import nn
from torch.nn import functional

from utils.plugin import augmentation, dataset, hook, loss, lr_policy, metric, network, optimizer


class Mixer(nn.Module):
    """A block of MLP-Mixer (Tolstikhin et al., MLP-Mixer: An all-MLP architecture for vision, 2021)."""

    def __init__(self, tokens, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.across = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class MLPMixer(nn.Module):
    def __init__(self, classes, channels, image_size, patch, width, depth):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.blocks = nn.Sequential(*(Mixer((image_size // patch) ** 2, width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


@network("mixer")
def mixer(classes, channels, image_size, patch=2, width=64, depth=4):
    return MLPMixer(classes, channels, image_size, patch, width, depth)


@loss("poly")
def poly(logits, targets):
    """Poly-1 (Leng et al., PolyLoss, 2022) with epsilon 1."""
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, logits.shape[1])
    right = (logits.softmax(1) * targets).sum(1)
    return functional.cross_entropy(logits, targets.float()) + (1 - right).mean()


@optimizer("signsgd")
def signsgd(groups, lr):
    """Steps along the gradient's signs (Bernstein et al., signSGD, 2018), which are Adam's without its averages."""
    return torch.optim.Adam(groups, lr, betas=(0.0, 0.0))


@lr_policy("inverse-sqrt")
def inverse_sqrt(step, steps):
    return (1 + step) ** -0.5


@augmentation("brightness")
def brightness(images, numbers):
    factors = 0.8 + 0.4 * numbers[:, :, None, None]
    return (images.float() * factors).clamp_(0, 255)


@metric("margin")
def margin(logits, targets):
    """Probability of the right class minus that of the likeliest other class."""
    shares = logits.softmax(1)
    right = shares.gather(1, targets[:, None])[:, 0]
    return right - shares.scatter(1, targets[:, None], 0).amax(1)


@hook("after_validation")
def print_width(traval, report):
    """Log the norm of the network's last parameter: a hook may look at anything."""
    *_, last = traval.model.parameters()
    if traval.distributed.is_main:
        traval.writer.log(f"norm of the last parameter: {last.norm():.4f}")


@dataset("sqlite", image_size=64, augment=("resized-crop", "flip"))
def sqlite(path):
    """Images of a table ``images (split TEXT, image BLOB, label INTEGER)`` in the database file at --datapath."""
    names = [name for (name,) in sqlite3.connect(path).execute("SELECT name FROM classes ORDER BY label")]
    return Rows(path, "train"), Rows(path, "val"), names


class Rows(torch.utils.data.Dataset):
    def __init__(self, path, split):
        self.path = path
        rows = sqlite3.connect(path).execute("SELECT rowid, label FROM images WHERE split = ? ORDER BY rowid", (split,))
        self.rows, self.targets = zip(*rows, strict=True)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        connection = sqlite3.connect(self.path)  # each worker has its own
        ((image,),) = connection.execute("SELECT image FROM images WHERE rowid = ?", (self.rows[index],))
        return image, self.targets[index]
