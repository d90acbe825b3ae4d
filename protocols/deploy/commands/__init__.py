"""The sub-commands of ``ppvfl``, one module each."""
