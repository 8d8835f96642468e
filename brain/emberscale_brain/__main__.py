"""The brain as a process."""

import sys

from emberscale_brain.service.command import main

if __name__ == "__main__":
    sys.exit(main())
