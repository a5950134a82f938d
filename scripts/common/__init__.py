"""Parts shared by several commands, which import this package first.

A Python that is too old is reported clearly, and Ctrl-C while the others are imported gives no traceback. Commands
import heavy packages inside functions, so that --help and mistakes are answered at once.
"""

import os
import sys

from utils.runtime.console import refuse_old_python, say_interrupted

refuse_old_python(os.path.basename(sys.argv[0]))
say_interrupted(os.path.basename(sys.argv[0]))
