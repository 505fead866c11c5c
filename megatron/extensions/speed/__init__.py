"""Extensions that speed up training without changing the model: fp8, fused kernels, overlap and CUDA graphs."""
