# ruff: noqa: E501 - they are the programs' own lines
"""Failure texts of the stack, as its programs print them: each with words that the headline has to have."""

from __future__ import annotations

#: name -> (text, regular expression that is found in claim or cause of the first finding)
SAID: dict[str, tuple[str, str]] = {
    "vllm-preempt": (
        "WARNING 08-20 10:18:39 scheduler.py:1141] Sequence group 147 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption=1\n",
        r"preempt",
    ),
    "sgl-retract": (
        "[2025-06-11 08:31:05 TP0] Decode out of memory happened. #retracted_reqs: 4, #new_token_ratio: 0.71\n"
        "[2025-06-11 08:31:05 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 4, #new_token_ratio: 0.7012 -> 0.8012\n",
        r"preempt",
    ),
    "vllm-maxseq": (
        "(EngineCore_0 pid=8812) ERROR 09-12 10:00:00 [core.py:708] Traceback (most recent call last):\n"
        '(EngineCore_0 pid=8812) ERROR 09-12 10:00:00 [core.py:708]   File "/usr/lib/vllm/v1/engine/core.py", line 699, in run_engine_core\n'
        "(EngineCore_0 pid=8812) ERROR 09-12 10:00:00 [core.py:708]     engine_core = EngineCoreProc(*args)\n"
        "(EngineCore_0 pid=8812) ERROR 09-12 10:00:00 [core.py:708] ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.43 GiB). Based on the available memory, the estimated maximum model length is 77248.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
        r"KV cache cannot hold one request",
    ),
    "vllm-cacheblocks": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n",
        r"KV cache",
    ),
    "vllm-free": (
        "ValueError: Free memory on device (21.33/79.11 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n",
        r"another process",
    ),
    "prompt-long": (
        "ValueError: The decoder prompt (length 9241) is longer than the maximum model length of 8192. Make sure that `max_model_len` is no smaller than the number of text tokens.\n",
        r"max_model_len",
    ),
    "multinomial": (
        "Traceback (most recent call last):\n"
        '  File "/x/transformers/generation/utils.py", line 2655, in sample\n'
        "    next_tokens = torch.multinomial(probs, num_samples=1).squeeze(1)\n"
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0\n",
        r"not finite",
    ),
    "oom-then-nccl": (
        "[rank0]:[E1125 10:12:01.001 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1204, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.\n"
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/x/actor.py", line 120, in update_policy\n'
        "[rank3]:     logits = output.logits.float()\n"
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 3 has a total capacity of 79.11 GiB of which 4.02 GiB is free. Process 812 has 75.08 GiB memory in use.\n",
        r"out of GPU memory",
    ),
    "actor-then-oom": (
        "(raylet, ip=10.0.0.4) [2025-03-02 11:02:11,331 E 811 811] (raylet) node_manager.cc:3193: 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: abc, IP: 10.0.0.4)\n"
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
        r"out of host memory",
    ),
    "ray-oom2": (
        "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.\n"
        "\tclass_name: WorkerDict\n"
        "(raylet) Task was killed due to the node running low on memory.\n",
        r"out of host memory",
    ),
    "gpus": (
        "ValueError: Total available GPUs 0 is less than total desired GPUs 8\n",
        r"GPUs",
    ),
    "autoscaler": (
        "(autoscaler +1m22s) Error: No available node types can fulfill resource request {'GPU': 8.0}. Add suitable node types to this cluster to resolve this issue.\n",
        r"GPUs",
    ),
    "resched": (
        "(scheduler +43s) Tip: use `ray status` to view detailed cluster status.\n"
        "(scheduler +43s) Warning: The following resource request cannot be scheduled right now: {'CPU': 1.0, 'GPU': 1.0}. This is likely due to all cluster resources being claimed by actors.\n",
        r"GPUs",
    ),
    "objstore": (
        "ray.exceptions.ObjectStoreFullError: Failed to put object 00ffff in object store because it is full. Object size is 2312312 bytes.\n",
        r"object store",
    ),
    "pickle": (
        "TypeError: cannot pickle '_thread.RLock' object\n",
        r"pickle",
    ),
    "ecc": (
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n",
        r"ECC",
    ),
    "xid79": (
        "[Tue Mar  4 10:11:12 2025] NVRM: Xid (PCI:0000:1a:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n",
        r"bus",
    ),
    "sm": (
        "RuntimeError: CUDA error: no kernel image is available for execution on the device\n",
        r"architecture",
    ),
    "driver": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver\n",
        r"driver",
    ),
    "cublasalloc": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
        r"out of GPU memory|memory",
    ),
    "fork": (
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method\n",
        r"fork",
    ),
    "fa-dtype": (
        "RuntimeError: FlashAttention only support fp16 and bf16 data type\n",
        r"flash attention.*float32|float32",
    ),
    "fa-symbol": (
        "ImportError: /usr/lib/python3/dist-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRefINS2_6SymIntEEE\n",
        r"built for another torch",
    ),
    "fa-ampere": (
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n",
        r"newer GPU",
    ),
    "dynamo": (
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n"
        "RuntimeError: Triton Error [CUDA]: invalid device context\n",
        r"torch.compile|Triton",
    ),
    "triton-shm": (
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.\n",
        r"shared memory",
    ),
    "statedict": (
        "RuntimeError: Error(s) in loading state_dict for Qwen2ForCausalLM:\n"
        "\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([151936, 1536]) from checkpoint, the shape in current model is torch.Size([152064, 1536]).\n",
        r"not the model's",
    ),
    "ckpt-meta": (
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.\n",
        r"checkpointing",
    ),
    "padtok": (
        "ValueError: Asking to pad but the tokenizer does not have a padding token. Please select a token to use as `pad_token`\n",
        r"pad token",
    ),
    "chat": (
        "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was passed!\n",
        r"chat template",
    ),
    "jinja": (
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/...\n",
        r"chat template",
    ),
    "gated": (
        "OSError: You are trying to access a gated repo.\n"
        "Make sure to have access to it at https://huggingface.co/meta-llama/Llama-3.1-8B.\n"
        "401 Client Error. (Request ID: Root=1)\n",
        r"gated",
    ),
    "offline": (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n",
        r"network",
    ),
    "keyerr": (
        "Traceback (most recent call last):\n"
        '  File "/x/verl/trainer/ppo/ray_trainer.py", line 12, in fit\n'
        "    x = row['reward_model']['ground_truth']\n"
        "KeyError: 'ground_truth'\n",
        r"column",
    ),
    "chunk": (
        "AssertionError: only support equal chunk. Got size of DataProto 63 and chunk 8.\n",
        r"divi",
    ),
    "trlgen": (
        "ValueError: The global train batch size (6 x 1) must be evenly divisible by the number of generations per prompt (4). Given the current train batch size, the valid values for the number of generations are: [2, 3, 6].\n",
        r"divi",
    ),
    "sandbox": (
        "ERROR:reward:compute_score timed out after 10s for sample 12\n"
        "ERROR:reward:compute_score timed out after 10s for sample 14\n",
        r"reward",
    ),
    "wandb": (
        "wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec.\n",
        r"Weights & Biases",
    ),
    "port": (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n",
        r"port",
    ),
    "shm": (
        "RuntimeError: DataLoader worker (pid 3312) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.\n",
        r"shared memory",
    ),
    "fds": (
        "OSError: [Errno 24] Too many open files\n",
        r"file handles",
    ),
    "hydra": (
        "Could not override 'actor_rollout_ref.rollout.temprature'.\n"
        "To append to your config use +actor_rollout_ref.rollout.temprature=1.0\n"
        "Key 'temprature' is not in struct\n"
        "    full_key: actor_rollout_ref.rollout.temprature\n"
        "    object_type=dict\n",
        r"configuration",
    ),
    "omega": (
        "omegaconf.errors.ConfigAttributeError: Key 'use_kl_loss' is not in struct\n"
        "    full_key: actor.use_kl_loss\n"
        "    object_type=dict\n",
        r"configuration",
    ),
    "argparse": (
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --num_generation 8\n",
        r"command line|configuration",
    ),
    "kwarg": (
        "TypeError: GRPOConfig.__init__() got an unexpected keyword argument 'vllm_gpu_memory_utilization'\n",
        r"versions",
    ),
    "dup": (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000\n",
        r"one GPU",
    ),
    "tensorsize": (
        "RuntimeError: The size of tensor a (1023) must match the size of tensor b (1024) at non-singleton dimension 1\n",
        r"shapes",
    ),
    "dtype": (
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16\n",
        r"dtype",
    ),
    "device": (
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!\n",
        r"device",
    ),
    "nograd": (
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n",
        r"no parameter",
    ),
    "inplace": (
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [1, 1024]], which is output 0 of SoftmaxBackward0, is at version 1; expected version 0 instead.\n",
        r"in place",
    ),
    "ddp": (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.\n",
        r"unused",
    ),
    "zero3": (
        "RuntimeError: 'weight' must be 2-D\n",
        r"gathered",
    ),
    "flat": (
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32\n",
        r"FSDP",
    ),
    "weightsync": (
        "(WorkerDict pid=123) Traceback (most recent call last):\n"
        '(WorkerDict pid=123)   File "/x/vllm/model_executor/models/qwen2.py", line 300, in load_weights\n'
        "(WorkerDict pid=123)     param = params_dict[name]\n"
        "(WorkerDict pid=123) KeyError: 'base_model.model.model.layers.0.self_attn.qkv_proj.base_layer.weight'\n",
        r"weights that were sent",
    ),
    "tp": (
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).\n",
        r"tensor parallel",
    ),
    "arch": (
        "ValueError: Model architectures ['Qwen3NextForCausalLM'] are not supported for now. Supported architectures: dict_keys(['AquilaModel'])\n",
        r"newer",
    ),
    "arch2": (
        "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize this architecture.\n",
        r"newer|version",
    ),
    "gloo": (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:41322\n",
        r"died first",
    ),
    "gloomesh": (
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error\n",
        r"gloo",
    ),
    "store": (
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 7/8 clients joined.\n",
        r"ranks did not all meet",
    ),
    "sgl-watchdog": (
        "[2025-06-11 08:31:05 TP1] Watchdog timeout (self.watchdog_timeout=300)\n"
        "[2025-06-11 08:31:05] Received sigquit from a child process. It usually means the child failed.\n",
        r"scheduler made no step",
    ),
    "vllm-shm": (
        "INFO 10-11 10:00:00 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).\n"
        * 3,
        r"hang",
    ),
    "badckpt": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory\n",
        r"broken",
    ),
    "safet": (
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge\n",
        r"broken",
    ),
    "numpy": (
        "A module that was compiled using NumPy 1.x cannot be run in\n"
        "NumPy 2.1.0 as it may crash. To support both 1.x and 2.x\n"
        "ImportError: numpy.core.multiarray failed to import\n",
        r"NumPy",
    ),
    "mathverify": (
        "ValueError: signal only works in main thread of the main interpreter\n",
        r"time-out",
    ),
    "dapo": (
        "ValueError: num_gen_batches=10 >= max_num_gen_batches=10. Generated too many. Please check if your data are too difficult. You could also try set max_num_gen_batches=0 to enable endless trials.\n",
        r"dynamic sampling",
    ),
    "threads": (
        "RuntimeError: can't start new thread\n",
        r"threads",
    ),
    "wakeoom": (
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n",
        r"out of GPU memory",
    ),
    "noise": (
        "GRPO:  3%|█  | 3/100 [00:41<22:10, 13.7s/it]\r"
        "\x1b[36m(WorkerDict pid=123, ip=10.0.0.1)\x1b[0m RuntimeError: CUDA error: an illegal memory access was encountered\n"
        "\x1b[36m(WorkerDict pid=123)\x1b[0m CUDA kernel errors might be asynchronously reported at some other API call [repeated 7x across cluster]\n",
        r"kernel failed",
    ),
    "raytask": (
        "ray.exceptions.RayTaskError(ValueError): \x1b[36mray::WorkerDict.actor_rollout_generate_sequences()\x1b[39m (pid=9912, ip=10.0.0.2, actor_id=abc, repr=<verl.WorkerDict object at 0x7f>)\n"
        '  File "/x/vllm/v1/engine/processor.py", line 380, in _validate_model_input\n'
        "    raise ValueError(\n"
        "ValueError: The decoder prompt (length 5021) is longer than the maximum model length of 4096.\n",
        r"max_model_len",
    ),
    "collmismatch": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[1]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLGATHER).\n",
        r"different collectives",
    ),
    "barrier": (
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 1800000ms for send operation to complete\n",
        r"never joined|stalled",
    ),
    "nanlocal": (
        "AssertionError: Rank 3: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3, node: n4\n",
        r"not finite",
    ),
    "lossscale": (
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.\n",
        r"fp16",
    ),
    "dlworker": (
        "RuntimeError: DataLoader worker (pid(s) 3412) exited unexpectedly\n",
        r"worker died",
    ),
    "dynunsup": (
        "torch._dynamo.exc.Unsupported: call_function UserDefinedClassVariable() [] {}\n",
        r"torch.compile",
    ),
    "nofile": (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/gsm8k/train.parquet'\n",
        r"no such|does not exist|not there",
    ),
    "pip": (
        "ModuleNotFoundError: No module named 'vllm.worker.worker_base'\n",
        r"versions",
    ),
    "nontype": (
        "AttributeError: 'NoneType' object has no attribute 'shape'\n",
        r"None",
    ),
    "indexassert": (
        "../aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [181,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
        "RuntimeError: CUDA error: device-side assert triggered\n",
        r"vocabulary",
    ),
    "greedy": (
        "UserWarning: `do_sample` is set to `False`. However, `temperature` is set to `0.7` -- this flag is only used in sampling modes.\n",
        r"greedy",
    ),
    "rightpad": (
        "A decoder-only architecture is being used, but right-padding was detected! For correct generation results, please set `padding_side='left'` when initializing the tokenizer.\n",
        r"padding",
    ),
    "graphcap": (
        "RuntimeError: CUDA error: operation not permitted when stream is capturing\n",
        r"graph capture",
    ),
    "bwd2": (
        "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).\n",
        r"two backward",
    ),
    "rlimit": (
        "openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit reached'}}\n",
        r"rate",
    ),
    "readtimeout": (
        "httpx.ReadTimeout: timed out\n",
        r"did not answer|time",
    ),
    "ipc": (
        "RuntimeError: CUDA error: invalid resource handle\n",
        r"IPC|share",
    ),
    "spill": (
        "(raylet) Spilled 4122 MiB, 12 objects, write throughput 812 MiB/s. Set RAY_verbose_spill_logs=0 to disable this message.\n",
        r"object store",
    ),
    "dsoverflow": (
        "[2025-01-02 10:00:00,123] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
        * 9,
        r"overflow",
    ),
    "pyspy": (
        "Process 4711: python train.py\n"
        "Python v3.11.9\n"
        "\n"
        'Thread 4711 (idle): "MainThread"\n'
        "    all_reduce (torch/distributed/distributed_c10d.py:2501)\n"
        "    wrapper (torch/distributed/c10d_logger.py:81)\n"
        "    update_policy (verl/workers/actor/dp_actor.py:311)\n",
        r"hung.*all_reduce",
    ),
    "assert": (
        "Traceback (most recent call last):\n"
        '  File "/x/a.py", line 3, in f\n'
        "    assert x.shape == y.shape\n"
        "AssertionError\n",
        r"assert",
    ),
    "refused": (
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 10.0.0.3:8000 ssl:default [Connect call failed ('10.0.0.3', 8000)]\n",
        r"no server listens",
    ),
    "ibv": (
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\n"
        "Call to ibv_modify_qp failed with error No such device\n",
        r"InfiniBand",
    ),
    "nccl-timeout": (
        "[rank2]:[E1003 11:02:11.120 ProcessGroupNCCL.cpp:685] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4412, OpType=_ALLGATHER_BASE, NumelIn=1024, NumelOut=8192, Timeout(ms)=1800000) ran for 1800031 milliseconds before timing out.\n"
        "[rank2]:[E1003 11:02:12 ProcessGroupNCCL.cpp:744] [Rank 2] Some NCCL operations have failed or timed out.\n",
        r"rank 2 waited|hung",
    ),
    "reentrant": (
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.\n",
        r"DDP",
    ),
    "ratelim": (
        "aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected\n"
        "ERROR reward_manager: judge request failed after 3 retries\n",
        r"reward|judge|server",
    ),
    "rewtime": (
        "concurrent.futures._base.TimeoutError\nTimeoutError: reward function compute_score timed out after 60 s\n",
        r"reward",
    ),
    "sandboxfail": (
        "(RewardManager pid=12) sandbox_fusion: code execution failed: HTTP 503 Service Unavailable\n" * 4,
        r"reward|sandbox",
    ),
    "klneg": (
        "UserWarning: KL divergence is starting to become negative: -2.31 - this might be a precursor for failed training. sometimes this happens because the generation kwargs are not correctly set.\n",
        r"KL.*negative",
    ),
    "lrsched": (
        "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later, you should call them in the opposite order\n",
        r"scheduler",
    ),
    "loranames": (
        "ValueError: base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight is unsupported LoRA weight\n",
        r"adapter|LoRA|sent",
    ),
    "loraext": (
        "ValueError: While loading /tmp/lora, expected target modules in ['q_proj'] but received ['base_model.model.model.layers.0.mlp.gate_proj'].\n",
        r"LoRA|adapter",
    ),
    "vocab": (
        "RuntimeError: The size of tensor a (151936) must match the size of tensor b (151665) at non-singleton dimension 0\n",
        r"shape|vocabular",
    ),
    "sleepmode": (
        "AssertionError: Expandable segments are not compatible with memory pool. Please track https://github.com/pytorch/pytorch/issues/147851 for the latest updates.\n",
        r"expandable_segments|pool",
    ),
    "cumem": (
        "RuntimeError: CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:119\n",
        r"memory|pool|allocator|kernel",
    ),
    "colocate": (
        "ValueError: Free memory on device (6.33/79.11 GiB) on startup is less than desired GPU memory utilization (0.6, 47.47 GiB).\n",
        r"another process|memory",
    ),
    "pil": (
        "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>\n",
        r"image",
    ),
    "tokmis": (
        "ValueError: Unrecognized configuration class <class 'transformers.models.qwen2_5_vl'> for this kind of AutoModel: AutoModelForCausalLM.\n",
        r"class|architecture|AutoModel|model",
    ),
    "megdiv": (
        "AssertionError: world size (12) is not divisible by total_model_size (tensor_model_parallel_size=8)\n",
        r"divide|divisible",
    ),
    "gbs": (
        "AssertionError: global batch size (100) is not divisible by micro batch size (2) times data parallel size (8)\n",
        r"divide",
    ),
    "nansum": (
        "RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output.\n",
        r"not finite",
    ),
    "lossnan": (
        "step 112 loss is nan, stopping training\n",
        r"not finite|nan",
    ),
    "gradnan": (
        "WARN: grad_norm is not finite: nan\n" * 3,
        r"finite",
    ),
    "vllmv0": (
        "RuntimeError: Cannot find any model weights with `/ckpt/global_step_20/actor`\n",
        r"weights|checkpoint|no such|file",
    ),
    "safetensor404": (
        "OSError: Error no file named pytorch_model.bin, model.safetensors, found in directory /ckpt/step_10.\n",
        r"file|checkpoint|weights",
    ),
    "fsdpckpt": (
        "RuntimeError: Missing key in checkpoint state_dict: model.layers.0.self_attn.q_proj.weight.\n",
        r"not the model's|missing",
    ),
    "killedplain": (
        "(WorkerDict pid=5521) *** SIGSEGV received at time=1759489331 on cpu 12 ***\n",
        r"crash|SIGSEGV|segfault|native",
    ),
    "raylet-dead": (
        "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, check the logs for the dead worker. RayTask ID: ffff Worker ID: 22 Node ID: 33 Worker IP address: 10.0.0.2 Worker port: 10012 Worker PID: 4411 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors.\n",
        r"worker|actor|killed",
    ),
    "ncclver": (
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\n"
        "Cuda failure 'out of memory'\n",
        r"memory|CUDA",
    ),
    "p2p": (
        "RuntimeError: CUDA error: peer access is not supported between these two devices\n",
        r"IPC|peer|device|share",
    ),
    "triton-ver": (
        "AttributeError: module 'triton' has no attribute 'language'\n",
        r"version",
    ),
    "pyarrow": (
        "pyarrow.lib.ArrowInvalid: Could not open Parquet input source '<Buffer>': Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file.\n",
        r"data|file|broken",
    ),
    "jsondec": (
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n",
        r"JSON|parse",
    ),
    "unicode": (
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 12: invalid start byte\n",
        r"file|text|encod|decod",
    ),
    "evict": (
        "DeadlineExceeded: Pod was active on the node longer than the specified deadline\n",
        r"deadline|ended",
    ),
    "preempt-slurm": (
        "slurmstepd: error: *** JOB 812 ON node7 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***\n",
        r"preempt|scheduler|outside",
    ),
    "ib": (
        "node7: [1] NCCL WARN NET/IB : Got completion from peer 10.1.0.4<41322> with status=12 opcode=0 len=0 vendor err 129\n"
        "[rank8]: torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.hpp:317, remote process exited or there was a network error, NCCL version 2.21.5\n",
        r"network|InfiniBand|peer|other end",
    ),
    "trl-pad": (
        "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.\n",
        r"pad",
    ),
    "attn-mask": (
        "RuntimeError: Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: long int and  query.dtype: c10::BFloat16 instead.\n",
        r"dtype",
    ),
    "cudagraph": (
        "torch._C._cuda CUDAGraph: RuntimeError: CUDA error: operation failed due to a previous error during capture\n",
        r"graph|captur",
    ),
    "moe": (
        "AssertionError: Expert parallel size 8 does not divide num_experts 60\n",
        r"divide",
    ),
    "seqlen": (
        "ValueError: sequence length 4096 of shard is not divisible by 2 * cp_size (6)\n",
        r"divide",
    ),
    "async-lock": (
        "RuntimeError: Task <Task pending name='Task-12'> got Future <Future pending> attached to a different loop\n",
        r"loop",
    ),
    "grpc": (
        'grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with: status = StatusCode.UNAVAILABLE details = "failed to connect to all addresses">\n',
        r"other end|server|connect",
    ),
    "hfcache": (
        "filelock._error.Timeout: The file lock '/root/.cache/huggingface/hub/.locks/x.lock' could not be acquired.\n",
        r"lock|time",
    ),
    "git-lfs": (
        "ValueError: invalid load key, 'v'.\n_pickle.UnpicklingError: invalid load key, 'v'.\n",
        r"broken|LFS",
    ),
    "compile-limit": (
        "torch._dynamo hit config.recompile_limit (8)\n   function: 'forward' (/x/modeling.py:12)\n",
        r"recompil",
    ),
    "wg": (
        "(WorkerDict pid=812) Exception: rollout.n (1) must be > 1 for GRPO\n",
        r"GRPO|group|setting|config",
    ),
    "pod-memory": (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: TaskRunner\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code None. The worker may have exceeded K8s pod memory limits.\n",
        r"memory limit of its Kubernetes pod",
    ),
    "guesses": (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.\n",
        r"does not know why",
    ),
    "threads-behind": (
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.\nThe actor never ran - it was cancelled before it started running.\n\n(WorkerDict pid=27497) [2025-03-04 19:28:30,014 E 27497 27497] logging.cc:113: Unhandled exception: N5boost10wrapexceptINS_6system12system_errorEEE. what(): thread: Resource temporarily unavailable [system:11]\n",
        r"limit of processes or threads",
    ),
    "unique-id": (
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout\n",
        r"did not all meet",
    ),
    "unique-id-gone": (
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer\n",
        r"other end is gone",
    ),
    "no-data-source": (
        'Traceback (most recent call last):\n  File "/v/verl/workers/reward_manager/naive.py", line 64, in __call__\n    score = self.compute_score(\n  File "/v/verl/utils/reward_score/__init__.py", line 37, in _default_compute_score\n    raise NotImplementedError\nNotImplementedError\n',
        r"data_source",
    ),
    "hbm": (
        "RuntimeError: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 100.38G of 31.75G hbm. Exceeded hbm capacity by 68.63G.\n",
        r"too little memory",
    ),
    "mini-over-batch": (
        "ValueError: train_batch_size (32) must be >= actor.ppo_mini_batch_size (64)\n",
        r"smaller than the mini-batch",
    ),
    "numpy-json": ("TypeError: Object of type bool_ is not JSON serializable\n", r"json cannot write"),
    "steps0": (
        "ValueError: Total training steps is 0: train dataloader has 31 samples and batch size 64\n",
        r"empty|no sample|batch|0",
    ),
}

#: What healthy runs print beside their metrics.
HARMLESS = (
    "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py:557: UserWarning: This DataLoader will create 8 worker processes in total.\n",
    "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\n",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.\n",
    "INFO 11-25 10:00:00 [gpu_worker.py:276] Available KV cache memory: 43.1 GiB\n",
    "[rank0]:[W1125 10:00:00.1 ProcessGroupNCCL.cpp:4115] [PG ID 0 PG GUID 0 Rank 0]  using GPU 0 to perform barrier as devices used by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.\n",
    "INFO verl.trainer: reward_fn timeout=30 retries=3\n",
    "INFO reward_manager: verify done, 0 failed, 0 timeouts\n",
    "[rank0]:[W1125 10:11:12 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.\n",
    "W1125 10:00:00.000 4711 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n",
    "[2025-03-04 10:00:00,123] [INFO] [real_accelerator.py:162:get_accelerator] Setting ds_accelerator to cuda (auto detect)\n",
    "Error in cpuinfo: prctl(PR_SVE_GET_VL) failed\n",
    "E0000 00:00:1740000000.000 4711 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered\n",
    "2025-03-04 10:00:00.1: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT factory\n",
    "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks is : 0\n",
    "Some weights of Qwen2ForTokenClassification were not initialized from the model checkpoint at Qwen/Qwen2.5-0.5B and are newly initialized: ['score.bias', 'score.weight']\n",
    "openrlhf.trainer.PPOTrainer: starting episode 1\n",
    "INFO:openrlhf.trainer: reward model loaded, timeout: 180\n",
    "Timeout: 600\n",
    "NCCL version 2.21.5+cuda12.4\n",
    "heartbeat: ok\n",
    "(WorkerDict pid=812) kwargs: {'n': 8, 'logprobs': 0, 'max_tokens': 1024, 'detokenize': False, 'temperature': 1.0}\n",
)
