"""What the stack's own failure texts mean: a table from the words of a line to its cause and what to do next.

    known = failure_of("ValueError: No available memory for the cache blocks. ...")
    known.cause, known.next_step

The first entry whose pattern is found speaks: particular texts stand before general ones. A text that only tells of
another process's end (`follows`) is no cause while any other is told. Texts were read in the sources and the public
issues of torch, NCCL, gloo, Ray, vLLM, SGLang, FlashAttention, Triton, DeepSpeed, Megatron-LM, transformers, TRL, verl,
OpenRLHF, datasets, huggingface_hub, hydra and wandb.
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from replay_core.diagnose.environment_texts import ENVIRONMENT, LIMITS, SERVICES
from replay_core.diagnose.misuse_texts import BATCHES, CODE, FIRST, MODELS, SETTINGS
from replay_core.diagnose.refusal_texts import REFUSALS
from replay_core.diagnose.tooling_texts import EMPTY, TOOLING
from replay_core.regexes import regex


class Failure(Struct, frozen=True):
    """What a text means. `follows`: it tells of another failure's consequence."""

    pattern: re.Pattern[str]
    cause: str
    next_step: str
    follows: bool = False
    general: bool = False
    """It says how it failed, not why: any particular text of the same end tells more."""


def in_short(cause: str) -> str:
    """A cause in a few words: up to its first colon or semicolon."""
    return re.split(r"[:;]", cause, maxsplit=1)[0].strip()


_OTHER_FIRST = "the first error of any other rank, actor or process is the cause: look above, and in its own log"
_VERSIONS = "pip show both; install the versions that the framework pins"

#: (pattern, cause, next step): what ends a run.
_DEATHS: tuple[tuple[str, str, str], ...] = (
    # Weights that do not reach the engine: it answers the next requests all the same.
    (r"Failed to update (?:parameter|weights?)|partially updated|[Uu]pdate[ _]weights?(?:_\w+)? failed"
     r"|(?:weights?|parameters?)[ _](?:update|sync\w*|transfer|broadcast)\b.{0,40}\bfailed"
     r"|[Ff]ailed to (?:sync\w*|receive|broadcast|transfer)(?: the)?(?: \w+)? weights?",
     "the weight update of the engine failed: a tensor does not fit (a shape or slice out of range, a name, an "
     "expert's or tensor-parallel rank's part), so that it samples with old or partly updated weights, although "
     "the request may be answered with 200",
     "compare the engine's ranks and expert parallelism with the trainer's; stop the run where an update is not "
     "confirmed; rldbg record -- YOUR COMMAND shows the mismatch that follows"),
    (r"Cache not flushed because",
     "the engine's cache was to be flushed for new weights while requests still ran: the weight update comes between a "
     "request's tokens, so that the update fails or old keys and values stay",
     "pause or abort the requests and wait until none runs before the weights are updated (pause_generation, "
     "abort_request); see what #running-req says"),
    (r"waitForInput: .{0,200}timed out after \d",
     "a process waited for the others at the store (a socket) until its time was over: of two sides that build or use "
     "one process group, as trainer and engine do for weights, one never came",
     "look which side did not join: the trainer's own log at that time; the address, port and world size on both "
     "sides; an engine that is busy with a request answers no weight update"),
    (r"Could not find '[^']+'\s*$|MissingConfigException|Could not load '[^']+'\.?\s*$|Cannot find primary config"
     r"|Primary config (?:module|directory)",
     "hydra does not find a configuration group or file: a default that the searched folders do not hold (a "
     "configuration of another version of the framework, or a search path that lacks the framework's own, as one that "
     "is relative does from another working directory)",
     "look for that file in the folders under 'Config search path'; add the framework's to hydra.searchpath, or take "
     "the default out of the list"),
    # Ranks that do not find each other, or do not call the same.
    (r"Duplicate GPU detected", "two ranks hold one GPU: every process was given the same device",
     "torch.cuda.set_device(LOCAL_RANK) before init_process_group; look at CUDA_VISIBLE_DEVICES of each rank"),
    (r"Detected mismatch between collectives|mismatch between collective operations",
     "ranks called different collectives, or the same with different shapes: a branch on data of the rank, or another "
     "number of micro-batches", "the line names both ranks and what each called: follow both to where they part"),
    (r"EADDRINUSE|[Aa]ddress already in use|[Pp]ort \d+ is (?:already )?in use|errno: 98",
     "the port is in use: another run on this node, or a process of the last one that still lives",
     "lsof -i :PORT; end the orphan, or set another MASTER_PORT (or server port)"),
    (r"failed to pass monitoredBarrier|monitoredBarrier",
     "the named rank never came to the barrier: it stalled or died before", "py-spy dump --pid PID of the named rank"),
    (r"Gloo connectFullMesh failed|unable to resolve hostname|gloo.*(?:no address|connect timeout)",
     "gloo cannot connect the hosts: the host name resolves to a loopback or to another network",
     "export GLOO_SOCKET_IFNAME=IFACE on every node; getent hosts $(hostname)"),
    (r"[Pp]olicy generation refit failed|\brefit failed",
     "the weight update of the engine failed (the refit of the generation from the trained policy): it would go on "
     "with old or partly updated weights",
     "the engine's own log at that time; memory that is shared between processes (CUDA IPC) and the device each sees; "
     "compare names and shapes: rldbg weights"),
    (r"ncclSystemError|Call to (?:connect|bind|accept|ibv_\w+).*(?:failed|returned)|NET/(?:IB|Socket)|ibv_\w+ failed",
     "NCCL's network or system call failed (interface, InfiniBand): the wrong interface, InfiniBand that is not "
     "usable, a limit of the container (memlock, /dev/shm) or a peer that is gone",
     "NCCL_DEBUG=INFO names the call; NCCL_SOCKET_IFNAME=IFACE; NCCL_IB_DISABLE=1 tells whether it is InfiniBand"),
    (r"HCCL function error|hccl api failed|ERR02200|EI00\d\d",
     "a call of Ascend's HCCL failed: ranks that do not meet, a device that is held, or an error of a peer before",
     "the plog of the device (~/ascend/log) names the code; npu-smi info; the first error of any other rank"),
    (r"ncclInvalidUsage", "NCCL was used wrongly: two ranks on one GPU, or tensors of another device or shape",
     "NCCL_DEBUG=WARN names it"),
    (r"DistStoreError|retrieving ncclUniqueId.{0,200}[Tt]ime(?:d ?)?[Oo]ut"
     r"|client socket has (?:failed|timed out)|Rendezvous(?:Timeout|Connection|Closed)\w*Error"
     r"|wait timeout after \d+ ?ms|TCPStore.*(?:[Tt]imed? ?out|[Tt]imeout)",
     "the ranks did not all meet: a process did not start or died before, or the address, port or number of ranks is "
     "not the same on every node",
     "compare MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK of all; nc -vz MASTER_ADDR MASTER_PORT from each node"),
    # Engines: vLLM, SGLang.
    (r"No available memory for the cache blocks",
     "after the weights nothing of the engine's share of GPU memory is left for the KV cache",
     "raise gpu_memory_utilization, lower max_model_len or use more tensor parallelism; see what else is on the GPU"),
    (r"larger than the (?:maximum number of tokens that can be stored|available KV cache memory)|(?:is )?needed, which "
     r"is larger than the available KV cache|To serve at least one request with the model",
     "the KV cache cannot hold one request of the full context length: max_model_len is too large for the memory that "
     "the engine may use", "lower max_model_len or raise gpu_memory_utilization"),
    (r"Not enough memory.*mem-fraction-static|KV cache pool is too small|(?:token|KV).* pool is full.*(?:fail|raise)"
     r"|Decode out of memory|Prefill out of memory",
     "SGLang's KV cache is full: too many or too long requests for its share of GPU memory",
     "adjust --mem-fraction-static, lower --max-running-requests or the context length"),
    (r"Free memory on device .*less than desired GPU memory utilization",
     "another process holds the GPU's memory: the trainer beside a colocated engine that was not offloaded, or an "
     "orphan of the last run", "nvidia-smi names the process; lower gpu_memory_utilization or offload the trainer"),
    (r"Error in memory profiling|memory profiling.*(?:Initial|initial) free memory",
     "GPU memory was freed or taken by another process while vLLM measured what it may use: two engines or a trainer "
     "start on one GPU at once", "start them one after the other"),
    (r"sequence_length=\d+ is larger than (?:self\.)?max_length|Prompt length \d+ is longer than \d+\.?$",
     "a prompt (or sample) of the data set is longer than data.max_prompt_length (max_length), and data.truncation is "
     "'error'",
     "data.filter_overlong_prompts=True leaves such prompts out; or raise max_prompt_length (and the engine's "
     "max_model_len), or set truncation to left or right"),
    (r"max_(?:new_)?tokens must be at least 1, got (?:-\d|0)|max_(?:new_)?tokens.{0,30}(?:must be|should be) "
     r"(?:at least|greater|positive|larger).{0,20}(?:-\d|\b0\b)",
     "no token is left for the response: what is left of max_model_len after the prompt is less than 1, so that the "
     "prompt is longer than the context",
     "filter or shorten long prompts (max_prompt_length), or raise max_model_len: prompt + response must fit"),
    (r"LoRA rank \d+ is greater than max_lora_rank|max_lora_rank",
     "the adapter's rank is larger than the engine was started for (max_lora_rank)",
     "start the engine with max_lora_rank of the adapter's rank and more"),
    (r"longer than the maximum model length|maximum (?:context|model) length (?:is|of)|maximum context length"
     r"|exceeds? (?:the )?(?:model's )?(?:max(?:imum)?)[ _](?:model|context|allowed|input|sequence)[ _]?len"
     r"|is too long and exceeds limit|prompt.{0,40} (?:is )?too long|longer than the model's context",
     "a prompt, or prompt and response together, is longer than the engine's max_model_len (context length)",
     "raise max_model_len, or filter prompts and lower max_tokens: prompt + response must fit"),
    (r"attention heads.*(?:must be )?divisible by tensor parallel|not divisible by (?:the )?tensor[ _-](?:model[ _-])?"
     r"parallel", "the tensor parallel size does not divide the model's heads (or its vocabulary or hidden size)",
     "choose a tensor parallel size that divides num_attention_heads and num_key_value_heads"),
    (r"max_token_len must be greater|max_token_len.{0,40}sequence length|longer than (?:the )?max_token_len",
     "a micro-batch may hold fewer tokens than one sequence has (max_token_len is too small)",
     "raise ppo_max_token_len_per_gpu (or max_token_len) to prompt + response, or shorten them"),
    (r"Expandable segments are not compatible with memory pool",
     "vLLM's sleep mode holds memory in a pool of its own, which expandable_segments forbids",
     "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's process"),
    (r"operation not permitted when stream is capturing|[Cc]apture (?:cuda|CUDA) graph failed|StreamCapture"
     r"|(?:CUDA|cuda) graph capture failed"
     r"|while (?:the )?stream is capturing|capturing CUDA graph",
     "CUDA graph capture failed: something in the forward synchronises, or memory ran out during the capture",
     "enforce_eager=True (vLLM) or --disable-cuda-graph (SGLang) tells whether it is the capture"),
    (r"Watchdog timeout \(self\.watchdog_timeout|soft_watchdog|watchdog_timeout=",
     "SGLang's scheduler made no step for its watchdog's time: a forward or collective of the engine hangs",
     "py-spy dump of the scheduler, which its log prints, too; --watchdog-timeout only where a step is that long"),
    (r"Token id \d+ is out of vocabulary|out of vocabulary",
     "a token id beyond the engine's vocabulary was sent: another tokenizer, or added tokens the engine does not have",
     "compare len(tokenizer) with the model's vocab_size on both sides"),
    (r"torch\.Size\(\[0\]\)|LoRA weight 0\b|size of tensor [ab] \(0\)|vector of size 0\b|ZeroParamStatus"
     r"|ds_status|inflight_param|partitioned.*(?:not|un)gathered|[\"']?weight[\"']? must be 2-D",
     "one tensor has size 0, as a weight sharded by ZeRO-3 (or FSDP) has where it is not gathered: used or loaded into "
     "beside its wrapped forward, or saved so, and then the checkpoint holds empty tensors; of activations, an empty "
     "batch",
     "deepspeed.zero.GatheredParameters (FSDP.summon_full_params) around it; gather when saving "
     "(stage3_gather_16bit_weights_on_model_save); ZeRO-2 tells whether it is this"),
    (r"used a DP world size of \d+|DP world size.{0,60}(?:differ|mismatch|not (?:match|supported))"
     r"|[Aa]utomatic adjustment of ZeRO|Loaded state world size|saved with (?:a )?(?:different )?world[ _]size",
     "the checkpoint is resumed with another number of data-parallel ranks than it was saved with: the sharded "
     "optimizer's parts do not fit",
     "resume on as many GPUs, convert it (DeepSpeed's universal checkpoint: ds_to_universal), or load the weights "
     "alone and begin with a fresh optimizer"),
    (r"(?:Missing|Unexpected) key(?:\(s\)|s)? in (?:checkpoint )?state_dict: ?[\"']?optim\w*\.",
     "the optimizer's state in the checkpoint lacks keys that are loaded: another version's layout, an optimizer that "
     "had not stepped when it was saved, or other parameters; the weights are not concerned",
     "load the weights alone and begin with a fresh optimizer, or resume with the versions that saved it (accelerate, "
     "torch)"),
    (r"There is no module or parameter named|Attempted to load weight|not found in params_dict"
     r"|assert param(?:_data)?\.(?:size|shape).*loaded_weight|KeyError: [\"'](?:\w+\.)*(?:layers|"
     r"embed_tokens|lm_head|visual|language_model)\.\S*",
     "weights that were sent to the engine are not named or shaped as its model's: a wrapper's or adapter's prefix "
     "(_fsdp_wrapped_module, base_model.model), fused against split projections, tied or padded embeddings",
     "compare the names and shapes: rldbg weights; or rldbg show CHECKPOINT beside rldbg show MODEL"),
    (r"(?:[Ee]rror\(s\) in loading state_dict|size mismatch for |(?:Missing|Unexpected) key(?:\(s\)|s)? in "
     r"(?:checkpoint )?state_dict|CheckpointException)",
     "the checkpoint's weights are not the model's: another architecture or size, a vocabulary that was padded, "
     "an adapter or a wrapper's prefix in the names, or another sharding",
     "compare the names and shapes: rldbg show CHECKPOINT beside rldbg show MODEL"),
    (r"parameter group that doesn't match|loaded state dict "
     r"(?:contains|has)|optimizer.{0,40}state.{0,60}(?:mismatch|not match|"
     r"different)", "the optimizer's state in the checkpoint is not of this model: other parameter groups, frozen "
     "weights, "
     "an adapter or another sharding", "resume with the settings it was saved with, or load the weights alone"),
    (r"Model architectures .* (?:are not supported|failed to be inspected)|does not recognize this architecture"
     r"|has no (?:vLLM|SGLang) implementation|[Uu]nrecognized model in",
     "the installed version does not know the model's architecture, the model is newer than transformers or the engine",
     _VERSIONS),
    # Ray.
    (r"ObjectStoreFullError|[Oo]bject store (?:is full|memory)|because it is full|out of (?:object store )?disk",
     "Ray's object store is full: references to batches are kept, or it is small (it lies in /dev/shm)",
     "ray memory names who holds what; raise object_store_memory; drop references after each step"),
    (r"[Tt]otal available (?:GPU|NPU|CPU)s? [\d.]+ is less than|cannot be scheduled right now"
     r"|No available node types can fulfill"
     r"|[Pp]lacement group.*(?:cannot|could not|infeasible|failed|[Tt]ime)|[Ii]nsufficient (?:GPU )?resources"
     r"|[Nn]ot enough GPUs|infeasible (?:resource|request|task|actor)",
     "the placement group or actor asks for more GPUs (or CPUs) than the Ray cluster has free: too few nodes joined, "
     "another job holds them, or the configuration asks for too many",
     "ray status lists what is there and asked for; compare n_gpus_per_node * nnodes"),
    (r"RuntimeEnvSetupError|Failed to set ?up runtime env", "Ray could not build the runtime environment of its workers"
     " (a package, a working_dir that is too large)", "the log of runtime_env_setup in /tmp/ray/session_latest/logs"),
    (r"[Vv]ersion mismatch: The cluster was started with|Ray version mismatch",
     "nodes of the cluster have other versions of Ray or Python", "install the same version on every node"),
    (r"Failed to connect to (?:GCS|Ray cluster)|unable to connect to GCS|GCS server|missed too many heartbeats"
     r"|marked dead because|[Nn]ode .{0,80}(?:was|has been) marked dead",
     "a node of the Ray cluster is gone: it died (memory, preemption, hardware) or the network broke",
     "ray list nodes; dmesg and the raylet's log on the node"),
    (r"GetTimeoutError|Get timed out", "an object of Ray was not ready in time: its task hangs, or waits for resources",
     "ray list tasks --filter state=RUNNING; py-spy dump of its worker"),
    # Python's processes.
    (r"[Cc]annot pickle|[Cc]an't pickle|PicklingError|[Cc]ould not serialize|Can't get (?:local object|attribute)"
     r"|not serializ|SerializationError",
     "an object cannot be pickled for another process: a lambda, a local function or class, a lock, an open handle or "
     "a CUDA object in what is sent or captured",
     "define it at module level, and make what it holds in the worker; ray.util.inspect_serializability names it"),
    (r"Cannot re-initialize CUDA in forked subprocess", "a worker was forked after CUDA was initialised",
     "start workers by spawn: multiprocessing.set_start_method('spawn'), VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    (r"An attempt has been made to start a new process before",
     "a process is spawned at import: the script has no if __name__ == '__main__'", "guard the script's entry point"),
    (r"signal only works in main thread", "a verifier sets a signal (SIGALRM) for its time-out from a thread or an "
     "actor's thread: math_verify and others do", "run it in a process, or switch its time-out off"),
    (r"[Ee]vent loop is closed|no (?:current|running) event loop|asyncio\.run\(\) cannot be called",
     "asyncio is used across threads or loops: a client of one loop in another", "one loop per thread; make the client "
     "in the loop that uses it"),
    # The GPU.
    (r"uncorrectable ECC|ECC error|double.bit ECC|Xid.{0,60}: (?:48|63|64|92|94|95)\b|[Uu]ncorrectable (?:NVLink "
     r")?error|row.remap", "the GPU's memory has an uncorrectable ECC error: hardware",
     "nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace the GPU, and exclude the node"),
    (r"Xid.{0,60}: (?:79|119|120|109)\b|fallen off the bus|GPU (?:is )?lost|GPU has fallen",
     "the GPU is gone from the bus (or its firmware hangs): hardware, power or driver",
     "dmesg | grep -i xid; drain the node"),
    (r"Xid.{0,60}: (?:74|137|14[4-9]|150)\b|NVLink.*(?:error|fail|fatal)", "an NVLink failed: hardware",
     "nvidia-smi nvlink -e; drain the node"),
    (r"Xid", "the driver reports an error of the GPU; 13 and 31 are an invalid access of a kernel, most others "
     "hardware",
     "dmesg | grep -i xid; compute-sanitizer for 13 and 31"),
    (r"no kernel image is available|sm_\d+ is not compatible|not compatible with the current PyTorch installation"
     r"|arch.*not supported.*(?:sm_|compute)|PTX.*unsupported toolchain|unsupported toolchain",
     "the binary was not built for this GPU's architecture (sm)", "install a build for it (torch.cuda.get_arch_list())"
     ", or build with TORCH_CUDA_ARCH_LIST"),
    (r"driver version is insufficient|[Nn][Vv][Ii][Dd][Ii][Aa] driver .*too old|forward compatibility was attempted"
     r"|system has unsupported display driver", "the NVIDIA driver is older than the CUDA runtime needs",
     "nvidia-smi shows the driver's CUDA; update it or install a torch of an older CUDA"),
    (r"no CUDA-capable device|No CUDA GPUs are available|might not have a CUDA gpu|CUDA_ERROR_NO_DEVICE"
    r"|invalid device ordinal"
     r"|Torch not compiled with CUDA|devices are busy or unavailable|cuda is not available",
     "the process sees no such GPU: CUDA_VISIBLE_DEVICES is empty or short (Ray sets it for actors without GPUs), or "
     "another process has the device exclusively", "print CUDA_VISIBLE_DEVICES and torch.cuda.device_count() there"),
    (r"device-side assert|indexSelect|srcIndex|(?<!list )(?<!string )(?<!tuple )index out of (?:bounds|range)"
     r"|Assertion `.*(?:index|t >= 0|n_classes)",
     "an index out of range (a token id or label beyond the vocabulary), or another assertion of a kernel; kernels run "
     "later than the line that names them",
     "CUDA_LAUNCH_BLOCKING=1 names the true line; compare the largest token id with the embedding's rows"),
    (r"illegal memory access|misaligned address|illegal instruction|unspecified launch failure|invalid program counter",
     "a kernel failed: it read or wrote beyond its tensors (lengths or an index that do not fit, a fused attention or "
     "MoE kernel); kernels run later than the line that names them",
     "CUDA_LAUNCH_BLOCKING=1 names the true line; compute-sanitizer the access"),
    (r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
     "cuBLAS could not allocate its workspace: out of GPU memory (or a kernel failed before)",
     "leave memory free: a smaller batch or cache; CUDA_LAUNCH_BLOCKING=1 if there is plenty"),
    (r"CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|cuBLAS", "a matrix product failed: shapes or dtypes that the library "
     "does not take, an index error before it, or versions of cuBLAS and torch that do not fit",
     "CUDA_LAUNCH_BLOCKING=1; pip list | grep nvidia: a second cuBLAS beside torch's"),
    (r"cudaIpc|invalid resource handle|peer access is not supported|CUDA IPC",
     "memory is shared between processes (CUDA IPC) that do not see the same GPU, or whose owner has freed it",
     "look at CUDA_VISIBLE_DEVICES of both; keep the tensor until the other has read it"),
    # Attention, dtypes, shapes.
    (r"FlashAttention only supports? (?:fp16|half)|only supports? fp16 and bf16|FlashAttention.{0,40}dtype",
     "flash attention was handed float32: the model is loaded or autocast in another dtype than fp16 or bf16",
     "load with torch_dtype=torch.bfloat16, or autocast; LayerNorms kept in float32 upcast what follows"),
    (r"FlashAttention only supports (?:Ampere|Hopper)|requires? (?:device with )?(?:compute )?capability"
     r"|sm_?\d\d or (?:newer|higher)|Bfloat16 is only supported on GPUs with compute capability",
     "the kernel needs a newer GPU (compute capability)", "attn_implementation='sdpa', or dtype float16"),
    (r"FlashAttention forward only supports head dim|head[_ ]dim(?:ension)?.{0,30}(?:not supported|at most)",
     "flash attention does not support this head dimension", "attn_implementation='sdpa', or a newer flash-attn"),
    (r"undefined symbol|DLL load failed|GLIBC(?:XX)?_[\w.]+' not found|cannot open shared object file|symbol lookup "
     r"error",
     "a compiled extension was built for another torch, CUDA or libc (flash-attn's binary, most often), or a "
     "module's libraries stand "
     "before the system's (LD_LIBRARY_PATH)",
     "reinstall it against this torch: pip install --no-build-isolation --no-cache-dir flash-attn"),
    (r"FlashAttention2 has been toggled on|flash_attn seems to be not installed|flash[-_]attn.*not (?:installed|found)",
     "flash-attn is asked for and not installed", "pip install flash-attn, or attn_implementation='sdpa'"),
    (r"probability tensor contains either|invalid multinomial distribution|to satisfy the constraint"
     r"|[Pp]robabilities contain NaN",
     "the policy's probabilities are not finite: its logits are NaN or Inf, since its weights are (an update with a "
     "NaN gradient, a bad synchronisation), fp16 overflowed, or an attention row is masked whole",
     "the first metric or weight that is not finite, before this step; rldbg record -- YOUR COMMAND"),
    (r"[Ff]ound NaN in (?:local )?(?:forward|grad|loss)|found Inf in local|returned nan values|[Ll]oss (?:is|became) "
     r"(?:nan|inf)|NaN (?:detected|loss)|nan (?:detected|loss)",
     "a loss or gradient is not finite: an overflow or 0/0 in the forward or backward, or data that is (the line names "
     "where)", "rldbg record -- YOUR COMMAND, then rldbg diagnose rldbg-dump names the first tensor"),
    (r"No inf checks were recorded",
     "the scaler of fp16 found no gradient in any parameter of this optimizer: nothing it holds was part of the loss, "
     "or the weights themselves are in fp16",
     "print the names whose grad is not None before the step; bf16=True, which needs no scaler"),
    (r"loss scale already at minimum|loss scale.*cannot decrease",
     "fp16 overflows in every step until the loss scale is at its minimum: gradients are not finite",
     "train in bf16; look for the first NaN"),
    (r"Expected all tensors to be on the same device|found at least two devices|is on cpu.*cuda|tensors? .*different "
     r"devices|to be on the same device|on cuda:\d+ and \w+ (?:is )?on cuda:\d|same device as",
     "tensors of two devices meet: a model spread over several GPUs (device_map='auto') whose inputs or masks stay on "
     "the first, offloaded weights or optimizer state not loaded back, or an input left on the CPU",
     "one GPU per process (CUDA_VISIBLE_DEVICES, device_map={'': LOCAL_RANK}); move what the frame names; look whether "
     "offload and load are paired"),
    (r"(?:dtype|type|expected|same).{0,60}(?:\bByte\b|\bunsigned char\b|uint8)|(?:BFloat16|Half|Float|float|half|"
     r"c10::\w+) (?:!=|and) (?:Byte|unsigned char)",
     "a quantised weight (4 or 8 bits, kept as bytes) is multiplied raw, without being dequantised: a layer was "
     "reached beside its quantised forward (a patched or fused kernel, lm_head or an adapter of a quantised layer)",
     "load_in_4bit=False tells whether it is this; update bitsandbytes, PEFT and the trainer's patches together; keep "
     "lm_head out of the quantisation"),
    (r"must have the same dtype|expected (?:scalar type|m1 and m2|mat1 and mat2)|Input type .* and (?:weight|bias) type"
     r"|same dtype, but got|Index put requires the source and destination dtypes match|dtype mismatch",
     "tensors of two dtypes meet: an adapter, head or value model in float32 beside bf16 weights, outside of autocast",
     "cast the one the frame names, or run it under autocast"),
    (r"mat1 and mat2 shapes cannot be multiplied|must match the size of tensor|shape mismatch|size mismatch"
     r"|shape .{0,60}is invalid for input|[Ss]izes of tensors must match|could not be broadcast|shapes? .* not aligned"
     r"|expanded size of the tensor|should have the same (?:shape|number)|inconsistent tensor size|Expected size \d+ "
     r"but got",
     "shapes do not fit: prompt and response lengths, padding or a shift by one applied to one of two tensors, or "
     "sharded weights used whole", "print the shapes at the frame; rldbg record keeps both tensors"),
    (r"stack expects each tensor to be equal size|activate truncation and/or padding|expected sequence of length \d+ "
     r"at",
     "samples of a batch have other lengths: they are not padded (a collate function is missing)",
     "pad to the longest of the batch in the collate function"),
    (r"only support equal chunk|(?:batch[ _]size|batch|samples?).{0,80}(?:must be|is not|should be|not evenly) "
     r"(?:evenly )?(?:divisible|a multiple)|len\(batch_lst\)|!= chunks|should be larger than 0 after normalization"
     r"|^assert .*batch\w*(?: >= | > | == | % )"
     r"|(?:batch|rollout|micro)[\w.]*_?size\S* .{0,60}(?:must be|should be|is) (?:larger|greater|smaller|less|at "
     r"least)\b|not divisible by|[Cc]heck batch related parameters|must be (?:evenly "
     r")?divisible|(?:must|should|has to|needs to) be (?:evenly )?divisible by",
     "numbers do not divide: the batch (or heads, or world size) is no multiple of ranks, micro-batches, generations "
     "per prompt or parallel sizes, or smaller than they are (what is left for one rank is 0)",
     "batch = micro-batch x accumulation x data-parallel ranks, and a multiple of the generations per prompt"),
    (r"[Cc]ould not find the transformer layer class",
     "FSDP is to wrap a layer class that the model does not have: the model's _no_split_modules (or the "
     "configuration) names one of another variant (a vision-language model's for its text part)",
     "set wrap_policy.transformer_layer_cls_to_wrap to the class that print(model) shows for its layers"),
    (r"[Mm]ust flatten tensors with (?:the same|uniform)", "FSDP wraps frozen and trained parameters (LoRA), or two "
     "dtypes, into one flat tensor", "use_orig_params=True, or an auto-wrap policy for LoRA; one dtype"),
    (r"different (?:number of tensors was saved|metadata)|CheckpointError|Recomputed values",
     "gradient checkpointing recomputed something else than the forward: the forward is not repeatable (a cache, "
     "dropout's state, a branch, autocast or hooks that differ)",
     "use_cache=False; gradient_checkpointing_kwargs={'use_reentrant': False}; find what the second forward changes"),
    (r"does not require grad|no grad_fn", "the loss hangs on no parameter: detached, made under no_grad, every weight "
     "frozen, or checkpointed with inputs that need no gradient",
     "model.enable_input_require_grads() with checkpointing; look for no_grad, detach and .item()"),
    (r"backward through the graph a second time|[Ss]aved intermediate values of the graph",
     "a graph is used for two backward calls: something of an earlier step (a loss, values, a hidden state) was kept "
     "with its graph", "detach what is kept from step to step"),
    (r"modified by an inplace operation|has been modified inplace",
     "a tensor that the backward needs was changed in place (masked_fill_, +=, or "
     "weights that were synchronised or updated between forward and backward)",
     "torch.autograd.set_detect_anomaly(True) names the forward"),
    (r"[Ee]xpected to have finished reduction|[Ee]xpected to mark a variable ready only once",
     "some parameters got no gradient in this step (unused in the loss, DDP), or got it twice (reentrant "
     "checkpointing, shared weights)", "find_unused_parameters=True, or use_reentrant=False"),
    # Files that are broken or absent.
    (r"out of shared memory|shared memory limit|unable to (?:write to|open) (?:file|shared memory object) </torch_"
     r"|(?<!directory: ')/dev/shm|[Ss]hared memory segment|[Bb]us error|SIGBUS|exitcode: -7\b",
     "shared memory (/dev/shm) is full: workers hand tensors over by it, and a container has 64 MB of it unless "
     "it is told otherwise", "df -h /dev/shm; docker run --shm-size=16g, or fewer data loader workers"),
    (r"No space left on device|Errno 28\b|ENOSPC|[Dd]isk quota exceeded|PytorchStreamWriter failed|file write failed",
     "the disk is full: what was being written (a checkpoint, a cache) is broken",
     "df -h; keep fewer checkpoints; resume from the last whole one"),
    (r"Weights only load failed|weights_only", "torch.load refuses to run code of a pickle (weights_only=True is the "
     "default since torch 2.6)", "torch.serialization.add_safe_globals for what it names, if you trust the file"),
    (r"PytorchStreamReader failed|unexpected EOF|HeaderTooLarge|MetadataIncomplete|InvalidHeaderDeserialization"
     r"|SafetensorError|UnpicklingError|Ran out of input|incomplete metadata|metadata is not None"
     r"|file in archive is not|not a "
     r"ZIP|invalid load key",
     "a checkpoint or file is broken: half written, still being written, or a Git LFS pointer",
     "compare its size with another shard's; download or save it again; resume from the last whole one"),
    (r"[Rr]an out of memory in memory space hbm",
     "the device (TPU) has too little memory (HBM) for the program that is compiled: the line says how much it takes",
     "smaller micro-batches or shorter sequences, more shards, rematerialisation (gradient checkpointing)"),
    (r"train_batch_size \(\d+\) must be >= .{0,40}mini_batch_size",
     "the batch of a step is smaller than the mini-batch of one update: settings that do not fit",
     "set ppo_mini_batch_size to train_batch_size or to a divisor of it"),
    (r"Object of type (?:bool_?|u?int\d+|float\d+|ndarray|Tensor|bfloat16) is not JSON serializable",
     "json cannot write a number of NumPy or torch: what was to be saved is lost, the training is not at fault",
     "bool(x), float(x) or x.tolist() before json.dump, or json.dump(..., default=str)"),
    (r"Stale file handle|Errno 116\b|Input/output error|Errno 5\b|Read-only file system|Errno 30\b"
     r"|[Tt]ransport endpoint|Errno (?:108|112|121)\b|Remote I/O error|\] No data available",
     "the file system fails (a network mount that went away, a disk)", "dmesg; mount; write elsewhere"),
    (r"Permission ?(?:denied|Error)|Errno 13\b", "no right to read or write the path it names (a cache of another "
     "user, a mount that is read-only)", "ls -l PATH; set HF_HOME and the output folder to a place of your own"),
    # Hugging Face's hub and the network.
    (r"GatedRepoError|gated repo|401 Client Error|403 (?:Client Error|Forbidden)|[Ii]nvalid (?:user "
     r")?token|Unauthorized",
     "the hub refuses: the repository is gated or private, and there is no token that may read it",
     "huggingface-cli login, or HF_TOKEN in every worker's environment; accept the model's licence"),
    (r"outgoing traffic has been disabled|OfflineModeIsEnabled|[Oo]ffline mode is enabled"
     r"|(?:couldn't|could not) connect to ['\"]?https://huggingface|LocalEntryNotFound"
     r"|[Cc]annot find (?:the )?(?:requested files|an appropriate cached snapshot)",
     "the model or data set is not in this node's cache, and the hub is not asked: offline mode (HF_HUB_OFFLINE, "
     "TRANSFORMERS_OFFLINE, local_files_only), or no network that reaches huggingface.co from here; the name may be "
     "right",
     "huggingface-cli download NAME on a node with a network, into the HF_HOME that the run reads (echo $HF_HOME; ls "
     "$HF_HOME/hub); or unset HF_HUB_OFFLINE where there is a network"),
    (r"429 Client Error|Too Many Requests|RateLimitError|rate limit",
     "a server limits the rate of requests: every rank downloads, or a judge is called too often",
     "download once and share the cache; fewer calls at once, with retries"),
    (r"RepositoryNotFoundError|is not a local folder and is not a valid model identifier|404 Client Error"
     r"|EntryNotFoundError|does not appear to have a file named|HFValidationError|Repo id must|No config file found",
     "there is no such model, file or folder: a name mistyped, or a local path that does not exist on this node",
     "ls PATH on the node that failed; huggingface-cli download NAME"),
    (r"OfflineModeIsEnabled|LocalEntryNotFoundError|couldn't connect to|cannot find the requested files|Max retries "
     r"exceeded|Name(?:Resolution)?Error.*resolve|Temporary failure in name resolution|Network is unreachable|Name or "
     r"service not known|ConnectionError.*(?:huggingface|hub)|offline mode",
     "no network where it is needed (or offline mode and the files are not in the cache of this node)",
     "download beforehand and set HF_HUB_OFFLINE=1 with HF_HOME on a shared disk; proxy settings of the workers"),
    # Tokenizers, templates, data.
    (r"does not have a padding token|pad_token.{0,20}(?:is )?(?:None|not set)|Cannot handle batch sizes > 1 if no "
     r"padding",
     "the tokenizer has no pad token", "set pad_token to a token of its own that is not eos_token, or its end of "
     "response is masked with the padding"),
    (r"chat_template is not set|(?:no|not have a) chat template|jinja2\.exceptions|Conversation roles must alternate"
     r"|TemplateError|apply_chat_template", "the chat template is missing or refuses the messages (roles that do not "
     "alternate, a system message it does not know)", "print one prompt; set tokenizer.chat_template, or fix the "
     "roles"),
    (r"instantiate the backend tokenizer|Can't load tokenizer|Unrecognized tokenizer|tokenizer class you load",
     "the tokenizer's files are missing or need another package (sentencepiece, tiktoken, protobuf)",
     "pip install sentencepiece protobuf tiktoken; ls the model's folder"),
    (r"num_samples=0|[Dd]ata(?:set|loader) is empty|[Ee]mpty (?:data(?:set|loader)|batch)|no (?:samples|prompts) left",
     "no sample is left: the filter (length of prompts, a split's name) threw all away, or the batch is larger than "
     "the data", "print the number of samples after each filter"),
    (r"DatasetGenerationError|CastError|ArrowInvalid|pyarrow\.lib|column names don't match|Column.{0,60}not (?:in|found"
     r"|exist)|[Nn]o column|NonMatchingSplits|DataFilesNotFoundError|Couldn't find a dataset",
     "the data set's columns, types or files are not what is expected",
     "load it alone: datasets.load_dataset(...)[0]; compare its columns with the configuration's names"),
    (r"KeyError: ['\"](?:prompt|answer|ground_truth|solution|messages|question|reward_model|data_source|chosen|rejected"
     r"|text|label|labels|completion|input|problem|target|extra_info)['\"]",
     "the data set has no such column: the key that the trainer or the reward function reads is named otherwise",
     "print one sample's keys; set the configuration's key (prompt_key, label_key)"),
    (r"DataLoader worker .*(?:exited unexpectedly|killed by signal)",
     "a data loader's worker died: out of host memory, a crash in native code, or shared memory that is full",
     "num_workers=0 shows its own error; dmesg | grep -i oom; df -h /dev/shm"),
    # Configuration and versions.
    (r"omegaconf|hydra\.errors|Could not override|is not in struct|MissingMandatoryValue|ConfigAttributeError"
     r"|ConfigKeyError|Missing mandatory value|ConfigCompositionException|Key '.*' (?:is )?not in",
     "the configuration has no such key, or lacks one: mistyped, moved in a newer version, or to be added by +key=; "
     "where the framework's own code reads or writes it (last frame), code and configuration are of two versions",
     "compare with the version's default configuration; +key=value adds a new one"),
    (r"(?:unknown|unexpected|unrecogni[sz]ed|invalid|unused) (?:keys?|fields?|options?|parameters?)\b.{0,12}[(\[{:'\"]"
     r"|Some keys? .{0,80}not used by",
     "a configuration file holds keys that the installed version does not know: written for another version, or "
     "mistyped",
     "take the keys that it names out, or install the version that the file was written for; the version's own example "
     "of that file beside it"),
    (r"unrecognized arguments|error: (?:the following )?arguments?|invalid choice:|validation errors? for "
     r"|ValidationError"
     r"|(?:Scanner|Parser|Constructor)Error", "the configuration or command line does not validate: an option that "
     "does not exist in this version, or of another type", "compare with --help of the installed version"),
    (r"'NoneType' object|NoneType", "a value that was to be there is None: an optional field of the sample, a model "
     "or config "
     "part that was not made, a function that returned nothing", "the frame above names it; print it one call earlier"),
    (r"A module that was compiled using NumPy 1|numpy\.dtype size changed|numpy\.core\.multiarray failed",
     "a package was compiled for another NumPy (1.x against 2.x)", "pip install 'numpy<2', or update the package"),
    (r"requires the (?:[\w.-]+) library but it was not found"
     r"|requires? .{0,40}(?:to be installed|, which is not installed)",
     "a package is not installed that a part of the model asks for (its processor of images or videos, a tokenizer, a "
     "backend)", "pip install it into the Python that runs the trainer (torchvision beside the installed torch), and "
     "start again"),
    (r"unexpected keyword argument|cannot import name|has no attribute|takes \d+ positional|missing \d+ required "
     r"(?:positional|keyword)|No module named|ImportError|ModuleNotFoundError|VersionConflict|requires "
     r".*(?:but|version)",
     "versions do not fit: a library is called with a name or argument that the installed one does not have",
     _VERSIONS),
    # Compilers.
    (r"OutOfResources|out of resource: shared memory", "a Triton kernel needs more shared memory than the GPU has",
     "smaller blocks or num_stages; update Triton"),
    (r"Failed to find C compiler|Python\.h|nvcc.*not found|CUDA_HOME|ninja.*(?:required|not found|error)|Error "
     r"building "
     r"extension", "a kernel cannot be compiled: no C compiler, Python headers or CUDA toolkit in the container",
     "install gcc, python3-dev and the CUDA toolkit; set CC and CUDA_HOME"),
    (r"overwritten by a subsequent run|CUDAGraphs? that has been overwritten",
     "an output of a CUDA graph is kept over its next run", "clone it, or torch.compiler.cudagraph_mark_step_begin()"),
    (r"torch\._dynamo\.exc|BackendCompilerFailed|InductorError|LoweringException|torch\._inductor|CompilationError"
     r"|Triton Error|triton\.compiler|torch\._subclasses|DynamicOutputShape",
     "torch.compile or Triton failed on this code, no error of the model itself",
     "TORCHDYNAMO_DISABLE=1 (or enforce_eager) tells; TORCH_LOGS=+dynamo names the line"),
    # Rewards, judges, tracking.
    (r"Generated too many\. Please check|max_num_gen_batches",
     "dynamic sampling finds no groups whose rewards differ: every answer to a prompt is right, or every one wrong "
     "(data too hard or too easy, or a reward that never fires)",
     "look at the rewards of one batch by hand; filter prompts by solve rate"),
    (r"Reward function is not implemented for data_source|[Nn]o reward (?:function|manager) for data_source",
     "the data source of the sample (its column data_source) is empty or none that the built-in rewards know",
     "set data_source in the data set to a known name, or custom_reward_function.path and .name to a function of your "
     "own"),
    (r"vLLM server can't be reached|[Ss]erver is not up yet|(?:can't|could not|cannot|failed to|unable to) "
     r"(?:reach|connect to) (?:the )?(?:vLLM|SGLang|inference|rollout) (?:server|engine)"
     r"|(?:vLLM|SGLang|inference|rollout) (?:server|engine)\S* .{0,40}(?:not (?:ready|reachable|healthy|up)|unreachable"
     r"|didn't start|did not start)",
     "no inference server answers at that address: it was not started, still loads its model, died, or listens at "
     "another host or port",
     "start it (trl vllm-serve --model ..., on GPUs of its own) or let the trainer hold the engine "
     "(vllm_mode='colocate'); curl http://HOST:PORT/health from the trainer's node"),
    (r"^(?=.*(?:[Rr]ollout|[Tt]ask|[Rr]equest|[Ss]ample|[Pp]rompt|[Tt]rajector|[Ee]pisode))(?!.*\b[Jj]ob\b)"
     r".*\b[Rr]equeu(?:ed|ing)\b",
     "rollouts are not answered in time and are given out again: an agent, tool or engine is too slow or hangs; what "
     "comes late belongs to a batch that is gone (its id is unknown there)",
     "look at the agent's own log; raise its time limit, or limit its turns and tokens"),
    (r"unsupported operand type\(s\) for .{0,40}'(?:dict|list|tuple|str)'|type \w+ doesn't define __round__",
     "a mapping, list, text or None stands where a number is needed: most often a reward (function or model) that "
     "returns more than one number, and no key is named that picks one, or none for a sample",
     "print what it returns; let it return a float, or name the key (--reward-key)"),
    (r"Request error for \d+ times, returning None|[Rr]emote (?:RM|reward model).{0,60}(?:fail|unreachable|no answer)",
     "the reward server (remote reward model, remote_rm_url) cannot be reached or answers no request: it is down, its "
     "address or port is another, or it is too slow (connection refused says that nothing listens there)",
     "the lines before name the URL: curl it from that node; look whether the server lives, and its own log"),
    (r"wandb", "Weights & Biases cannot be reached or is not logged in", "wandb login, or WANDB_MODE=offline"),
    (r"judge.*(?:fail|time)|reward[ _](?:server|model|function"
     r"|manager).*(?:fail|tim(?:e|ed)[ _-]?out|error|unreachable)|sandbox.*(?:fail|tim(?:e|ed)[ _-]?out|error"
     r"|unreachable)|SandboxError|compute_score|code execution.*(?:fail|time)",
     "the reward failed: a judge, verifier or sandbox that does not answer in time or raises on a response",
     "call it by hand on the response it names; catch it, count it, and do not score it 0 in silence"),
    (r"shared memory broadcast block", "a worker of the engine hangs, or works on one step for minutes: the others "
     "wait for it", "py-spy dump of the engine's workers: the one that is not waiting is the cause"),
    (r"JSONDecodeError|Expecting value: line", "what was read is no JSON: an empty or half-written file, or a server "
     "(judge, sandbox) that answered with an error page", "print the text that was parsed"),
    (r"RecursionError|maximum recursion", "a recursion without an end: a response or parser that nests too deeply, or "
     "a proxy that copies itself", "look at the repeated frames"),
    (r"INTERNAL ASSERT FAILED", "an assertion inside torch: a bug of it, or memory that was overwritten",
     "the same with CUDA_LAUNCH_BLOCKING=1; look for the text in torch's issues"),
)  # fmt: skip

#: Texts that say how it failed, and not why.
_GENERAL: tuple[tuple[str, str, str], ...] = (
    (r"FileNotFoundError|No such file or directory|Errno 2\b|does not exist|NotADirectoryError",
     "a file or folder that it names does not exist on this node", "ls PATH on the node that failed; paths relative to "
     "the working directory are others in a Ray worker"),
    (r"ReadTimeout|ConnectTimeout|TimeoutError|TimeoutExpired|Timeout(?:Exception)?\b|[Tt]imed out",
     "something did not answer in time: a server (judge, sandbox, engine), a lock or a subprocess",
     "the frame names what was waited for; look whether it lives, and its own log"),
    (r"Request failed: [45]\d\d|Internal Server Error|50[234] (?:Server Error|Bad Gateway|Service Unavailable)",
     "a server (engine, judge, sandbox) answered with an error: what failed stands in its own log",
     "the server's log at that time; send it the request by hand"),
    (r"Connection ?[Rr]efused(?:Error)?|All connection attempts failed|Cannot connect to host|Failed to establish a "
     r"new "
     r"connection",
     "no server listens there: it did not start, died, or the address is another", "curl the address from that node"),
    (r"^a traceback whose exception is not in the log", "a traceback ends without its exception: the log was cut, or "
     "other lines stand where it was", "the lines that follow in the whole log; the last frame and its code say where"),
    (r"ZeroDivisionError|division by zero", "a division by 0: a batch, group or mask with nothing in it",
     "print the number of samples and counted tokens at the frame"),
    (r"KeyError: ['\"](?:tool|function|system|user|assistant|developer|gpt|human|observation|ipython)['\"]",
     "the role that it names is not known there: the messages have a role that the template's map of roles lacks (or "
     "the sample no such field)", "print the roles of the data; add it to the template's roles, or rename it in the "
     "data"),
    (r"KeyError", "a key is missing: a column of the data, a field of the batch, or a name of the configuration or "
     "state dict", "print the keys that are there at the frame"),
    (r"IndexError|list index out of range|out of bounds", "an index beyond the end: an empty list or batch, or lengths "
     "that do not fit", "print the lengths at the frame"),
    (r"AssertionError", "an assertion of the code: the frame above says which", "read the condition at the frame"),
)  # fmt: skip

#: A peer that is gone: the process at the other end tells why, where the log holds its words.
_CUT_OFF: tuple[tuple[str, str, str], ...] = (
    (r"ChunkedEncodingError|IncompleteRead|RemoteDisconnected"
     r"|Remote end closed connection|ServerDisconnected\w*|Server disconnected|Connection aborted",
     "the server closed the connection in the middle of a request: it died, was restarted, or is overloaded (an "
     "inference server beside the trainer, a judge)",
     "its own log at that time names the error; look whether it lives"),
)  # fmt: skip

#: The same of texts that only tell of another failure.
_CONSEQUENCES: tuple[tuple[str, str], ...] = (
    (r"[Ee]vent loop is closed|no running event loop|attached to a different (?:event )?loop",
     "an event loop is gone, or was never there: what runs in one is used as the program closes, or from a thread "
     "without one; the first exception of the same process tells why"),
    (r"register[_ ]center", "the register center actor of the worker group never came up: its first worker was not "
     "scheduled or did not start (resources that another job or a stale Ray session holds, a node that did not join, a "
     "worker that died at its start)"),
    (r"^class_name: |ActorDiedError|RayActorError|ActorUnavailableError|actor (?:is dead|died|has died)"
     r"|WorkerCrashedError|worker died or was killed|OwnerDiedError|ObjectLostError|ObjectReconstructionFailed",
     "an actor or worker of Ray died; this line only tells that it is gone"),
    (r"EngineDeadError|EngineCore (?:encountered|died|failed)|Engine core (?:proc|initialization)|Background loop (?:is"
     r"|has)|[Ee]ngine (?:loop |process )?(?:is dead|has died|died)|Scheduler hit an exception|Engine process failed",
     "the inference engine died (vLLM's EngineCore, a scheduler of SGLang), and generation with it"),
    (r"ChildFailedError|^\s*exitcode\s+: |^\s*rank\s+: |ProcessExitedException|ProcessRaisedException"
     r"|ProcessGroup.*abort|Sending process|closing signal|CalledProcessError|exited with (?:exit )?code [1-9]",
     "the launcher saw a process fail and ended the others"),
    (r"Caught \w+ in (?:DataLoader worker|replica|pin memory)",
     "a data loader's worker (or a replica) raised: its own exception stands below"),
    (r"scheduler died during initialization|[Ss]erver failed to start|NCCL communicator was aborted",
     "a process that was to come up (an engine, a rank) died, or was not ready in time"),
    (r"ncclRemoteError|ncclInProgress|remote process exited|Connection (?:closed|reset) by (?:remote )?peer|Broken "
     r"?[Pp]ipe|ConnectionResetError|EOFError|Socket closed|[Rr]ead error|retrieving ncclUniqueId|UNAVAILABLE",
     "the process at the other end is gone: it died first"),
    (r"(?:One or more|All) \w+ servers died|Background \w+ process died|failure count \d+ exceeds",
     "a process of the run is gone (an engine, a trainer, a collector), and the others end with it: its own log names "
     "the cause, or the lines above"),
    (r"Back-off restarting failed container",
     "the container ends again and again, and Kubernetes starts it anew: its own log of the last start names the cause "
     "(kubectl logs --previous)"),
    (r"SupervisionError|exited because of the following reason|[Rr]ollout thread is not alive"
     r"|(?:Producer|Consumer) thread failed",
     "an actor or thread of the run is gone: what it raised stands above, or in its own log"),
    (r"Job entrypoint command failed|^(?:\S+ ){0,4}\w{3,20} failed with exit code [1-9]",
     "a process of the run (the job's entrypoint, an orchestrator, a trainer) ended with an error code: its own log "
     "names the cause, or the lines above"),
    (r"(?:[Tt]hread|[Tt]ask|[Ww]orker|[Pp]rocess|[Ww]orkflow|[Cc]oroutine|[Ee]xecutor)s? (?:has |have )?"
     r"(?:encountered|raised|failed with|died (?:of|with)|exited with|stopped by) (?:an? )?(?:unhandled )?"
     r"(?:exception|error)\W{0,3}$",
     "another thread, task or process of the run raised: its own exception stands above"),
    (r"Broken ?Process ?Pool|[Pp]rocess pool .*(?:terminated|broken)",
     "a worker process ended abruptly: out of host memory, or native code crashed"),
)  # fmt: skip

_KNOWN: tuple[Failure, ...] = (
    *(
        Failure(regex(pattern), cause, step)
        for pattern, cause, step in (
            *LIMITS,
            *REFUSALS,
            *FIRST,
            *ENVIRONMENT,
            *_DEATHS,
            *MODELS,
            *SETTINGS,
            *BATCHES,
            *SERVICES,
            *TOOLING,
        )
    ),
    *(Failure(regex(pattern), cause, step, follows=True) for pattern, cause, step in _CUT_OFF),
    *(Failure(regex(pattern), cause, _OTHER_FIRST, follows=True) for pattern, cause in _CONSEQUENCES),
    *(Failure(regex(pattern), cause, step, general=True) for pattern, cause, step in (*CODE, *EMPTY, *_GENERAL)),
)


@lru_cache(maxsize=1024)
def failure_of(text: str) -> Failure | None:
    """What a line that tells of a failure means; None where the table does not know it."""
    return next((each for each in _KNOWN if each.pattern.search(text)), None)
