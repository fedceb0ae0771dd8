"""The commands of ``ninfer-convert`` beyond ``plan`` and ``build``, one module each with ``register(app)``."""
