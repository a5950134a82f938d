#!/usr/bin/env bash
# ResNet-18 on CIFAR-10, on all GPUs of this machine; add --download to fetch the data into DATA.
#
#   bash scripts/cifar10_resnet18.sh DATA [flag of main.py ...]
USAGE="bash scripts/cifar10_resnet18.sh DATA" exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" cifar10/resnet18 "$@"
