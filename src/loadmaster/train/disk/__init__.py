"""What a study keeps on disk: the journal, checkpoints by generation, frozen weights stored once, and the
lock on its folder. The front doors are `journal` and `checkpoints`. It is the lowest room of the trainer
and knows nothing of trials that run; files of tensors are written and read by `modules.tensor_files`.
"""
