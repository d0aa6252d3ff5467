"""How a PyTorch model's training step is written down as a Graph: by export, or by a trace where export
fails, with the backward pass and the optimizer's update. `graph.capture.capture` is the front door. It may
import `modules` and `core`. [torch]
"""
