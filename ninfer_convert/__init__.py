"""From a checkpoint folder to a .ninfer artifact: plan, quantize, write atomically, report."""
