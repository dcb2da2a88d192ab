"""An emulated GPU under the real vLLM: a worker that computes nothing and answers when a GPU of a
profile would have, and a sanitizer that checks each KV block that a step reads.

Everything of vLLM is real but the device. It has no kernels, memory traffic or PCIe: step times
come from an engine profile.
"""
