"""Parts shared by several commands, which import this package first: a Python that is too old is reported clearly."""

import os
import sys

from utils.runtime.console import refuse_old_python

refuse_old_python(os.path.basename(sys.argv[0]))
