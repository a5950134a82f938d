"""A shard that was cut, replaced or spoilt never gives a wrong image; a slow place for shards only takes longer."""

import errno
import io
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import main
from scripts import pack
from tests.helpers import class_files, wait_for
from tests.utils.data.loading import make
from utils.config.arguments import parse
from utils.config.settings import UserError
from utils.data.datasets import get_data
from utils.data.formats.shards import members, read_ahead
from utils.data.images import unreadable
from utils.data.images.decoding import UnreadableImage, open_image
from utils.data.loaders import loaders
from utils.data.progress_log import ProgressLog
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")
EACH = 12
CLASSES = "abc"
PER_SHARD = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """36 training images, each of another grey, in 9 shards of equal size, and 12 to validate on."""
    root = tmp_path_factory.mktemp("data")
    counts = {"train": EACH, "val": 4}
    for path, split, label, number in class_files(root, counts, CLASSES, "bmp", digits=2):  # BMP: all of one size
        Image.new("RGB", (8, 8), (5 * (label * counts[split] + number),) * 3).save(path)
    flags = ("--dataname", "folder", "--datapath", str(root), "--output", str(root / "shards"), "--workers", "0")
    assert pack.main([*flags, "--shard-samples", str(PER_SHARD)]) == 0
    return root / "shards"


@pytest.fixture
def shards(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "shards"))


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """A process keeps shards open."""
    members.open_shard.cache_clear()


def flags_of(root, *more):
    return ("--dataname", "shards", "--datapath", str(root), "--image-size", "8", "--arch", "fc", "-b", "6", *more)


def read(root, *more):
    return get_data(parse([*flags_of(root), *more]).data, CPU)


def value(path):
    return int(np.asarray(open_image(path, "RGB"))[0, 0, 0]) // 5


def place_of(image):
    """The shard that holds an image, and the byte at which it begins there."""
    record = image.source.split.records[image.number]
    return image.source.files[record["shard"]], int(record["offset"])


def spoil(path, place, data):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(data)


def test_a_shard_that_was_cut_or_lost_is_named_before_training_and_by_verify(shards, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shard = shards / "train-000003.tar"
    os.truncate(shard, 3000)
    assert main.main([*flags_of(shards), "--device", "cpu", "--no-progress"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"main.py: {shard}: was cut off: it has 3,000 bytes, the index says ")
    assert "pack anew" in line
    assert not (tmp_path / "runs").exists()
    os.unlink(shard)
    for refused in (lambda: read(shards), lambda: pack.main(["--verify", str(shards), "-w", "0"])):
        with pytest.raises(UserError, match="train-000003.tar: cannot be read"):
            refused()


@pytest.mark.parametrize("change", ["of another packing", "cut", "of other shards"])
def test_an_index_that_does_not_belong_to_the_shards_is_refused(shards, change):
    index = shards / "train.index.npy"
    if change == "of another packing":
        shutil.copy(shards / "val.index.npy", index)
    elif change == "cut":
        os.truncate(index, index.stat().st_size - 8)
    else:  # the shards were packed anew and the copies of shards.json and index are old ones
        with open(shards / "train-000000.tar", "ab") as file:
            file.write(bytes(10240))
    with pytest.raises(UserError, match="is not the index that|was replaced: it has"):
        read(shards)


def test_a_shard_replaced_by_another_of_the_same_size_gives_no_wrong_image(shards):
    first = shards / "train-000001.tar"
    second = shards / "train-000002.tar"
    assert first.stat().st_size == second.stat().st_size
    shutil.copy(second, first)
    images = read(shards).train
    replaced = [path for path in images.paths if place_of(path)[0] == str(first)]
    assert len(replaced) == PER_SHARD
    for path in replaced:
        with pytest.raises(UserError, match="does not lie where the index says") as caught:
            open_image(path, "RGB")
        assert not isinstance(caught.value, UnreadableImage)  # --skip-bad-images must not pass over it
    with pytest.raises(UserError, match=r"SHA-256"):
        pack.main(["--verify", str(shards), "--workers", "0"])


def test_one_flipped_bit_is_a_bad_image_which_can_be_skipped(shards):
    images = read(shards).train
    bad = images.paths[7]
    shard, offset = place_of(bad)
    spoil(shard, offset + 100, b"\x01")
    with pytest.raises(UnreadableImage, match=r"000000007.bmp.*CRC-32"):
        open_image(bad, "RGB")
    batches = batches_of(shards, "--skip-bad-images")
    shown = [bad for batch in batches for bad in batch.unreadable]
    assert shown == [str(bad)] and sum(batch.replaced for batch in batches) == 1
    with pytest.raises(UnreadableImage):
        batches_of(shards)


def batches_of(root, *more):
    return list(make(*flags_of(root), "--augment", "none", "-w", "0", *more)[0].batches(0))


def test_a_disk_that_reports_an_error_is_a_clear_line_and_one_bad_place_can_be_skipped(shards, monkeypatch):
    pread = os.pread
    bad = read(shards).train.paths[5]
    shard, place = place_of(bad)

    def failing(file, count, offset):
        if offset == place - 512 and os.path.samestat(os.fstat(file), os.stat(shard)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(file, count, offset)

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(UnreadableImage, match=f"{bad}: cannot be read as an image .*Input/output error"):
        batches_of(shards)
    assert sum(batch.replaced for batch in batches_of(shards, "--skip-bad-images")) == 1
    monkeypatch.setattr(unreadable, "MOST_IN_A_ROW", 10)
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(UserError, match="and the 9 images after it cannot be read .*check the disk"):
        batches_of(shards, "--skip-bad-images")


# ------------------------------------------------------------------------------------------ reading ahead


class SlowStore:
    """Each reading of a piece of a shard at its own place takes ``seconds``; counts them."""

    def __init__(self, monkeypatch, root, seconds):
        self.pieces = 0
        self.opened = []
        self.root = str(root)

        def slow(path, *args, **kwargs):
            if str(path).startswith(self.root):
                time.sleep(seconds)
                self.pieces += 1
            return open(path, *args, **kwargs)

        monkeypatch.setattr(read_ahead, "open", slow, raising=False)

        def noted(path):
            time.sleep(seconds)
            self.opened.append(path)
            return open_shard(path)

        open_shard = members.open_shard
        monkeypatch.setattr(members, "open_shard", noted)


def test_from_a_slow_store_training_sees_the_same_images_and_the_copies_stay_within_their_bound(
    shards, tmp_path, monkeypatch
):
    expected = batches_of(shards, "--shard-window", "2")
    store = SlowStore(monkeypatch, shards, 0.02)
    cache = tmp_path / "cache"
    size = (shards / "train-000000.tar").stat().st_size
    most = [0]
    make = read_ahead.ReadAhead._make

    def watched(self, number, path):
        make(self, number, path)
        most[0] = max(most[0], sum(path.stat().st_size for path in cache.iterdir()))

    monkeypatch.setattr(read_ahead.ReadAhead, "_make", watched)

    def smaller(paths, folder, limit, **more):
        assert limit == 500_000_000
        return read_ahead.ReadAhead(paths, folder, int(3.5 * size), **more)

    monkeypatch.setattr("utils.data.loaders.ReadAhead", smaller)
    flags = ("--augment", "none", "-w", "0", "--shard-window", "2", "--shard-cache", cache, "--shard-cache-gb", "0.5")
    args = parse([*map(str, flags_of(shards, *flags))])
    with Distributed(RankInfo(), args.run) as distributed:
        data = get_data(args.data, CPU)
        train, _, _ = loaders(data, args, distributed, channels_last=False, progress=ProgressLog(print))
        seen = []
        for batch in train.batches(0):
            seen.append(batch)
            time.sleep(0.2)  # of training
    assert [batch.indices.tolist() for batch in seen] == [batch.indices.tolist() for batch in expected]
    assert all(torch.equal(first.images, second.images) for first, second in zip(seen, expected, strict=True))
    assert store.pieces == 9  # each shard once, from end to end
    assert len(store.opened) < 18  # most images came from copies
    assert 2 * size <= most[0] <= 3.5 * size
    assert not [thread for thread in threading.enumerate() if thread.name == "shards read ahead"]


def test_copies_outlast_a_few_batches_and_give_way_only_where_there_is_no_room(shards, tmp_path):
    images = read(shards).train
    cache = tmp_path / "cache"
    size = max(shard.bytes for shard in images.paths.split.shards)

    def after(limit, samples, expected):
        ahead = read_ahead.ReadAhead(images.paths, cache, limit, is_first=True, log=print)
        with ahead.of([np.array(samples)]):
            wait_for(lambda: {path.name for path in cache.iterdir()} == expected, 20)
        return {path.name for path in cache.iterdir()}

    names = [Path(members.copy_of(path, str(cache))).name for path in images.paths.files]
    assert after(10**9, range(36), set(names)) == set(names)
    (cache / f"{'0a' * 16}{members.COPY}").write_bytes(b"of another data set")
    assert after(10**9, range(4), set(names)) == set(names)  # as batch-norm statistics are computed
    own = f"own{members.COPY}"
    (cache / own).write_bytes(b"no copy of ours")
    for sample in (0, 35):
        needed = {names[images.paths.shards[sample]], own}
        assert after(size, [sample], needed) == needed


def test_a_copy_that_differs_is_not_used_and_a_full_folder_only_makes_it_slower(shards, tmp_path):
    lines = []
    images = read(shards).train
    shard, offset = place_of(images.paths[7])
    spoil(shard, offset + 100, b"\x01")
    ahead = read_ahead.ReadAhead(images.paths, tmp_path / "cache", 10**9, is_first=True, log=lines.append)
    with ahead.of([np.arange(36)]):
        await_copies(tmp_path / "cache", 8)
        assert [value(images.paths[number]) for number in (0, 20, 35)] == [0, 20, 35]
    (line,) = lines
    assert shard in line and "its bytes are not those" in line
    tiny = read_ahead.ReadAhead(images.paths, tmp_path / "tiny", 100, is_first=True, log=lines.append)
    with tiny.of([np.arange(36)]):
        assert value(images.paths[20]) == 20
    assert not list((tmp_path / "tiny").iterdir())


def test_a_copy_that_was_spoilt_or_cut_is_passed_over_and_one_of_another_size_made_again(shards, tmp_path):
    images = read(shards).train
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"left.{'0a' * 16}.partial").write_bytes(b"half")  # by a run that was killed
    ahead = read_ahead.ReadAhead(images.paths, cache, 10**9, is_first=True, log=print)
    with ahead.of([np.arange(36)]):
        await_copies(cache, 9)
    assert not list(cache.glob("*.partial"))
    spoilt = images.paths[7]
    cut = images.paths[20]
    (shard, offset), (cut_shard, _) = map(place_of, (spoilt, cut))
    copy_of_cut = members.copy_of(cut_shard, str(cache))
    for place in (-512, 100):  # in the tar header, and in the image
        spoil(members.copy_of(shard, str(cache)), offset + place, b"\x01")
        assert value(spoilt) == 7
    os.truncate(copy_of_cut, 100)  # as a power cut may
    assert value(cut) == 20
    with ahead.of([np.arange(36)]):
        wait_for(lambda: os.stat(copy_of_cut).st_size != 100, 20)
    assert Path(copy_of_cut).read_bytes() == Path(cut_shard).read_bytes()


def test_two_runs_that_copy_the_same_shard_into_one_folder_disturb_each_other_in_nothing(shards, tmp_path, monkeypatch):
    lines = []
    cache = tmp_path / "cache"
    images = read(shards).train
    first, second = (
        read_ahead.ReadAhead(images.paths, cache, 10**9, is_first=True, log=lines.append) for _ in range(2)
    )
    path = Path(members.copy_of(images.paths.files[0], str(cache)))
    monkeypatch.setattr(read_ahead, "PART_BYTES", 512)
    other = threading.Thread(target=second._make, args=(0, path))
    opened = []

    class Source(io.FileIO):
        def __init__(self, *arguments, **_):
            opened.append(super().__init__(*arguments))

        def read(self, count):
            if self.tell() == 1024:
                other.start()
            return super().read(count)

    monkeypatch.setattr(read_ahead, "open", Source, raising=False)
    first._make(0, path)
    other.join()
    assert lines == [] and len(opened) == 1
    assert path.read_bytes() == Path(images.paths.files[0]).read_bytes() and len(list(cache.iterdir())) == 1


def test_a_copy_that_the_end_of_an_epoch_interrupts_is_none(shards, tmp_path):
    lines = []
    ahead = read_ahead.ReadAhead(read(shards).train.paths, tmp_path / "cache", 10**9, is_first=True, log=lines.append)
    ahead._stop = True
    ahead._make(0, tmp_path / "cache" / "a.shard")
    assert [*(tmp_path / "cache").iterdir()] == lines == []


def await_copies(cache, count):
    wait_for(lambda: len(list(cache.glob("*.shard"))) == count, 20)
