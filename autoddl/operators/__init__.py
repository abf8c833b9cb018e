"""All that is known per operator: layouts, bytes and kernels."""
