"""What must hold for every problem hypothesis can draw."""
