"""The trainer as a module: ``torchrun -m torchgpipe.trainer``."""

from torchgpipe.trainer.command import main

if __name__ == '__main__':
    main()
