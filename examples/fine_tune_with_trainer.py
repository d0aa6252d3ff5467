"""Fine-tune a transformers model with its Trainer under a memory cap, with dynamic padding.

The cap is a third of what weights, gradients and optimizer take.
On a GPU, leave `devices` out and say memory_cap="8GiB".
"""

import tempfile
import warnings

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import loadmaster.train as lt

warnings.simplefilter("ignore")  # of the libraries
torch.manual_seed(0)


def make_rows(count: int) -> list[dict[str, object]]:
    """Sentences of 4 to 24 tokens, each with a label."""
    lengths = torch.randint(4, 25, (count,)).tolist()
    return [{"input_ids": torch.randint(1, 200, (n,)), "labels": n % 2} for n in lengths]


def pad(rows: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


config = BertConfig(
    vocab_size=200, hidden_size=64, num_hidden_layers=10, num_attention_heads=4, intermediate_size=256
)
model = BertForSequenceClassification(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=make_rows(32), data_collator=pad)

    trial = lt.Trial.from_trainer(trainer)  # says by name what it cannot carry over
    need = 16 * sum(parameter.numel() for parameter in model.parameters())
    study = lt.Study(trial, dir=f"{folder}/study", devices="cpu", memory_cap=need // 3)
    print(study.plan())
    (trained,) = study.fit(progress=False)
    print(trained)
    trained.save_pretrained(f"{folder}/tuned", model)
    print("loaded again:", type(BertForSequenceClassification.from_pretrained(f"{folder}/tuned")).__name__)
