"""Shards hold the images that were packed: the same bytes each time, and what Pillow makes of odd ones."""

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import tarfile
import tracemalloc
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images

from scripts import pack
from scripts.packing import plan
from scripts.packing.checking import faults_of
from scripts.packing.encoding import Encoding
from scripts.packing.plan import Plan
from tests.helpers import class_files, exif_that_turns, mistakes_of
from tests.utils.data.deep_files import png
from tests.utils.data.loading import make
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.datasets import get_data, get_test_data
from utils.data.formats.readers import ImageFiles
from utils.data.formats.shards.index import BLOCK, Shard, Split, record_type
from utils.data.images.decoding import UnreadableImage, open_image
from utils.data.images.gpu_decoding import decode_batch, read_for_gpu
from utils.data.images.stored import Stored
from utils.data.images.view import View
from utils.data.progress_log import ProgressLog

CPU = torch.device("cpu")
ODD = ("plain.jpg", "grey.jpg", "cmyk.jpg", "rotated.jpg", "palette.png", "sixteen.png", "grey.png")


def save_odd(folder, seed):
    """A photograph in each of the kinds ``ODD``, 48 by 36 pixels."""
    folder.mkdir(parents=True)
    photograph = Image.fromarray(load_sample_images().images[seed % 2]).resize((48, 36))
    photograph = ImageOps.mirror(photograph) if seed > 1 else photograph
    photograph.save(folder / "plain.jpg", quality=95)
    photograph.convert("L").save(folder / "grey.jpg")
    photograph.convert("CMYK").save(folder / "cmyk.jpg")
    photograph.save(folder / "rotated.jpg", exif=exif_that_turns())
    photograph.quantize(16).save(folder / "palette.png")
    Image.fromarray(np.asarray(photograph.convert("L")).astype(np.uint16) * 257).save(folder / "sixteen.png")
    photograph.convert("L").save(folder / "grey.png")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for number, place in enumerate(("train/ape", "train/bee", "val/ape", "val/bee")):
        save_odd(root / place, number)
    return root


def packed(tree, output, *flags, samples=3, workers=0):
    flags = ("--shard-samples", samples, "--workers", workers, *flags)
    line = ("--dataname", "folder", "--datapath", tree, "--output", output, *flags)
    assert pack.main(list(map(str, line))) == 0
    return output


@pytest.fixture(scope="module")
def shards(tree, tmp_path_factory):
    return packed(tree, tmp_path_factory.mktemp("shards"))


def read(name, root, *flags):
    return get_data(parse(["--dataname", name, "--datapath", str(root), *flags]).data, CPU)


def bytes_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_every_image_keeps_its_number_its_label_and_its_bytes(tree, shards):
    files = read("folder", tree)
    members = read("shards", shards)
    assert members.classes == files.classes
    for split in ("train", "validation"):
        there = getattr(files, split)
        here = getattr(members, split)
        assert torch.equal(there.labels, here.labels)
        assert [Path(path).read_bytes() for path in there.paths] == [path.content() for path in here.paths]
    assert len(set(members.train.paths.shards)) == 5  # 14 images, at most 3 each
    assert list(members.train.paths.shards) != sorted(members.train.paths.shards)


@pytest.mark.parametrize("flags", [(), ("--skip-bad-images",)])
def test_training_and_validation_see_what_they_see_of_the_folders(tree, shards, flags):
    seen = []
    for name, root in (("folder", tree), ("shards", shards)):
        line = ("--dataname", name, "--datapath", root, "--image-size", "16", "-b", "4", "-w", "0", "--arch", "fc")
        train, validation, *_ = make(*line, *flags)
        seen.append([*train.batches(1), *validation.batches()])
    for first, second in zip(*seen, strict=True):
        assert torch.equal(first.images, second.images) and torch.equal(first.targets, second.targets)


def cut_after_three_shards(tree, output, monkeypatch):
    """A packing that is killed; its finished shards with a second link to each, and with their first images."""
    keep = Plan.keep
    kept = {}

    def killed(self, split, number, part):
        if len(kept) == 3:
            (self.folder / "train-000004.0a1b.partial").write_bytes(b"half of it")
            raise KeyboardInterrupt
        keep(self, split, number, part)
        path = self.folder / part.shard.file
        link = self.folder.with_name(f"{self.folder.name}-{path.name}")  # its inode cannot become another file's
        link.hardlink_to(path)
        kept[path] = (link, part.numbers[0])

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Plan, "keep", killed)
        packed(tree, output)
    return kept


def made_again(kept):
    return [path for path, (link, _) in kept.items() if not path.samefile(link)]


def test_the_bytes_are_the_same_on_every_run_with_any_workers_and_after_a_kill(tree, shards, tmp_path, monkeypatch):
    assert bytes_in(packed(tree, tmp_path / "two", workers=2)) == bytes_in(shards)
    kept = cut_after_three_shards(tree, tmp_path / "cut", monkeypatch)
    with pytest.raises(UserError, match="packing was cut or goes on; repeat"):
        read("shards", tmp_path / "cut")
    with pytest.raises(UserError, match="part of another packing"):
        packed(tree, tmp_path / "cut", "--resize", 16)
    _, short, spoilt = kept  # one was cut later, and one spoilt
    short.write_bytes(short.read_bytes()[:-1])
    good = spoilt.read_bytes()
    spoilt.write_bytes(good[:700] + bytes([good[700] ^ 1]) + good[701:])
    first, *_, last = mistakes_of(packed, tree, tmp_path / "cut")
    assert first.startswith(f"{spoilt}: its bytes are not those") and "repeat the command" in last
    assert not (tmp_path / "cut" / "shards.json").exists() and made_again(kept) == [short]
    assert bytes_in(packed(tree, tmp_path / "cut")) == bytes_in(shards) and made_again(kept) == [short, spoilt]
    assert packed(tree, tmp_path / "cut")  # finished: nothing to do


def test_threads_read_the_parts_one_at_a_time(tree, tmp_path, monkeypatch):
    """On Python 3.11, the parser that np.load uses for headers sometimes fails in several threads."""
    cut_after_three_shards(tree, tmp_path / "cut", monkeypatch)
    load, held = np.load, []

    def noting(file, **options):
        if getattr(file, "parent", tmp_path).name == plan.PARTS:
            held.append(plan.ONE_AT_A_TIME.locked())
        return load(file, **options)

    monkeypatch.setattr(plan.np, "load", noting)
    packed(tree, tmp_path / "cut")
    assert len(held) >= 3 and all(held)


def test_an_image_that_is_repaired_under_its_name_is_packed_again_by_a_packing_that_goes_on(
    tree, tmp_path, monkeypatch
):
    root = tmp_path / "tree"
    output = tmp_path / "out"
    shutil.copytree(tree, root)
    kept = cut_after_three_shards(root, output, monkeypatch)
    of_repaired = output / "train-000001.tar"
    Image.new("RGB", (48, 36)).save(read("folder", root).train.paths[kept[of_repaired][1]])
    assert bytes_in(packed(root, output)) == bytes_in(packed(root, tmp_path / "anew"))
    assert made_again(kept) == [of_repaired]


def test_verifying_takes_no_memory_that_grows_with_a_shard(tmp_path):
    with open(tmp_path / "train.tar", "wb") as file:
        file.truncate(2**24)
    digest = hashlib.sha256(bytes(2**24)).hexdigest()
    records = np.zeros(2, dtype=record_type(9))
    records["offset"] = (2**23, BLOCK)
    records["size"] = 1000
    records["head"] = zlib.crc32(bytes(BLOCK))
    records["crc"] = zlib.crc32(bytes(1000))
    records["name"] = b"\xe9.jpg"
    shard = Shard("train.tar", 2**24, 2, digest)
    tracemalloc.start()
    try:
        found = faults_of(tmp_path, {"train": Split((shard,), records, checked=True)}, 0, ProgressLog())
        assert found == [] and tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    records["size"][0] = 2**23 + 1  # beyond the end
    (fault,) = faults_of(tmp_path, {"train": Split((shard,), records, checked=True)}, 0, ProgressLog())
    assert fault.endswith("train.tar/\udce9.jpg: is damaged or lies elsewhere")


def expected(path):
    """An image file as Pillow shows it, the shorter side 24 pixels."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    return image.convert("RGB").resize((24, 32) if image.height > image.width else (32, 24), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("kind", ["png", "raw", "jpeg"])
def test_odd_images_are_made_anew_as_pillow_shows_them(tree, tmp_path, kind):
    output = packed(tree, tmp_path, "--format", kind, "--resize", 24)
    files = read("folder", tree).train.paths
    members = read("shards", output).train.paths
    for path, member in zip(files, members, strict=True):
        image = open_image(member, "RGB")
        right = expected(path)
        difference = np.asarray(image).astype(int) - np.asarray(right)
        if kind != "jpeg":
            assert not difference.any(), path
        assert image.size == right.size and np.abs(difference).mean() < 8, path


def test_small_plain_images_keep_their_bytes_and_others_are_made_anew_in_the_chosen_quality(tree, tmp_path):
    output = packed(tree, tmp_path, "--resize", 48, "--quality", 60)  # jpeg: nothing is as large
    files = read("folder", tree).train.paths
    kept = [path.endswith("plain.jpg") for path in files]
    contents = [member.content() for member in read("shards", output).train.paths]
    assert [Path(path).read_bytes() == content for path, content in zip(files, contents, strict=True)] == kept
    expected(files[-1]).save(tmp_path / "coarse.jpg", quality=60)
    coarse = Image.open(tmp_path / "coarse.jpg").quantization[0]
    assert [Image.open(io.BytesIO(content)).quantization[0] != coarse for content in contents] == kept


@pytest.mark.parametrize("flags", [("--format", "raw", "--levels", "all"), ("--resize", "24", "--in-channels", "4")])
def test_channels_and_bits_that_images_made_anew_cannot_hold_are_refused(tree, tmp_path, flags):
    with pytest.raises(UserError, match="holds grey or RGB of 8 bits.*use --format keep, without --resize"):
        packed(tree, tmp_path / "shards", *flags)
    assert not (tmp_path / "shards").exists()
    packed(tree, tmp_path / "kept", *flags[2:])


@pytest.mark.parametrize("flags", [(), ("--format", "png"), ("--resize-validation",)])
def test_validation_files_keep_their_bytes_beside_training_images_that_are_made_smaller(tree, tmp_path, flags):
    output = packed(tree, tmp_path, "--resize", 24, *flags)
    files = read("folder", tree)
    members = read("shards", output)
    assert all(min(open_image(path, "RGB").size) <= 24 for path in members.train.paths)
    pairs = list(zip(files.validation.paths, members.validation.paths, strict=True))
    kept = [Path(path).read_bytes() == member.content() for path, member in pairs]
    assert pairs and not any(kept) if flags == ("--resize-validation",) else all(kept)


def test_images_in_memory_of_both_splits_are_made_smaller():
    """Such images have one size, which augmentation relies on."""
    line = ["--dataname", "cifar10", "--datapath", ".", "--resize", "16"]
    encodings = pack.encodings_of(*pack.build_parser().split(line))
    assert encodings["val"] == encodings["train"] and encodings["val"].resize == 16


def test_files_in_shards_are_handed_to_another_device_for_decoding_like_others(tree, shards):
    seen = []
    for name, root in (("folder", tree), ("shards", shards)):
        paths = read(name, root).train.paths
        batch = read_for_gpu(paths, View(16), "RGB", [None] * len(paths))
        seen.append(decode_batch(pickle.loads(pickle.dumps(batch)), CPU))
    assert torch.equal(*seen)
    member = read("shards", shards).train.paths[3]
    assert pickle.loads(pickle.dumps(member)).content() == member.content()


def test_images_in_memory_are_packed_as_their_pixels(tmp_path):
    assert pack.main(["--output", str(tmp_path), "--workers", "0"]) == 0  # the digits
    digits = read("digits", tmp_path)
    members = read("shards", tmp_path)
    assert members.classes == digits.classes and torch.equal(members.validation.labels, digits.validation.labels)
    for number in (0, 17, 359):
        image = np.asarray(open_image(members.validation.paths[number], "L"))
        assert np.array_equal(image, digits.validation.pixels[number, 0].numpy())


def test_flags_that_choose_or_change_no_image_of_the_shards_are_told(tmp_path, capsys):
    line = ["--train-samples", "10", "--max-val-batches", "1", "--image-size", "4", "--seed", "1", "--workers", "0"]
    assert pack.main([*line, "--output", str(tmp_path / "shards")]) == 0
    said = capsys.readouterr()
    assert "1,797 images" in said.out
    warnings = [line for line in said.err.splitlines() if line.startswith("warning: ")]
    end = "does nothing in pack.py, which packs all images, in the size that they have"
    assert warnings == [
        f"warning: {flag} {end}" for flag in ("--image-size 4", "--train-samples 10", "--max-val-batches 1")
    ]
    assert pack.main(["--verify", str(tmp_path / "shards"), "--dataname", "digits", "--workers", "0"]) == 0
    assert "--dataname digits does nothing with --verify, which reads the shards alone" in capsys.readouterr().err


def test_the_tar_files_are_what_webdataset_reads(tree, shards):
    """The same members a sample, neighbours in the file, named KEY.ENDING, the class as a number in KEY.cls."""
    files = read("folder", tree).train
    samples = {}
    for path in sorted(shards.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            names = tar.getnames()
            for key in {name.partition(".")[0] for name in names}:
                mine = [name for name in names if name.startswith(f"{key}.")]
                assert [name.partition(".")[2] for name in mine][1:] == ["cls", "json"]
                assert names[names.index(mine[0]) :][:3] == mine
                samples[int(key)] = [tar.extractfile(name).read() for name in mine]
    assert sorted(samples) == list(range(14))
    for number, (content, label, about) in samples.items():
        assert content == Path(files.paths[number]).read_bytes() and int(label) == files.labels[number]
        assert json.loads(about)["name"] == "/".join(Path(files.paths[number]).parts[-2:])


def test_a_damaged_image_is_told_or_left_out(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "tree")
    bad = tmp_path / "tree/train/ape/plain.jpg"
    os.truncate(bad, 300)
    with pytest.raises(UserError, match=re.escape(str(bad))):
        packed(tmp_path / "tree", tmp_path / "out", "--resize", 24)
    output = packed(tmp_path / "tree", tmp_path / "kept", "--skip-bad-images")
    assert len(read("shards", output).train) == 13
    assert (output / "left_out.txt").read_text().startswith(f"{bad}\t")


def test_disk_space_is_asked_for_before_the_work(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="the shards need about .* GB more, 0.00 GB are free"):
        packed(tree, tmp_path / "full")
    assert not list((tmp_path / "full").glob("*.tar"))


def test_the_folder_of_the_images_is_no_place_for_shards(tree):
    with pytest.raises(UserError, match="is the folder of the images"):
        packed(tree, tree)


def test_a_folder_that_images_are_listed_in_is_no_place_for_shards(tree, tmp_path):
    flat = shutil.copytree(tree / "train", tmp_path / "flat")
    for data, output, *flags in ((flat, flat / "shards", "--val-split", "0.2"), (tree, tree / "val/shards")):
        with pytest.raises(UserError, match="lies in .*, where images are read from"):
            packed(data, output, *flags)
        assert not output.exists()
    shutil.copytree(tree / "train", tmp_path / "alone/train")
    for root, *flags in ((tree,), (tmp_path / "alone", "--val-split", "0.2")):
        beside = parse(["--dataname", "folder", "--datapath", str(root), *flags]).data
        pack.refuse_place(str(root / "shards"), beside)


def test_images_to_test_on_are_said_to_stay_behind(tree, tmp_path, capsys):
    said = "those of test are not packed"
    root = shutil.copytree(tree, tmp_path / "tree")
    packed(root, tmp_path / "whole")
    assert said not in capsys.readouterr().err
    (root / "test").mkdir()
    packed(root, tmp_path / "empty")
    assert said not in capsys.readouterr().err
    (root / "test").rmdir()
    shutil.copytree(root / "val", root / "test")
    packed(root, tmp_path / "without")
    assert said in capsys.readouterr().err
    rows = [f"{place.relative_to(root)},{place.parent.name},{place.parts[-3]}" for place in root.rglob("*.*g")]
    (root / "labels.csv").write_text("\n".join(("path,label,split", *rows)))
    packed(root, tmp_path / "table", "--labels", root / "labels.csv")
    assert said in capsys.readouterr().err
    withheld = [
        row.replace(f",{place},test", ",?,test") for row in rows for place in ("ape", "bee") if f",{place}," in row
    ]
    (root / "labels.csv").write_text("\n".join(("path,label,split", *withheld)))
    packed(root, tmp_path / "withheld", "--labels", root / "labels.csv")
    assert said in capsys.readouterr().err, "rows of test whose labels nobody knows"
    shutil.rmtree(root / "val")
    packed(root, tmp_path / "chosen by")
    assert said not in capsys.readouterr().err, "training validates on them"
    (root / "train" / "ape").rename(root / "train" / "test")
    packed(root / "train", tmp_path / "a class", "--val-split", "0.3")
    assert said not in capsys.readouterr().err, "it is a class"


def test_class_folders_beside_shards_are_read_by_neither_name_but_their_own(tree, shards, tmp_path):
    both = shutil.copytree(shards, tmp_path / "both")
    shutil.copytree(tree / "val", both / "val")
    for name in ("folder", "imagenet"):
        with pytest.raises(UserError, match=r"holds shards and class folders below val/; use --dataname shards for"):
            read(name, both)
    settings = parse(["--dataname", "folder", "--datapath", str(both)]).data
    with pytest.raises(UserError, match="holds shards and class folders"):
        get_test_data(settings, CPU, None)
    assert len(read("shards", both).validation) == len(read("shards", shards).validation)


def test_tar_files_of_others_are_not_replaced(tree, tmp_path):
    (tmp_path / "train-000000.tar").write_bytes(b"of others")
    with pytest.raises(UserError, match="holds train-000000.tar, which this packing did not make"):
        packed(tree, tmp_path)
    assert bytes_in(tmp_path)["train-000000.tar"] == b"of others"


class Row(Stored):
    """An image that is no file, like one in a table."""

    def content(self):
        return self.bytes


@pytest.mark.parametrize("name", ["plain.jpg", "palette.png"])
def test_an_image_without_an_ending_of_its_own_gets_that_of_its_format(tree, name):
    row = Row("my.data/train[3]")
    row.bytes = (tree / "train/ape" / name).read_bytes()
    encoding = Encoding("keep", None, 90, "RGB")
    assert encoding.encode(ImageFiles([row], torch.zeros(1), "RGB"), 0) == (name[-3:], row.bytes)
    row.bytes = b"no image"
    with pytest.raises(UnreadableImage, match=r"my.data/train\[3\]"):
        encoding.encode(ImageFiles([row], torch.zeros(1), "RGB"), 0)


@pytest.mark.parametrize("place", ["utils.data.kept.claimed", "scripts.packing.plan.write_whole"])
def test_an_output_that_cannot_be_written_is_one_clear_line(tree, tmp_path, monkeypatch, place):
    monkeypatch.setattr(place, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(UserError, match=f"--output {tmp_path}: cannot be written .No space left on device"):
        packed(tree, tmp_path)


def test_shards_of_8_bits_keep_the_pixel_range_that_made_them(tmp_path):
    """Otherwise their network would be used on the files themselves with another one."""
    for path, *_, number in class_files(tmp_path / "files", {"train": 2, "val": 2}):
        path.write_bytes(png(np.random.default_rng(number).integers(0, 1024, (8, 8)).astype(np.uint16)))
    ranged = ("--pixel-range", "0", "1023")
    for kind in ("raw", "keep"):
        packed(tmp_path / "files", tmp_path / kind, "--format", kind, *ranged)
    files = read("folder", tmp_path / "files", *ranged).train
    for kind in ("raw", "keep"):
        shards = read("shards", tmp_path / kind, *ranged).train
        for path, member in zip(files.paths, shards.paths, strict=True):
            assert np.array_equal(open_image(member, shards.colour), open_image(path, files.colour))
    read("shards", tmp_path / "keep")  # the numbers are there
    for other in ([], ["--pixel-range", "0", "255"]):
        with pytest.raises(UserError, match="were packed with 0 1023; give --pixel-range 0 1023"):
            read("shards", tmp_path / "raw", *other)
