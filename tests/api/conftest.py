"""What is not collected: a module that fails on purpose."""

collect_ignore = ["failing_module.py"]
