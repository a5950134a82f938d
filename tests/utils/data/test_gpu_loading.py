"""The way of batches to a GPU: one stream a loader, nothing read before it is there, no memory used again too early.

What a CPU can show of it is shown with streams that only write down what they are told.
"""

import contextlib
from unittest.mock import Mock

import pytest
import torch
from torch.utils import deterministic
from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

from tests.utils.data.loading import CPU, make
from utils.config.arguments import parse
from utils.data.datasets import get_data
from utils.data.formats.readers import MemoryImages
from utils.data.images import gpu_decoding
from utils.data.images.view import View
from utils.data.loaders import TrainLoader, ValidationLoader, loaders
from utils.data.sample_plan import SamplePlan
from utils.data.sources import MicroBatchReader, StreamSource
from utils.runtime.distributed import Distributed, RankInfo

GPU = torch.device("cuda")


class Diary:
    """Stands in for torch.cuda: ``lines`` says what was asked of which stream, in order."""

    def __init__(self, monkeypatch):
        self.lines = []
        self.streams = 0
        self.current = RecordingStream(self, "training")
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.lines.append(f"{stream.name} reads")
        )

    def new_stream(self, device):
        self.streams += 1
        return RecordingStream(self, f"stream {self.streams}")

    @contextlib.contextmanager
    def inside(self, stream):
        before = self.current
        self.current = stream
        yield
        self.current = before


class RecordingStream:
    def __init__(self, diary, name):
        self.diary = diary
        self.name = name
        self.events = 0

    def wait_stream(self, other):
        self.diary.lines.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.events += 1
        return f"event {self.events} of {self.name}"

    def wait_event(self, event):
        self.diary.lines.append(f"{self.name} waits for {event}")

    def synchronize(self):
        self.diary.lines.append(f"the host waits for {self.name}")


class OnGPU:
    """A source that says that it is a GPU's."""

    device = GPU
    stored_shape = None

    def __init__(self, source, diary):
        self.source = source
        self.diary = diary
        self.chunks = source.chunks

    def __len__(self):
        return len(self.source)

    def batches(self, shares):
        for item in self.source.batches(shares):
            self.diary.lines.append(f"made on {self.diary.current.name}")
            yield item


@pytest.fixture
def diary(monkeypatch):
    return Diary(monkeypatch)


@pytest.fixture
def pretended(diary):
    """Both loaders, as on a GPU."""
    flags = ("--loader", "stream", "--workers", 0, "--batch-size", 500, "--val-batch-size", 200)
    train, validation, _ = make(*flags)
    return (
        TrainLoader(OnGPU(train.source, diary), train.plan, train.transform),
        ValidationLoader(OnGPU(validation.source, diary), 200, validation.transform),
    )


def test_a_loader_has_one_stream_however_many_epochs_there_are(diary, pretended):
    train, validation = pretended
    for epoch in range(3):
        assert [batch.number for batch in train.batches(epoch)] == list(range(train.steps_per_epoch))
        assert len(list(validation.batches())) == 2
    next(train.batches(3))  # an epoch that is not walked to its end
    assert len(list(train.batches(3))) == train.steps_per_epoch
    assert diary.streams == 2


def test_training_waits_for_each_batch_and_its_memory_for_training(diary, pretended):
    batches = pretended[1].batches()
    assert diary.lines == []
    next(batches)
    assert diary.lines == [
        "stream 2 waits for training",
        "made on stream 2",
        "made on stream 2",  # one ahead
        "training waits for event 1 of stream 2",
        "training reads",
        "training reads",
    ]
    diary.lines.clear()
    next(batches)
    assert diary.lines == ["training waits for event 2 of stream 2", "training reads", "training reads"]
    assert next(batches, None) is None


@pytest.mark.gpu
def test_memory_does_not_grow_from_epoch_to_epoch():
    args = parse(["--dataname", "synthetic", "--image-size", "64", "--batch-size", "512", "--device", "cuda"])
    distributed = Distributed(RankInfo(), args.run)
    data = get_data(args.data, distributed.device)
    train, validation, _ = loaders(data, args, distributed, channels_last=False)
    held = []
    for epoch in range(40):  # more than torch has streams in its pool
        for batches in (train.batches(epoch), validation.batches()):
            for batch in batches:
                batch.images.sum()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] < 2 * held[1]


# ------------------------------------------------------------------------------ synthetic images, streamed


class Elsewhere:
    """Stands in for a tensor in a GPU's memory: it can be copied to the CPU, and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def cpu(self):
        return self.tensor


def test_workers_read_images_that_were_made_on_a_gpu_from_the_cpus_memory():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (20,), generator=generator)
    images = MemoryImages(Elsewhere(pixels), Elsewhere(labels))
    source = StreamSource(MicroBatchReader(images, View(8, whole=True)), CPU, workers=1, cores=1)
    plan = SamplePlan(20, 6, 6, 0)
    shares = [share for step in range(plan.steps_per_epoch) for share in plan.micro_batches(0, step)]
    seen = 0
    for (share,), images, targets in source.batches(shares):
        assert torch.equal(images, pixels[share.indices % 5]) and torch.equal(targets, labels[share.indices])
        seen += share.count
    assert seen == 20


@pytest.mark.gpu
def test_streamed_synthetic_images_are_the_resident_ones_on_a_gpu():
    def batches(kind):
        flags = ("--image-size", "32", "--loader", kind, "--workers", "2", "--device", "cuda")
        args = parse(["--dataname", "synthetic", *flags])
        distributed = Distributed(RankInfo(), args.run)
        data = get_data(args.data, distributed.device)
        both = loaders(data, args, distributed, channels_last=False)[:2]
        return [(b.images, b.targets) for walk in (both[0].batches(1), both[1].batches()) for b in walk]

    for resident, streamed in zip(batches("resident"), batches("stream"), strict=True):
        assert torch.equal(resident[0], streamed[0]) and torch.equal(resident[1], streamed[1])


# ---------------------------------------------------------------------------------------- the GPU's decoder


def jpeg(seed):
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (1, 3, 16, 16), generator=generator).float()
    pixels = torch.nn.functional.interpolate(coarse, (512, 512), mode="bilinear").to(torch.uint8)
    return encode_jpeg(pixels[0])


def test_before_the_gpu_decodes_the_host_waits_for_what_reads_the_memory_and_nothing_fills_it(monkeypatch, diary):
    seen = []

    def decode(files, mode, device):
        seen.append((list(diary.lines), deterministic.fill_uninitialized_memory))
        return decode_jpeg(files, mode, "cpu")

    monkeypatch.setattr("torchvision.io.decode_jpeg", decode)
    assert deterministic.fill_uninitialized_memory
    gpu_decoding._decode_files([jpeg(0)], ["0.jpg"], GPU)
    assert seen == [(["the host waits for training"], False)]
    assert deterministic.fill_uninitialized_memory


def test_memory_is_filled_again_when_the_decoder_fails(monkeypatch, diary):
    monkeypatch.setattr("torchvision.io.decode_jpeg", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        gpu_decoding._decode_files([jpeg(0)], ["0.jpg"], GPU)
    assert deterministic.fill_uninitialized_memory


@pytest.mark.gpu
def test_crops_that_are_still_being_made_are_not_overwritten_by_the_next_files():
    first = [jpeg(1)] * 4
    second = [jpeg(2)] * 4
    names = ["a.jpg"] * 4
    expected = decode_jpeg(first, ImageReadMode.RGB, GPU)[0].float().cpu()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        images = gpu_decoding._decode_files(first, names, GPU)
        places = {image.data_ptr() for image in images}
        torch.cuda._sleep(500_000_000)
        crops = [image.float() for image in images]  # waits behind the sleep
        del images
        after = gpu_decoding._decode_files(second, names, GPU)
    assert places & {image.data_ptr() for image in after}  # else this shows nothing
    for crop in crops:
        assert torch.equal(crop.cpu(), expected)


@pytest.mark.gpu
def test_decoding_gives_the_same_pixels_under_deterministic_algorithms():
    files = [jpeg(seed) for seed in range(16)]
    names = ["a.jpg"] * 16
    expected = [image.cpu() for image in gpu_decoding._decode_files(files, names, GPU)]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            found = gpu_decoding._decode_files(files, names, GPU)
            assert all(torch.equal(image.cpu(), wanted) for image, wanted in zip(found, expected, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
