"""Many tensors to another device as one. The other device is ``meta`` where only places matter;
numbers are compared on the far device (``test_far_device.py``)."""
