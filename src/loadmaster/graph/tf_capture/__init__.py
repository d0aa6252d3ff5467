"""TensorFlow capture: a Keras model, a `tf.function` or a SavedModel becomes the Graph of its step.

Front door: `request` (`capture_source`, `capture_step`). `steps` says what one step of a source is;
`trace` gives its concrete function; `optimised` the graph that TensorFlow would run of it, with names that
do not depend on what else the process has built; `phases`, `ties` and `op_work` say what each op is;
`step_graph` puts the Graph together.

The captured ops are those that TensorFlow runs after its own optimiser: fused, constants folded. The
runtime imports exactly these ops with a device on each and leaves the optimiser out, so that a plan does
not change the numbers.
"""
