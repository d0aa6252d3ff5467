"""A placed model in transformers' own Trainer: nothing is moved or wrapped, the losses are the same."""

import tempfile
import warnings

import torch

try:
    import accelerate  # noqa: F401
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
except ImportError:
    print("this example needs transformers and accelerate: pip install transformers accelerate")
    raise SystemExit(0) from None

import loadmaster as lm

warnings.simplefilter("ignore")  # of the libraries


class Rows(torch.utils.data.Dataset):
    """Random tokens, each row its own labels."""

    def __len__(self) -> int:
        """How many."""
        return 16

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        """One row."""
        row = torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": row, "labels": row}


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config)


def train(model: torch.nn.Module, folder: str) -> list[float]:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        max_steps=4,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


batch = {"input_ids": torch.zeros(4, 16, dtype=torch.int64), "labels": torch.zeros(4, 16, dtype=torch.int64)}
placed = lm.place(build(), batch, optimizer="adamw", devices="cpu#0-16MB, cpu#1-16MB", budget="20x")
with tempfile.TemporaryDirectory() as folder:
    losses = train(placed, folder)
    print("losses", losses)
    assert losses == train(build(), folder)
