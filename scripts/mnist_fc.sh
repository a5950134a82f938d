#!/usr/bin/env bash
# LeNet-300-100 on MNIST, in seconds on a CPU; add --download to fetch the data into DATA.
#
#   bash scripts/mnist_fc.sh DATA [flag of main.py ...]
USAGE="bash scripts/mnist_fc.sh DATA" exec bash "$(dirname "${BASH_SOURCE[0]}")/launch.sh" mnist/fc "$@"
