#!/usr/bin/env bash
# ResNet-18 on ImageNet, on all GPUs of this machine; DATA holds train/ and val/.
#
#   bash scripts/imagenet_resnet18.sh DATA [flag of main.py ...]
USAGE="bash scripts/imagenet_resnet18.sh DATA" exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" imagenet/resnet18 "$@"
