"""Everything that runs inside vLLM. `vllm_api` alone imports vLLM."""
