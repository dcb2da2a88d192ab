"""The worker that stands where the GPU's would; its name for `--worker-cls` is in `settings`."""

import json
from typing import Any, TextIO

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    KVConnectorOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
from vllm_semantic_sched.lab.device.clocks import Clock, StepTime, WallClock
from vllm_semantic_sched.lab.device.copies import EmulatedCopies
from vllm_semantic_sched.lab.device.layers import align_blocks, exported_states, kv_cache_spec
from vllm_semantic_sched.lab.device.offloading import offload_by
from vllm_semantic_sched.lab.device.remote import RemoteKV
from vllm_semantic_sched.lab.device.runner import Limits, Runner
from vllm_semantic_sched.lab.device.sanitizer import Group
from vllm_semantic_sched.lab.device.settings import device_settings
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.profile.model_shape import ModelShape

_ACTIVATIONS = 2 * 2**30  # bytes beside weights and KV
_FIND_REPEATS = ("ngram", "suffix")  # drafters that look in the text, and may find nothing


class LaterOutput(AsyncModelRunnerOutput):
    """An output that is ready when the device has computed the step."""

    def __init__(self, output: ModelRunnerOutput, ready: float, runner: Runner) -> None:
        self._output = output
        self._ready = ready
        self._runner = runner

    def get_output(self) -> ModelRunnerOutput:
        self._runner.clock.wait_until(self._ready)
        self._runner.fetched = self._runner.clock.now()
        return self._output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """vLLM 0.33 asks for it where `get_output` fails."""
        return self._output.kv_connector_output


class EmulatedWorker(WorkerBase):
    """Computes nothing. A process that wants another clock than the real one sets `clock` before
    the engine starts."""

    clock: Clock = WallClock()

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.settings = device_settings(self.vllm_config.additional_config)
        self.profile = load_profile(self.settings.profile)
        self.connector: Any = None
        self._trace: TextIO | None = None
        self._flushed = 0.0
        if self.settings.trace is not None:
            self._trace = open(self.settings.trace, "w", encoding="utf-8")  # noqa: SIM115

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        align_blocks(self.vllm_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One entry for each layer of the model's configuration."""
        return kv_cache_spec(self.vllm_config)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD", "HND"]

    def determine_available_memory(self) -> int:
        if self.settings.kv_gib is not None:
            return int(self.settings.kv_gib * 2**30)
        config = self.model_config.hf_config.to_dict()
        shape = ModelShape.from_config(self.model_config.model, config, "bfloat16")
        memory = self.settings.memory_gib * 2**30 * self.cache_config.gpu_memory_utilization
        return int(memory - shape.weights - _ACTIVATIONS)

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        ranks = self.parallel_config.decode_context_parallel_size  # that share a block's tokens
        groups = [
            Group(
                block_size=resolve_dcp_kv_block_size(group.kv_cache_spec, ranks),
                window=getattr(group.kv_cache_spec, "sliding_window", None),
                state=isinstance(group.kv_cache_spec, MambaSpec),
                exported=exported_states(group.kv_cache_spec, config),
                checked=not getattr(group.kv_cache_spec, "num_speculative_blocks", 0),
            )
            for group in config.kv_cache_groups
        ]
        self.runner = Runner(
            profile=self.profile,
            groups=groups,
            blocks=config.num_blocks,
            limits=self._limits(),
            clock=self.clock,
            settings=self.settings,
        )
        if self._trace is not None:
            self.runner.finished_step = self._write
        if self.vllm_config.kv_transfer_config is not None:
            self._connect(config)

    def _limits(self) -> Limits:
        scheduler = self.scheduler_config
        speculative = self.vllm_config.speculative_config
        end_token = self.model_config.hf_text_config.eos_token_id
        if isinstance(end_token, list):
            end_token = end_token[0]
        return Limits(
            sequences=scheduler.max_num_seqs,
            tokens=scheduler.max_num_batched_tokens,
            length=self.model_config.max_model_len,
            vocabulary=self.model_config.get_vocab_size(),
            end_token=0 if end_token is None else end_token,
            adapters=self.lora_config.max_loras if self.lora_config else 0,
            drafts=self.vllm_config.num_speculative_tokens,
            drafts_vary=speculative is not None and speculative.method in _FIND_REPEATS,
            ahead=bool(scheduler.async_scheduling),
            vector=self.model_config.get_hidden_size(),
        )

    def _connect(self, config: KVCacheConfig) -> None:
        self.connector = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, config
        )
        for connector in getattr(self.connector, "sub_connectors", [self.connector]):
            if isinstance(connector, SemanticSwapConnector) and connector.slots:
                connector.backend = EmulatedCopies(self.runner)
            elif isinstance(connector, RemoteKV):
                connector.runner = self.runner
            else:
                offload_by(self.runner, connector)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",) if self._pools else ("generate",)

    @property
    def _pools(self) -> bool:
        return bool(self.model_config.runner_type == "pooling")

    def get_kv_connector_handshake_metadata(self) -> dict[Any, Any] | None:
        return None

    def update_max_model_len(self, length: int) -> None:
        pass

    def synchronize_device(self) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        self.runner.encoded.clear()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return True

    def pin_lora(self, lora_id: int) -> bool:
        return True

    def list_loras(self) -> set[int]:
        return self.runner.adapters

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        runner = self.runner
        runner.begin(scheduler_output)
        self._start_copies(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            moved = self._end_copies(scheduler_output)
            if moved is None:
                return EMPTY_MODEL_RUNNER_OUTPUT
            return ModelRunnerOutput.with_kv_conn_output_only(moved)
        runner.submit(scheduler_output)
        self._moved = self._end_copies(scheduler_output)
        return self.sample_tokens(None) if self._pools else None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        names, tokens, time = self.runner.sample(grammar_output)
        vectors: list[torch.Tensor | None] | None = None
        if self._pools:
            vectors = [torch.tensor(numbers) if numbers else None for numbers in tokens]
            tokens = []
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens,
            pooler_output=vectors,
            kv_connector_output=self._moved,
        )
        return LaterOutput(output, time.end, self.runner)

    def execute_dummy_batch(self) -> None:
        """A step without requests, as engines that share experts make while another has some."""
        self.runner.idle_step()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if not self.runner.limits.drafts:
            return None
        names, drafts = self.runner.take_drafts()
        return DraftTokenIds(names, drafts)

    def shutdown(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        if self.connector is not None:
            self.connector.shutdown()

    # The worker's side of a KV connector, in the order of vLLM's model runners

    def _start_copies(self, output: SchedulerOutput) -> None:
        metadata = output.kv_connector_metadata
        if self.connector is None or metadata is None:
            return
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.connector.start_load_kv(None)

    def _end_copies(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        if self.connector is None or output.kv_connector_metadata is None:
            return None
        connector = self.connector
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        moved = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        self.runner.loads_failed |= bool(moved.failed_recving or moved.invalid_block_ids)
        return moved

    def _write(self, time: StepTime) -> None:
        batch = time.batch
        row = {
            "end": round(time.end, 6),
            "seconds": round(time.end - time.begin, 6),
            "idle": round(time.idle, 6),
            "waited": round(time.waited, 6),
            "host": round(time.host, 6),
            "prefills": batch.prefills,
            "prefill_tokens": batch.prefill_tokens,
            "prefill_squares": batch.prefill_squares,
            "decodes": batch.decodes,
            "context": batch.context,
            "sampled": time.sampled,
        }
        assert self._trace is not None
        self._trace.write(json.dumps(row) + "\n")
        if time.end - self._flushed > 1.0:
            self._flushed = time.end
            self._trace.flush()
