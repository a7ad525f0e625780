"""A model of transformers with its parts compiled in place, trained by a plain loop.

Trainers (Lightning, Accelerate, transformers' own) call the model and `loss.backward()` as this loop does.
"""

import copy

import torch

from tilefold.integrations.transformers import apply

try:
    import transformers
except ImportError:
    transformers = None


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    if transformers is None:
        print("transformers is not installed: pip install transformers")
        return
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    fast = copy.deepcopy(model)
    done = apply(fast)
    batches = [torch.randint(96, (2, n)) for n in (10, 17, 12)]
    eager, fused = train(model, batches), train(fast, batches)
    print(done)
    print("losses in eager mode ", *(f"{x:.5f}" for x in eager))
    print("losses with Tilefold ", *(f"{x:.5f}" for x in fused))
    assert max(abs(a - b) for a, b in zip(eager, fused, strict=True)) < 1e-3
    assert all(row.state == "fused" for row in done.rows)


if __name__ == "__main__":
    main()
