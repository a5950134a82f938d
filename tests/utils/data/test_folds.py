"""``--folds``: stratified, whole groups, the same for every order of the images; images keep theirs as others come."""

import dataclasses
import shutil
import warnings

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from scripts import pack
from tests.helpers import trained
from tests.utils.data.loading import evaluated, read, read_folder, read_tree, save
from utils.checkpoint import checkpoint
from utils.checkpoint.resume import ResumePoint
from utils.config.arguments import parse
from utils.config.groups.data import DataSettings
from utils.config.settings import UserError
from utils.data.formats.file_paths import FilePaths
from utils.data.formats.held_out import Folds, _hashes, folds_of, key_of
from utils.data.formats.readers import ImageFiles

few = hypothesis.settings(max_examples=40)
CLASSES = ("a", "b", "c")
SEEDS = st.integers(0, 2**32 - 1)  # from which images are drawn at once: drawing each by itself is slow


def drawn(seed, count, groups=None):
    """Images (class, number), of some classes often; or (class, number, group) of that many groups."""
    draw = np.random.default_rng(seed)
    labels = draw.choice(3, count, p=draw.dirichlet([1, 1, 1])).tolist()
    numbers = draw.choice(1000, count, replace=False).tolist()  # of 1,000, so that two draws share some
    if groups is None:
        return [*zip(labels, numbers, strict=True)]
    return [*zip(labels, numbers, draw.integers(0, groups, count).tolist(), strict=True)]


IMAGES = st.builds(drawn, SEEDS, st.integers(12, 80))
GROUPED = st.builds(drawn, SEEDS, st.integers(40, 80), st.integers(4, 40))


def files(images):
    """Files CLASS/NUMBER.png of (class, number) or (class, number, group)."""
    names = "\0".join(f"{CLASSES[label]}/{number}.png" for label, number, *_ in images).encode()
    labels = torch.tensor([image[0] for image in images])
    groups = None
    if len(images[0]) > 2:
        groups = np.array([f"g{image[2]}" for image in images], dtype=object)
    return ImageFiles(FilePaths.joined("/tree", names), labels, "RGB", groups)


def dealt(images, count, seed=0, kept=None):
    """The folds, and that of each image by its number."""
    settings = DataSettings(dataname="folder", folds=count, fold=0, fold_seed=seed)
    folds = folds_of(files(images), CLASSES, settings, kept)
    return folds, dict(zip((image[1] for image in images), folds.folds.tolist(), strict=True))


def can_be_dealt(images, count, seed=0):
    try:
        return dealt(images, count, seed)
    except UserError as error:
        assert "no class has so many" in str(error) or "groups" in str(error)
        return None


def counts(images, fold_of, count):
    """Images of each class in each fold: int (classes, folds)."""
    table = np.zeros((3, count), dtype=int)
    for label, number, *_ in images:
        table[label, fold_of[number]] += 1
    return table


def assert_groups_are_whole(images, fold_of):
    folds = {(group, fold_of[number]) for _, number, group in images}
    assert len(folds) == len({group for *_, group in images})


@few
@given(GROUPED, st.integers(2, 4), st.randoms())
def test_no_group_is_in_two_folds_and_no_order_of_the_images_changes_them(images, count, random):
    if (found := can_be_dealt(images, count)) is None:
        return
    assert_groups_are_whole(images, found[1])
    assert set(found[1].values()) == set(range(count)), "no fold is empty"
    assert dealt(random.sample(images, len(images)), count)[1] == found[1]


@few
@given(IMAGES, IMAGES, st.integers(2, 5))
def test_images_keep_their_folds_as_others_are_added_and_removed_and_the_classes_stay_spread(old, more, count):
    if (before := can_be_dealt(old, count)) is None:
        return
    known = {image[1] for image in old}
    both = old + [image for image in more if image[1] not in known]
    _, after = dealt(both, count, kept=before[0])
    assert {number: after[number] for number in known} == before[1]
    table = counts(both, after, count)
    assert (table.max(1) - table.min(1) <= 1).all(), "those added go where their class has the fewest"
    left = both[len(old) // 2 :]
    _, fewer = dealt(left, count, kept=before[0])
    assert all(fewer[number] == fold for number, fold in before[1].items() if number in fewer)


@few
@given(GROUPED, GROUPED, st.integers(2, 4))
def test_added_images_of_a_known_group_join_it_and_new_groups_stay_whole(old, more, count):
    if (before := can_be_dealt(old, count)) is None:
        return
    known = {image[1] for image in old}
    both = old + [image for image in more if image[1] not in known]
    _, after = dealt(both, count, kept=before[0])
    assert {number: after[number] for number in known} == before[1]
    assert_groups_are_whole(both, after)


def in_order_of_hashes(images, seed, of_groups=False):
    """Labels and group numbers, sorted by the hash of key or group."""
    keys = [key_of(f"{CLASSES[label]}/{number}.png".encode()) for label, number, *_ in images]
    if of_groups:
        keys = [b"g%d" % image[2] for image in images]
    hashes = _hashes(keys, len(keys), seed)
    order = np.argsort(hashes, kind="stable")
    return order, np.array([image[0] for image in images])[order], np.unique(hashes, return_inverse=True)[1][order]


@few
@given(IMAGES, st.integers(2, 5), st.integers(0, 2))
def test_they_are_those_of_scikit_learns_stratified_k_fold_in_the_order_of_the_hashes(images, count, seed):
    if (found := can_be_dealt(images, count, seed)) is None:
        return
    order, labels, _ = in_order_of_hashes(images, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fold, (_, validated) in enumerate(StratifiedKFold(count).split(labels, labels)):
            assert (found[0].folds[order[validated]] == fold).all() and (found[0].folds == fold).sum() == len(validated)


def test_with_groups_they_are_those_of_scikit_learns_stratified_group_k_fold():
    draw = np.random.default_rng(0)
    images = [(int(draw.integers(3)), number, int(draw.integers(30))) for number in range(300)]
    folds, _ = dealt(images, 5)
    order, labels, groups = in_order_of_hashes(images, 0, of_groups=True)
    for fold, (_, validated) in enumerate(StratifiedGroupKFold(5).split(labels, labels, groups)):
        assert (folds.folds[order[validated]] == fold).all() and (folds.folds == fold).sum() == len(validated)


def test_images_of_one_name_in_two_formats_are_in_one_fold():
    images = [(0, number) for number in range(40)]
    names = [f"a/{number}.{ending}" for _, number in images for ending in ("jpg", "png")]
    both = ImageFiles(FilePaths.joined("/t", "\0".join(names).encode()), torch.zeros(80, dtype=torch.int64), "RGB")
    folds = folds_of(both, CLASSES, DataSettings(dataname="folder", folds=4, fold=0), None).folds
    assert (folds[::2] == folds[1::2]).all() and np.bincount(folds).tolist() == [20] * 4


def test_of_groups_with_one_name_in_two_formats_each_image_keeps_its_fold():
    """Under its name it would have that of the other format: what was trained on would be validated on."""
    images = files([(0, number, number) for number in range(40)])
    names = [f"a/{number // 2}.{'jpg' if number % 2 else 'png'}" for number in range(40)]
    images = dataclasses.replace(images, paths=FilePaths.joined("/tree", "\0".join(names).encode()))
    settings = DataSettings(dataname="folder", folds=4, fold=0)
    folds = folds_of(images, CLASSES, settings, None)
    assert (folds.folds[::2] == folds.folds[1::2]).all() and np.bincount(folds.folds).tolist() == [10] * 4
    assert folds_of(images, CLASSES, settings, folds).folds.tolist() == folds.folds.tolist()


def test_several_labels_an_image_are_spread_by_their_combinations():
    labels = torch.tensor([[0, 1], [1, 0], [1, 1]] * 20, dtype=torch.int8)
    images = dataclasses.replace(files([(0, number) for number in range(60)]), labels=labels)
    folds = folds_of(images, CLASSES, DataSettings(dataname="folder", folds=4, fold=0), None).folds
    for fold in range(4):
        assert labels[torch.from_numpy(folds == fold)].sum(0).tolist() == [10, 10]


def test_the_folds_of_a_version_stay_those_of_the_next():
    """A table, made once: with another one the runs of before would validate on what they were trained on."""
    images = [(number % 2, number) for number in range(24)]
    table = [2, 0, 0, 1, 1, 2, 1, 2, 0, 2, 2, 1, 0, 0, 1, 1, 0, 1, 1, 0, 2, 0, 2, 2]
    assert dealt(images, 3)[0].folds.tolist() == table
    assert dealt(images, 3, seed=1)[0].folds.tolist() != table


def test_groups_that_were_joined_since_are_refused_with_their_names():
    images = [(number % 3, number, number // 4) for number in range(48)]
    kept, fold_of = dealt(images, 3)
    other = next(number for number in range(4, 48) if fold_of[number] != fold_of[0])
    joined = [(label, number, 0 if group == other // 4 else group) for label, number, group in images]
    with pytest.raises(UserError, match=r"1 group\(s\) have images in several of the folds that are kept \(g0\)"):
        dealt(joined, 3, kept=kept)
    more = files([*images, (0, 48, 0), (0, 48, other // 4)])  # one name in two groups that have a fold each
    with pytest.raises(UserError, match=rf"2 group\(s\) have images .* that are kept \(g0, g{other // 4}\)"):
        folds_of(more, CLASSES, DataSettings(dataname="folder", folds=3, fold=0), kept)


@pytest.mark.parametrize(
    ("images", "count", "line"),
    [
        ([(0, 1), (1, 2)], 3, "--folds 3: there are only 2 images"),
        ([(number % 3, number) for number in range(9)], 5, "--folds 5: no class has so many images"),
        ([(number % 2, number, number % 2) for number in range(9)], 3, "--folds 3: there are only 2 groups"),
    ],
)
def test_folds_that_cannot_be_filled_are_refused(images, count, line):
    with pytest.raises(UserError, match=line):
        dealt(images, count)


# ------------------------------------------------------------------------------------------- data sets


@pytest.mark.parametrize("fold", range(3))
def test_each_training_digit_is_validated_in_one_fold_and_the_others_train(fold):
    whole, data = (read(*flags) for flags in ([], flags_of(3, fold)))
    chosen = torch.from_numpy(data.folds.folds == fold)
    for images, side in ((data.validation, chosen), (data.train, ~chosen)):
        assert torch.equal(images.pixels, whole.train.pixels[side])
        assert torch.equal(images.labels, whole.train.labels[side])
    assert len(data.validation) == 479 and len(data.train) == 958


def flags_of(count, fold):
    return ["--folds", str(count), "--fold", str(fold)]


def in_three(folder, *flags):
    """The data of each of three folds."""
    return [read_folder(folder, *flags, *flags_of(3, fold)) for fold in range(3)]


@pytest.fixture
def tree(tmp_path):
    """Class folders with 30 training images and 6 validation images."""
    for number in range(36):
        split = "val" if number < 6 else "train"
        save(tmp_path / "tree" / split / "ab"[number % 2] / f"{number}.png", number)
    return tmp_path / "tree"


def test_of_a_set_with_validation_images_the_training_images_alone_are_split(tree):
    parts = in_three(tree)
    held = [{*part.validation.paths} for part in parts]
    everything = set.union(*held)
    assert sum(map(len, held)) == len(everything) == 30
    assert all("/train/" in path for path in everything)
    assert all({*part.train.paths} == everything - own for part, own in zip(parts, held, strict=True))


def test_a_class_too_small_for_the_folds_is_told(tree):
    save(tree / "train" / "c" / "1.png")
    lines = [line for part in in_three(tree) for line in part.warnings]
    assert sum("1 of 3 classes have no validation image, and the results say nothing about them: c" in x for x in lines)
    held = [line for line in lines if "all images of 1 of 3 classes are held out" in line]
    assert len(held) == 1 and held[0].startswith("--folds 3 --fold ")


def trained_on(tree, tmp_path):
    """A run of one epoch on the second of three folds: its folder and its last checkpoint."""
    line = ("--dataname", "folder", "--datapath", tree, "--arch", "fc", "--image-size", 4, "--epochs", 1)
    run = trained(tmp_path / "runs", *line, "--batch-size", 8, *flags_of(3, 1))
    path = run / "checkpoints" / "final.pt"
    return run, ResumePoint.of(path, checkpoint.load(path), run)


def test_the_checkpoint_holds_the_folds_and_added_images_move_none_of_another_fold(tree, tmp_path, capsys):
    run, point = trained_on(tree, tmp_path)
    data = read_folder(tree, *flags_of(3, 1))
    stored = Folds.from_state(point.read())
    assert (stored.folds == data.folds.folds).all() and (stored.images == data.folds.images).all()
    held = [{*part.validation.paths} for part in in_three(tree)]
    for number in range(100, 121):
        save(tree / "train" / "ab"[number % 2] / f"{number}.png", number)
    kept = [{*part.validation.paths} for part in in_three(tree, "--folds-from", run)]
    afresh = [{*part.validation.paths} for part in in_three(tree)]
    assert all(old < new for old, new in zip(held, kept, strict=True))
    assert not all(old < new for old, new in zip(held, afresh, strict=True)), "without the flag some move"
    assert {len(new) for new in kept} == {17}
    # evaluation of the run finds its folds by itself, and so validates no image that it was trained on
    shown = evaluated(tree, *flags_of(3, 1), trained=point, division_is_explicit=False)
    assert {*shown.validation.paths} == kept[1]
    none = "by their names, on none of the 17 validation images"
    assert shown.seen == f"the data have changed since {point.path} was trained: {none}"


def test_the_fold_of_another_run_is_known_to_have_been_trained_on_and_others_are_not_taken_from_it(tree, tmp_path):
    run, point = trained_on(tree, tmp_path)
    data = read_tree(tree, *flags_of(3, 2), trained=point)[0]
    line = f"{point.path} was trained on 10 of the 10 validation images; with --folds 3 --fold 1 on none of them"
    assert data.seen == line
    assert read_tree(tree, *flags_of(3, 1), trained=point)[0].seen == ""
    with pytest.raises(UserError, match=r"--folds-from .*: has --folds 3 --fold-seed 0, not --folds 4 --fold-seed 0"):
        read_folder(tree, *flags_of(4, 1), "--folds-from", run)
    (run / "checkpoints").rename(run / "gone")
    with pytest.raises(UserError, match=r"--folds-from .*: holds no checkpoint with folds"):
        read_folder(tree, *flags_of(3, 1), "--folds-from", run)


def test_folds_from_a_run_that_knows_none_of_the_images_are_refused(tree, tmp_path):
    run, _ = trained_on(tree, tmp_path)
    rows = [f"{path.relative_to(tree)},{path.parent.name}" for path in sorted(tree.rglob("*.png"))]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    with pytest.raises(UserError, match=r"--folds-from .*: its folds have none of the training images, by their names"):
        read_folder(tree, "--labels", tmp_path / "labels.csv", *flags_of(3, 1), "--folds-from", run)


def test_folds_from_a_run_that_knows_some_of_the_images_tell_how_many(tree, tmp_path):
    run, _ = trained_on(tree, tmp_path)
    (tree / "train" / "b").rename(tree / "train" / "c")
    (line,) = (line for line in read_folder(tree, *flags_of(3, 1), "--folds-from", run).warnings if "folds" in line)
    assert line == (
        f"--folds-from {run}: its folds have 15 of the 30 training images, by their names; the other 15 are new to it "
        "and are put into folds now"
    )


def test_a_moved_tree_is_known_by_its_images_and_another_one_is_evaluated_whole(tree, tmp_path):
    _, point = trained_on(tree, tmp_path)
    moved = shutil.move(tree, tmp_path / "moved")
    own, other = (
        evaluated(folder, *flags_of(3, 1), trained=point, division_is_explicit=False)
        for folder in (moved, moved / "val")
    )
    assert len(own.validation) == 10 and own.seen == ""
    assert len(other.validation) == 6


def test_of_shards_each_training_image_is_held_out_once_with_its_bytes(tree, tmp_path):
    line = ["--dataname", "folder", "--datapath", str(tree), "--output", str(tmp_path / "shards"), "--workers", "0"]
    assert pack.main([*line, "--shard-samples", "7"]) == 0
    flags = ["--dataname", "shards", "--datapath", str(tmp_path / "shards")]
    whole = read(*flags)
    parts = [read(*flags, *flags_of(3, fold)) for fold in range(3)]
    held = [path for part in parts for path in part.validation.paths]
    assert sorted(held) == sorted(whole.train.paths) and len(held) == 30
    content = {path: (path.content(), label) for path, label in zip(whole.train.paths, whole.train.labels, strict=True)}
    for part in parts:
        assert {*part.train.paths} == {*held} - {*part.validation.paths}
        for path, label in zip(part.validation.paths, part.validation.labels, strict=True):
            assert content[path] == (path.content(), label)
    assert len({part.fingerprint for part in [whole, *parts]}) == 4


def test_a_tables_groups_stay_together_and_its_rows_of_val_and_test_are_left_alone(tree, tmp_path):
    rows = ["path,label,patient,split"]
    for path in sorted(tree.rglob("*.png")):
        number = int(path.stem)
        split = "val" if number < 6 else "test" if number < 9 else "train"
        rows.append(f"{path.relative_to(tree)},{path.parent.name},p{number // 3},{split}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    flags = ["--labels", str(tmp_path / "labels.csv")]
    parts = in_three(tree, *flags)
    assert sorted(int(path[:-4].rsplit("/")[-1]) for part in parts for path in part.validation.paths) == [*range(9, 36)]
    assert all(not set(part.train.groups) & set(part.validation.groups) for part in parts)
    assert all(len(part.validation) + len(part.train) == 27 for part in parts)
    assert not any("--group-column" in line for part in parts for line in part.warnings)
    divided = read_folder(tree, *flags)
    assert not any("--group-column" in line for line in divided.warnings), "its own split keeps groups whole"
    (tmp_path / "labels.csv").write_text("\n".join(row.replace(",p3,", ",p0,") for row in rows) + "\n")
    (line,) = [line for line in read_folder(tree, *flags).warnings if "--group-column" in line]
    assert line.startswith(
        "--group-column: 1 group with images in training and in validation, 50.0 % of the validation"
    )
    words = read_folder(tree, *flags, *flags_of(3, 0)).describe(parse(["--folds", "3", "--fold", "0"]).data, 9)["Data"]
    assert "(fold 0 of --folds 3: " in words and "of all in whole groups" in words


def test_of_several_labels_an_image_groups_stay_together_too(tree, tmp_path):
    rows = ["path,label,patient"]
    for path in sorted(tree.rglob("*.png")):
        number = int(path.stem)
        rows.append(f"{path.relative_to(tree)},{('a', 'b', 'a;b')[number % 3]},p{number // 2}")
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    flags = ["--labels", str(tmp_path / "labels.csv"), "--label-separator", ";"]
    parts = in_three(tree, *flags)
    assert sorted(path for part in parts for path in part.validation.paths) == sorted(map(str, tree.rglob("*.png")))
    for part in (*parts, read_folder(tree, *flags, "--val-split", "0.3")):
        assert part.multilabel and not set(part.train.groups) & set(part.validation.groups)
        assert (part.validation.labels.sum(0) > 0).all() and (part.train.labels.sum(0) > 0).all()
