# Trains a recipe in a container, on GPUs or on a CPU. From the repository's root:
#
#   docker build --tag training .
#   docker run --gpus all --ipc host --volume DATA:/data --volume RUNS:/workspace/runs training imagenet/resnet50 /data --resume auto
#
# RUNS must be writable for user 1000, or give --user. --compile needs a C compiler, which this image lacks.
#
# The arguments are those of scripts/launch.sh. The default wheels of torch carry CUDA and run on a CPU as well; for a
# smaller image without CUDA give the address of the CPU wheels that PyTorch's installation page names:
#
#   docker build --build-arg TORCH_INDEX=ADDRESS --tag training:cpu .
#
# SIGTERM (docker stop -t 120) saves; exit code 75 then says that the same command goes on.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG TORCH_INDEX=
WORKDIR /workspace
COPY requirements.txt .
# The CPU wheels come first, so that what requirements.txt asks for, in ranges, is met.
# hadolint ignore=DL3013
RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision; fi \
    && pip install --no-cache-dir --requirement requirements.txt
COPY . .
# A writable folder for the runs, also for a user who is not root
RUN useradd --uid 1000 --create-home trainer && mkdir -p runs && chown trainer runs
USER 1000
STOPSIGNAL SIGTERM
ENTRYPOINT ["bash", "scripts/launch.sh"]
CMD ["digits/fc", "--resume", "auto"]
