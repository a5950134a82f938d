"""Parts that several commands share. Each imports this first: a Python that is too old is told before it fails."""

import os
import sys

from utils.runtime.console import refuse_old_python

refuse_old_python(os.path.basename(sys.argv[0]))
