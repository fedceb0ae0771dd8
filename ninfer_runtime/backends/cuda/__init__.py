"""The CUDA backend: own kernels, compiled here, for sm_80 and newer; tuned for sm_120a, measured on sm_90a."""
