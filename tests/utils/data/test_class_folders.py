"""Class folders under the names that people give them: what is left out is told, and a wrong tree gets a hint."""

import re
from pathlib import Path

import pytest

from tests.helpers import mistakes_of
from tests.utils.data.loading import evaluated, read, read_folder, read_tree, save
from utils.checkpoint.resume import ResumePoint
from utils.config.settings import UserError
from utils.data.formats import class_folders


def plant(folder, count=4, ending="png"):
    for number in range(count):
        save(folder / f"{number}.{ending}", number)


def plant_splits(root, train="train", validation="val", names=("ants", "bees", "cats")):
    for name in names:
        plant(root / train / name)
        plant(root / validation / name, 2)


@pytest.fixture
def root(tmp_path):
    plant_splits(tmp_path / "data")
    return tmp_path / "data"


def test_a_tree_with_nothing_left_out_has_no_warnings(root, tmp_path):
    assert read_folder(root).warnings == ()
    (root / "train" / "ants" / "notes.txt").write_text("")
    (root / "train" / ".DS_Store").write_text("")
    (root / "train" / "ants" / ".hidden.gif").write_text("")
    assert read_folder(root).warnings == ()
    plant(tmp_path / "one" / "a")
    plant(tmp_path / "one" / "b")
    assert read_folder(tmp_path / "one", "--val-split", "0.25").warnings == ()


@pytest.mark.parametrize(
    "train, validation",
    [("train", "valid"), ("training", "validation"), ("Train", "VAL"), ("training", "test"), ("train", "Validation")],
)
def test_splits_are_found_under_all_their_usual_names(root, tmp_path, train, validation):
    plant_splits(tmp_path / "other", train, validation)
    assert read_folder(tmp_path / "other").fingerprint == read_folder(root).fingerprint


def test_validation_images_come_before_test_images_and_train_before_training_and_what_is_left_out_is_told(root):
    for name in ("test", "validation", "training", "Val"):
        plant(root / name / "ants", 1)
    data = read_folder(root)
    assert (len(data.train), len(data.validation)) == (12, 1)
    train, validation = (line for line in data.warnings if "left out" in line)
    assert f"{root / 'train'} is read, and training/ beside it left out" in train
    assert f"{root / 'Val'} is read, and val/, validation/ beside it left out" in validation


def test_a_second_training_folder_is_told_where_training_images_are_divided_unless_one_was_given(root):
    plant(root / "training" / "dogs")
    told = f"{root / 'train'} is read, and training/ beside it left out"
    assert told in read_folder(root, "--folds", "2", "--fold", "1").warnings[0]
    assert read_folder(root / "train", "--val-split", "0.25").warnings == ()


def test_a_folder_named_like_a_split_that_holds_no_images_in_folders_is_not_told(root):
    (root / "training" / "logs").mkdir(parents=True)
    plant(root / "validation")
    assert read_folder(root).warnings == ()


def test_test_images_that_are_validated_on_are_told_with_how_to_keep_them_for_the_end(tmp_path):
    root = tmp_path / "own"
    plant_splits(root, "train", "test")
    (line,) = read_folder(root).warnings
    assert "test/ chooses best.pt" in line
    apart = f"--datapath {root / 'train'}"
    assert f"{apart} --val-split 0.2" in line and f"RUN --datapath {root / 'test'}" in line
    with pytest.raises(UserError, match=f"remove the flag, or give {apart}$"):
        read_folder(root, "--val-split", "0.2")
    assert read_folder(root / "train", "--val-split", "0.2").warnings == ()
    plant(root / "val" / "ants")
    assert not any("best.pt" in line for line in read_folder(root).warnings)


def test_classes_without_a_validation_image_are_named(root):
    for path in (root / "val" / "bees").iterdir():
        path.unlink()
    (root / "val" / "cats" / "0.png").rename(root / "val" / "ants" / "9.png")
    (root / "val" / "cats" / "1.png").unlink()
    (root / "val" / "cats").rmdir()
    assert read_folder(root).warnings == (
        f"--datapath {root}: 2 of 3 classes have no validation image, and the results say nothing about them: bees, cats",
    )


def test_of_many_classes_the_first_ten_are_named_in_characters_that_can_be_printed(root):
    for number in range(12):
        plant(root / "train" / f"d{number:02}\x1b[31m", 1)
    (line,) = read_folder(root).warnings
    assert "12 of 15 classes have" in line and "\x1b" not in line
    assert line.endswith(", ".join(f"d{number:02}?[31m" for number in range(10)) + " and 2 more")


def test_images_of_formats_that_are_not_read_are_counted(root):
    plant(root / "train" / "ants" / "deeper", 3, "gif")
    plant(root / "val" / "bees", 1, "GIF")
    for name in ("phone.HEIC", "scan", "scan.pnm", "array.npz"):
        (root / "val" / "cats" / name).write_bytes(b"")
    assert read_folder(root).warnings == (
        f"--datapath: files below {root / 'train'} and {root / 'val'} are left out: 4 .gif, 1 .heic, 1 .npz, 1 .pnm, 1 "
        "without an ending; convert them to .jpg or .png files",
    )


def test_links_to_folders_inside_the_classes_are_counted_and_not_followed(root, tmp_path):
    plant(tmp_path / "elsewhere")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert read_folder(root).warnings == ()
    (root / "train" / "dogs").symlink_to(tmp_path / "elsewhere")  # a class folder may be one
    (root / "train" / "ants" / "more").symlink_to(tmp_path / "elsewhere")
    (root / "val" / "bees" / "loop.png").symlink_to(root)
    (root / "val" / "bees" / "link.png").symlink_to(tmp_path / "elsewhere" / "0.png")
    data = read_folder(root)
    assert len(data.train) == 16 and len(data.validation) == 7
    (told,) = (line for line in data.warnings if "not followed" in line)
    assert told.startswith("--datapath: 2 link(s) to folders inside the classes below ")


def test_images_beside_the_class_folders_are_counted(root):
    plant(root / "train", 2)
    assert read_folder(root).warnings == (
        f"--datapath: {root / 'train'} holds 2 images beside its class folders, which are left out; move each into the "
        "folder of its class",
    )


def test_classes_that_hold_only_folders_are_told(tmp_path):
    for name in ("ants", "bees"):
        plant(tmp_path / "set_a" / name)
        plant(tmp_path / "set_b" / name)
    (line,) = read_folder(tmp_path, "--val-split", "0.25").warnings
    assert re.search(r"no class folder in .* holds images itself.*the classes are set_a, set_b", line)


def classes(root):
    plant(root / "ants")
    plant(root / "bees")


def unpacked_on_a_mac(root):
    plant_splits(root / "my_data")
    (root / "__MACOSX").mkdir()


def of_one_class(root):
    plant(root / "train" / "ants")
    plant(root / "val" / "ants")


def half(root):
    plant_splits(root)
    (root / "train").rename(root / "images")


def one_split(root):
    plant_splits(root)
    return root / "train"


@pytest.mark.parametrize(
    "make, hint",
    [
        (unpacked_on_a_mac, "it holds my_data/train, my_data/val: use --datapath {root}/my_data"),
        (classes, "it holds ants/, bees/: add --val-split 0.2"),
        (
            lambda root: classes(root / "my_data"),
            "it holds my_data/ants/, my_data/bees/: use --datapath {root}/my_data --val-split 0.2",
        ),
        (one_split, "it is one of two splits: use --datapath {root}"),
        (of_one_class, "holds one class, ants; a classifier needs two or more"),
        (half, r"it holds val/ and no train/: add it \(only --evaluate needs none\)"),
        (lambda root: (root / "cifar-10-batches-py").mkdir(), "it holds cifar-10-batches-py/: use --dataname cifar10"),
        (plant, "it holds 0.png, 1.png, 2.png, ...: put each class's images into a folder of the class's name"),
        (lambda root: (root / "my_data.tar.gz").touch(), "it holds my_data.tar.gz: unpack it first"),
    ],
)
def test_a_wrong_tree_gets_a_hint_from_what_lies_there(tmp_path, make, hint):
    root = tmp_path / "there"
    root.mkdir()
    (line,) = mistakes_of(read_folder, make(root) or root)
    assert re.search(hint.format(root=root) + "$", line)


@pytest.mark.parametrize(
    "make, hint",
    [
        (lambda root: plant_splits(root / "my_data"), "holds one class, my_data; .* use --datapath {root}/my_data"),
        (
            lambda root: classes(root / "my_data"),
            "holds one class, my_data; .* use --datapath {root}/my_data --val-split 0.2",
        ),
        (plant, "it holds 0.png.*into a folder of the class's name"),
        (
            lambda root: [plant(root / name) for name in ("train", "bus")],
            "holds train/ with images, where the class folders of the training images belong; if train is a class, "
            "rename it",
        ),
    ],
)
def test_a_tree_that_cannot_be_split_gets_a_hint_too(tmp_path, make, hint):
    make(tmp_path)
    with pytest.raises(UserError, match=hint.format(root=tmp_path) + "$"):
        read_folder(tmp_path, "--val-split", "0.25")


def test_the_hint_for_a_named_set_keeps_to_what_that_set_takes(tmp_path):
    classes(tmp_path)
    with pytest.raises(UserError, match="it holds ants/, bees/: put such folders into train/ and val/"):
        read("--dataname", "mnist", "--datapath", tmp_path)


def test_archives_of_imagenet_that_a_dry_run_leaves_packed_are_said(tmp_path):
    (tmp_path / "ILSVRC2012_img_val.tar").write_bytes(b"")
    with pytest.raises(UserError, match="a run without --dry-run makes them from the archives"):
        read("--dataname", "imagenet", "--datapath", tmp_path)


def test_of_a_test_folder_only_its_own_folders_are_read_whatever_the_checkpoint_calls_its_classes(root, tmp_path):
    plant(tmp_path / "outside")
    classes = ("../../outside", "bees", str(tmp_path / "outside"), "ants", "cats")
    images = class_folders.read_test_folder(root / "val", classes, "x.pt").validation
    assert [path.split("/")[-2] for path in images.paths] == ["bees"] * 2 + ["ants"] * 2 + ["cats"] * 2
    assert images.labels.tolist() == [1, 1, 3, 3, 4, 4]


def test_a_folder_of_a_test_set_that_is_left_out_is_told_with_the_class_whose_name_looks_alike(root):
    (line,) = class_folders.read_test_folder(
        root / "val", ("Ants", "bees", "cats"), "x.pt", leave_out_unknown=True
    ).warnings
    assert line.endswith("folders that are no classes of x.pt are left out: ants; perhaps ants for Ants")
    with pytest.raises(UserError, match="those are Ants, bees, cats; perhaps ants for Ants"):
        class_folders.read_test_folder(root / "val", ("Ants", "bees", "cats"), "x.pt")


def test_a_class_named_like_a_split_is_a_class_where_other_classes_lie_beside_it(tmp_path):
    trained = ResumePoint(tmp_path / "last.pt", {"classes": ["ants", "test", "train"]}, digest="")

    def folders_of(root):
        data = evaluated(root, trained=trained, leave_out_unknown=True)
        assert data.classes == trained.classes
        return [str(Path(path).relative_to(root).parent) for path in data.validation.paths]

    for name in ("train", "ants"):
        plant(tmp_path / "tree" / name, 1)
    assert folders_of(tmp_path / "tree") == ["ants", "train"]
    for split in ("train", "test"):
        for name in ("train", "ants"):
            plant(tmp_path / "splits" / split / name, 1)
    assert folders_of(tmp_path / "splits") == ["test/ants", "test/train"]


@pytest.mark.parametrize("name", ["valid", "test"])
def test_images_held_out_of_a_tree_with_a_class_named_like_a_split_are_evaluated_alone(tmp_path, name):
    for folder in (name, f"in{name}"):
        plant(tmp_path / folder, 20)
    data, point = read_tree(tmp_path, "--val-split", "0.2")
    (warning,) = data.warnings
    assert f"{name} in {tmp_path} is taken for a class and trained on; if it is not one, move it out" in warning
    shown = evaluated(tmp_path, "--val-split", "0.2", trained=point, division_is_explicit=False)
    assert [*shown.validation.paths] == [*data.validation.paths] and shown.seen == ""
    assert len(data.train) + len(data.validation) == 40 > len(data.validation)


@pytest.mark.parametrize("split", ["test", "val", "Validation"])
def test_test_images_beside_the_class_folders_are_not_trained_on_as_a_class(split, tmp_path):
    for folder in ("ants", "bees", f"{split}/bees"):
        plant(tmp_path / folder)
    with pytest.raises(UserError, match=f"holds {split}/bees/ beside bees/, so {split} would be a class; move "):
        read_folder(tmp_path, "--val-split", "0.25")
    (tmp_path / split / "bees").rename(tmp_path / split / "hives")
    assert split in read_folder(tmp_path, "--val-split", "0.25").classes
