"""An example for every setting, from its field: flags that set it to another value than the default."""

import re

from utils.config.rules import OPTIONS
from utils.config.settings import as_flag, flag_of

SHAPES_RESULT = [name for name, option in OPTIONS.items() if option.metadata["affects_result"]]
# What shows only with other images or weights, on a GPU, or with several processes.
ELSEWHERE = {
    *("val_split", "val_split_by", "image_column", "label_column", "crop_mode", "pixel_range", "shard_window"),
    *("label_separator", "label_columns", "labels", "path_column", "split_column", "group_column", "weight_column"),
    *("folds_from", "class_from_name", "levels"),
    *("pretrained", "tf32", "cuda_graph", "sync_bn", "grad_compression"),
}


def example(name):
    """The flag of a setting with a value that is not its default."""
    option = OPTIONS[name]
    declared = option.metadata
    if declared["type"] is bool:
        return as_flag(name, not option.default)
    value = declared["example"] or _another(option.default, declared)
    assert value is not None, f"{flag_of(name)}: a setting whose default is none declares an example"
    return f"{flag_of(name)} {value}"


def _another(default, declared):
    if named := re.search(r"for example '?([^';,[]+)", declared["help"]):
        return named[1].strip()
    if declared["choices"]:
        return [choice for choice in declared["choices"] if choice != default][-1]
    if isinstance(default, float):
        return f"{default / 2 or 0.5:g}"
    return None if default is None else default + 1


def context(name):
    """The flags under which ``example`` shapes a run: those that its field names, and those that it needs."""
    declared = OPTIONS[name].metadata
    words = [declared["within"]]
    for effect in declared["effect"]:
        if not declared["within"] and getattr(effect, "is_of_flags", False):
            for (needed, value), *_ in effect.flags():
                words.append(f"{flag_of(needed)} {value}" if value else f"{context(needed)} {example(needed)}")
    return " ".join(filter(None, words))
