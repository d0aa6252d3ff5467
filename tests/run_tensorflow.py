"""Runs TensorFlow's tests in a process of their own; says so where the extra is not installed."""

import importlib.util
import os
import sys

if importlib.util.find_spec("tensorflow") is None:
    if os.environ.get("LOADMASTER_CI"):
        sys.exit("LOADMASTER_CI: TensorFlow's tests need the extra [tensorflow]")
    print("TensorFlow's tests: left out, the extra [tensorflow] is not installed")
    sys.exit(0)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-n", "0", "tests/tensorflow", *sys.argv[1:]])
