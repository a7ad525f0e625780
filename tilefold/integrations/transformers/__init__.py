"""Models of Hugging Face transformers with their attention, norms, rotary, feed-forward parts and loss compiled.

    from tilefold.integrations.transformers import apply
    print(apply(model))       a model that is built; or apply("llama"): every Llama built from now on
    revert(model)             as it was

Nothing here is a kernel: each part is the model's own code (a module's `forward`, the rotary function of its file) or
a function in plain PyTorch (attention, the loss), given to `tilefold.fuse`. What Tilefold refuses runs as before, and
the table that `apply` returns says why. Parameters, `state_dict`, hooks and saved files are those of the model.
"""

from tilefold.integrations.transformers.models import Applied, apply, revert
from tilefold.integrations.transformers.rows import Row

__all__ = ["Applied", "Row", "apply", "revert"]
