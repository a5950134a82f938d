"""What the server of forked.py imports, before it forks."""

# ruff: noqa: E402, F401
import gc
import os
import sys
from multiprocessing.context import ForkServerProcess

sys.modules["wandb"] = None  # which timm imports where it finds it, for as long as all of its own
gc.disable()  # imports make a million objects, to be gone through again and again for no garbage

import hypothesis
import scipy.stats
import sklearn.metrics
import tensorboard.backend.event_processing.event_file_loader
import timm
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import torch.utils.tensorboard

import main
import models
import tests.end_to_end.forked
import tests.faults.faulty_main
import tests.faults.points
import tests.quicker
import training
import utils.record.writer
import utils.train_validation
from utils.config.arguments import build_parser
from utils.data.formats.readers import read_digits
from utils.record.provenance import commit

# What all that is forked knows from now on.
commit()
build_parser()
read_digits()
del sys.modules["wandb"]
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is forked prints to where its test looks, and nothing else
ForkServerProcess._start_method = None  # else what is forked would have its own children come from a server too
gc.freeze()  # a search for garbage would write to, and so copy, each page of memory that forked processes share
gc.enable()
