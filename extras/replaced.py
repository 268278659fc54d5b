"""How the programs of this folder change vldac.py: other functions take the place of some of its own.

    with replaced(policy_loss=my_loss):
        vldac.train(args, folder)

Classes, like VLMPolicy, can be replaced too.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import vldac  # noqa: E402


@contextlib.contextmanager
def replaced(**others):
    """In this block these names of vldac stand for the given functions, and after it for its own again."""
    own = {name: getattr(vldac, name) for name in others}
    vars(vldac).update(others)
    try:
        yield
    finally:
        vars(vldac).update(own)
