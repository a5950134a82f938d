"""A layer that is absurdly large for the images it was built for."""

from __future__ import annotations

from torch import nn

from utils.config.image_size import Size, pixels_text

# weights of a linear layer, and its share of the network's parameters
MOST_WEIGHTS = 20_000_000
MOST_SHARE = 0.9


def oversized_layer(arch: str, model: nn.Module, image_size: Size) -> str | None:
    """A line about a linear layer on flattened pixels that is nearly all of a large network; otherwise None.

    Such a layer grows with the square of the image's side: conv2, published for 32 pixels, has 4 million weights there
    and 205 million for photographs of 224. A large last layer, for many classes, does not count. VGG's first linear
    layer has 74 % of 138 million parameters, as published, and passes.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module.in_features < module.out_features:
            continue
        weights = module.weight.numel()
        if weights > MOST_WEIGHTS and weights > MOST_SHARE * total:
            return (
                f"--arch {arch}: of its {total:,} parameters, {weights:,} are weights of the one layer {name}, for "
                f"{module.in_features:,} numbers that {pixels_text(image_size)} images leave it; a network that "
                "pools them, such as --arch resnet18, or a smaller --image-size usually does better with less memory "
                "and time"
            )
    return None
