"""The Python interface: ``privssl.train``, ``load``, ``open_run``, ``Run``, ``Dataset``."""
