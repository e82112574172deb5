"""What `accelerate launch` runs in tests: several recipes one after the other, as starting the processes costs most.

accelerate launch ... -m tests.train.many RECIPE RECIPE ... [a.b=c ...]
"""

from __future__ import annotations

import gc
import sys

from accelerate.state import AcceleratorState, PartialState
from torch import distributed

from draftsmith.train import run
from draftsmith.train.leave import leave


def main() -> None:
    # A run ends by leaving the other processes; here they stay together for the next one.
    PartialState.destroy_process_group = lambda self, group=None: None  # type: ignore[method-assign]
    recipes = [argument for argument in sys.argv[1:] if "=" not in argument]
    for recipe in recipes:
        run(recipe, sys.argv[1 + len(recipes) :])
        AcceleratorState._reset_state()  # DeepSpeed's configuration is read anew
        gc.collect()  # what a run leaves behind goes at the same place in every process
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
