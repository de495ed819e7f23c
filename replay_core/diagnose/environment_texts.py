"""Failure texts of what a run stands on: drivers, containers, devices, remote services, engines that do not come up.

Rows of the table of `failure_texts.py`: (pattern, cause, next step). Texts were read in the sources and public issues
of torch, the NVIDIA driver, Ray, vLLM, SGLang, tinker, openai, datasets, JAX, MLX and sandboxes of agents.
"""

from __future__ import annotations

#: What a driver, a container or a device refuses, what a service says once and for all, what is not installed.
ENVIRONMENT: tuple[tuple[str, str, str], ...] = (
    (r"ClientResponseError: 5\d\d|HTTPStatusError: Server error|HTTPError: 5\d\d|Server error '5\d\d",
     "a server of the run (an inference engine, a judge, a sandbox) failed on the request and answered with an error "
     "of "
     "its own (5xx): what stands behind the number is that server's exception, and not this process's",
     "the server's own log at that time holds its traceback; send it one such request by hand"),
    (r"Multiple libcudart|libcudart\.so[.\d]*: cannot open",
     "the environment holds two CUDA runtimes, or not the one that a compiled package was made for (libcudart of CUDA "
     "12 beside 13)",
     "pip list | grep -i cuda-runtime; keep the one of torch.version.cuda, and reinstall the package against it"),
    (r"already used by a Transformers (?:config|model)|is already (?:registered|used) (?:by|for|in) (?:a |an |the )?"
     r"(?:Transformers|AutoConfig|config)",
     "versions do not fit: a package brings a model's code of its own that the installed transformers now has, too",
     "update the package that registers it (the engine, most often), or install the transformers that it pins"),
    (r"expects all elements of std|[Rr]eward (?:should|must) be (?:a )?finite|[Rr]eward\w* .{0,30}\b(?:is|got|are"
    r"|contains?) "
     r"(?:nan|NaN|inf)\b",
     "a number is not finite where one is drawn or paid: the policy's weights are NaN since an update whose gradient "
     "was "
     "(or fp16 overflows), or a reward of the environment is 0/0",
     "the first metric, reward or observation that is not finite; skip such updates, clip the gradient; rldbg record "
     "-- "
     "YOUR COMMAND"),
    (r"(?i)^(?!.*wandb).*(?:\bapi[_ ]?key\b[^\n]{0,80}\b(?:must be (?:set|passed|provided|specified|given)"
     r"|(?:is |was )?(?:not (?:set|found|provided|configured|specified)|missing|required))"
     r"|\b(?:no|missing|provide an?|could not find)(?: \w+){0,2} api[_ ]?key\b"
     r"|\b\w+_(?:API_KEY|TOKEN)\b[^\n]{0,40}(?:not set|not found|missing|must be set|is required"
     r"|environment variable))",
     "no key of the service is there: none was handed to its client, and this process's environment has none (another "
     "shell, a job or a container that does not inherit it, a .env file that was not read)",
     "export the variable that the line names in the shell that starts the run (echo ${NAME:+set} shows whether it is "
     "there), and hand it to Ray's workers (runtime_env) or to the container (--env)"),
    (r"(?i)\b(?:version|sdk|client|api)\b[^\n]{0,80}\b(?:no longer supported|is too old|is outdated|has been sunset)"
     r"|(?:update|upgrade) to the latest version of (?:the|your) (?:sdk|client)",
     "the client library that is installed here is older than its server accepts: the request itself may be right",
     "pip install -U of the package that raised (pip show PACKAGE tells which is there; a lock file may hold it back)"),
    (r"(?i)invalid generic resource|unable to (?:create step|allocate resources|confirm allocation)|requested node "
     r"configuration is not available|batch job submission failed|invalid (?:partition|qos|account)|QOSMax\w+|"
     r"association\w* .{0,40}limit",
     "Slurm does not give what is asked for: GPUs (gres), nodes, time or an account that this job or partition does "
     "not "
     "have (an srun inside a job may only ask for what the job was given)",
     "compare --gres, --gpus, --nodes, --partition and --account of the inner srun with the job's own (scontrol show "
     "job $SLURM_JOB_ID); sinfo -o '%P %G' shows what a partition has"),
    (r"Non-root FSDP instance|_is_root` should not have been set",
     "FSDP refuses the forward: a part of the wrapped model was called by itself before the whole one (its head, an "
     "encoder, generate() on the module inside), and has made itself the root",
     "call the outermost FSDP module first, once, and parts only through it; or FSDP2 (fully_shard)"),
    (r"(?:No such file or directory|FileNotFoundError).{0,40}['\"](?=[^'\"]{0,200}/(?:\.?cache|\.triton"
    r"|\.?torchinductor"
     r"\w*|torch_extensions)/)[^'\"]{1,300}\.(?:arrow|lock|incomplete|json|py|pyc|so|cubin|bin|tmp\w*)['\"]",
     "a file of a cache is gone while it was in use: several processes (ranks, or jobs that share one home) write and "
     "remove the same cached file, or the cache was cleaned",
     "a cache of its own for each job, or filled by one process before the others start (HF_HOME, HF_DATASETS_CACHE, "
     "an experiment_id for evaluate's metrics, TRITON_CACHE_DIR), on a local disk"),
    (r"DataLoader worker .{0,40}killed by signal: Terminated",
     "the job was ended from outside (SIGTERM), and its data workers with it: a scheduler's limit or preemption, or "
     "somebody who stopped it", "the scheduler's own record of the job; resume from the last checkpoint"),
    (r"[Ss]erver (?:is )?(?:unavailable|not (?:available|reachable|running|responding))|HTTP 000",
     "a server that the run needs does not answer at that address: it was not started, died, or listens elsewhere",
     "start it (an environment's, a judge's or an engine's server) and wait until curl ADDRESS answers; look into its "
     "own log; leave the address out of the proxy (no_proxy)"),
    (r"BatchSize must be greater than 0|Parquet magic bytes not found|Parquet file size is 0"
     r"|row group.{0,40}(?:empty|0 rows)",
     "the parquet file is empty or broken: a row group without rows, a file that was not written to its end, or a "
     "pointer of Git LFS in its place",
     "python -c \"import pyarrow.parquet as q; print(q.ParquetFile('FILE').metadata)\"; write it again, and look at "
     "how many rows it gets"),
    (r"validation errors? for .{0,400}Extra inputs are not permitted",
     "the configuration does not validate: it holds fields that this program does not have, as a file made for another "
     "program (another trainer's configuration) or another version does",
     "look which file is given; compare its fields with --help or the default configuration of this program"),
    (r"[Ee]rror 802\b|system not yet initialized",
     "CUDA cannot be initialised on this node: the fabric manager of its NVSwitches does not run, or is of "
     "another version than the driver (error 802)",
     "systemctl restart nvidia-fabricmanager on that node, and nvidia-smi -q | grep -A2 Fabric; leave the node "
     "out until torch.cuda.is_available() is true there"),
    (r"CUDA-capable device\(s\) is/are busy or unavailable|[Aa]ll CUDA-capable devices are busy",
     "the GPU is taken: another process (the trainer beside its engine, another engine, an orphan of the last "
     "run) has it, and its compute mode lets one process in; or the GPU is in a bad state",
     "nvidia-smi shows its processes and its compute mode; end the orphan; nvidia-smi -c 0 lets several in; one "
     "GPU per engine (CUDA_VISIBLE_DEVICES)"),
    (r"pidfd_getfd|pidfd_open",
     "GPU memory cannot be shared with the process that is to read it, since the container does not permit it "
     "(pidfd_getfd needs ptrace): the one that writes a checkpoint in the background, or an engine that is given "
     "weights",
     "docker run --cap-add=SYS_PTRACE (or kernel.yama.ptrace_scope=0); without expandable segments "
     "(PYTORCH_CUDA_ALLOC_CONF) memory is shared another way; save synchronously"),
    (r"[Ss]ome modules are dispatched on the CPU or the disk",
     "the model does not fit into the GPU memory that is free: modules of it were put on the CPU or the disk "
     "(device_map), which a quantised model does not allow",
     "nvidia-smi: what else is on the GPU; a smaller model, fewer bits, or more GPUs (device_map={'': 0} tells at "
     "once)"),
    (r"[Ii]nference tensors cannot be saved for backward|[Ii]nplace update to inference tensor|"
     r"[Ii]nference tensors do not track version",
     "a tensor that was made under torch.inference_mode() is used in training: a cache of the model (rotary cos "
     "and sin, a mask, a buffer) that generation, an evaluation or a pass for log-probabilities has filled",
     "torch.no_grad() in place of inference_mode() there; or clear (clone) the cache before the training pass; "
     "the frame names the module"),
    (r"(?:[Ee]rror|[Ss]tatus)(?: code)?:? 402\b|\b402 (?:Client Error|Payment)|[Ii]nsufficient (?:funds|credits?|"
     r"balance|quota)|insufficient_quota|exceeded your current quota|credit balance is too low",
     "the account of the API has no credit left (402): the judge, or the model that is asked, answers nothing any "
     "more, and what stands in its place is no score",
     "pay in, or use another key; go on from the last checkpoint before the first of these lines"),
    (r"[Ee]xpected exactly one model_id|[Ee]xpected exactly one (?:lora|adapter)",
     "the sampling server refuses a batch of requests for several models or adapters (LoRA): two runs, or the "
     "policy and another model, sample from it at once",
     "one run at a time per server, or a server for each; raise instead of retrying: the samples of these "
     "requests are missing"),
    (r"APIConnectionError|APITimeoutError|[Hh]eartbeat failed for",
     "a remote service no longer answers (the API that trains or samples, an inference server, a judge): it hangs "
     "or is down, or the network to it broke; the run waits for it",
     "ask its address by hand, look at its own log or status page; go on from the last checkpoint"),
    (r"(?:huggingface\.co|hf-mirror\.com|hf\.co|modelscope\.cn).{0,200}(?:[Tt]imed? ?out|Timeout)"
     r"|(?:[Tt]imed? ?out|Timeout).{0,200}(?:huggingface\.co|hf-mirror\.com|modelscope\.cn)",
     "the hub of models and data sets did not answer in time: a slow or blocked network, or many ranks that download "
     "at once",
     "download beforehand and set HF_HUB_OFFLINE=1 with HF_HOME on a shared disk; HF_HUB_DOWNLOAD_TIMEOUT=60 and "
     "HF_HUB_ETAG_TIMEOUT=60; HF_ENDPOINT of a mirror"),
    (r"[Cc]ould not find any running Ray instance",
     "no Ray cluster runs at that address",
     "ray start --head on the first node (and ray start --address=... on the others), or leave the address out"),
    (r"[Ff]ound no NVIDIA driver",
     "there is no NVIDIA driver on this node, or the container does not see it",
     "nvidia-smi there; docker run --gpus all"),
    (r"detected CUDA version .{0,40}mismatches the version",
     "a kernel is compiled by another CUDA than torch was made with",
     "CUDA_HOME of torch.version.cuda's toolkit, or a torch of the installed one"),
    (r"[Ii]nvalid device argument|did you call init\?",
     "a GPU is named by a number that this process does not see",
     "print CUDA_VISIBLE_DEVICES, LOCAL_RANK and torch.cuda.device_count() there"),
    (r"unable to find an engine to execute this computation",
     "cuDNN finds no way to compute it: no GPU memory is left for its workspace, or its version does not fit torch",
     "a smaller batch; pip list | grep -i cudnn: one version alone"),
    (r"Expected is_sm\d+",
     "flash attention's backward does not take this head dimension on this GPU",
     "attn_implementation='sdpa', or a GPU it is made for"),
    (r"[Cc]an't move a model that has some modules offloaded|offloaded to (?:the )?(?:cpu|disk).{0,80}(?:train|"
     r"move)",
     "the model does not fit into the GPU memory that is free: parts of it were put on the CPU or the disk, and "
     "such a model cannot be moved or trained",
     "nvidia-smi: what else is on the GPU; a smaller model, fewer bits, or more GPUs"),
    (r"[Cc]an't train a model that has been loaded in \d-bit",
     "a quantised model lies on another GPU than the process trains on",
     "device_map={'': LOCAL_RANK} when it is loaded"),
    (r"RESOURCE_EXHAUSTED|\[metal::malloc\]|maximum allowed buffer size",
     "out of memory of the device (TPU, GPU by XLA, Apple's): one array alone is larger than what is left",
     "a smaller batch or fewer tokens; shard or rematerialise; chunk the logits"),
    (r"[Mm]inimum loss scale reached",
     "fp16 overflows in every step until the loss scale is at its minimum: gradients are not finite",
     "train in bf16; look for the first NaN"),
    (r"optimizer got an empty parameter list",
     "no parameter is trained: every weight is frozen, or the adapter's target modules match nothing",
     "print the names whose requires_grad is set"),
    (r"[Pp]lease specify `target_modules`",
     "PEFT does not know which layers of this architecture the adapter goes on",
     "target_modules='all-linear', or the names of the model's linear layers"),
    (r"Attention mask should be of size",
     "mask and keys are of other lengths: a cache of keys and values that is kept under gradient checkpointing, "
     "or a patched attention of another version of transformers",
     "use_cache=False in training; the versions that the framework pins"),
    (r"Tokenizer class \w+ does not exist",
     "the installed transformers does not know the model's tokenizer",
     "pip show transformers; install a version that does (the model's card names it), sentencepiece and tokenizers"),
    (r"KeyError: ['\"]\w+For(?:CausalLM|ConditionalGeneration)['\"]",
     "the installed version does not know the model's architecture, which is newer than transformers or the engine",
     "update transformers and the engine together"),
    (r"DatasetNotFoundError|doesn't exist on the Hub or cannot be accessed",
     "there is no such data set, or it is gated or private and no token is there",
     "open its page; huggingface-cli login, HF_TOKEN in every worker's environment"),
    (r"[Nn]umpy is not available",
     "torch was compiled for another NumPy (1.x against 2.x)",
     "pip install 'numpy<2', or update torch"),
    (r"InvalidGitRepositoryError",
     "a logger asks for the git repository of the script, and there is none",
     "run it inside a repository, or switch that off (WANDB_DISABLE_GIT=true)"),
    (r"[Ff]ailed to (?:create|start|build) (?:the )?(?:sandbox|container|environment)|"
     r"[Ss]andbox.{0,40}(?:could not|cannot) be (?:created|started)",
     "the sandbox that the agent or the judge runs in cannot be made: no room (quota, disk, memory), an image "
     "that is missing, or a daemon that is down",
     "start one by hand with the same image; look at the provider's quota, docker ps, df -h"),
    (r"database is locked",
     "several processes write one SQLite file (a tracker's, a cache's), or it lies on a network mount",
     "a file for each process, on a local disk"),
)  # fmt: skip

#: What an operating system, a container or a cluster's manager refuses: a broader row would take it for something else.
LIMITS: tuple[tuple[str, str, str], ...] = (
    (r"Too many open files|Errno 24\b|EMFILE|received 0 items of ancdata",
     "the limit of open file handles is reached (ulimit -n): shared tensors by file descriptor, sockets or files not "
     "closed",
     "ulimit -n 65536 (LimitNOFILE of the service, --ulimit nofile of the container) before ray start; "
     "torch.multiprocessing.set_sharing_strategy('file_system')"),
    (r"can't start new thread|Thread creation failed|pthread_create failed|Resource temporarily unavailable|Errno 11\b"
     r"|BlockingIOError|fork: retry",
     "the limit of processes or threads is reached (ulimit -u, a container's pids limit)",
     "ulimit -u; --pids-limit of the container; OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1; fewer workers and Ray "
     "CPUs"),
    (r"(?i)ibv_reg_mr.{0,80}(?:failed|error|cannot allocate)|(?:failed|unable) to register (?:rdma )?memory"
     r"|memory registration failed|reg_mr failed",
     "memory cannot be registered with the network card (InfiniBand, RDMA): the limit of locked memory (ulimit -l, "
     "memlock) of this process or container is too small, most often; the host's own memory need not be full",
     "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of the service); lsmod | grep "
     "peermem; NCCL_IB_DISABLE=1 tells whether it is InfiniBand"),
    (r"docker\.errors\.DockerException: Error while fetching server API version|Cannot connect to the Docker daemon",
     "no docker daemon answers at its socket: it does not run on this node, or the container that asks does not see "
     "/var/run/docker.sock (or has no right to it)",
     "docker ps in the worker's own environment; start the daemon, mount /var/run/docker.sock, add the user to its "
     "group, or set DOCKER_HOST"),
    (r"token_to_kv_pool_allocator memory leak|(?:pool|allocator)\w* memory leak detected",
     "SGLang's own idle check of its KV cache finds tokens that belong to no request (memory leak detected): a bug of "
     "the engine or of how this version aborts, retracts or updates requests, and none of the trainer's",
     "update SGLang to the version that the trainer pins; look for the text in SGLang's issues; without partial "
     "rollouts (abort) or --disable-radix-cache tells whether it is those"),
    (r"the launch timed out and was terminated",
     "a kernel of the GPU ran longer than the driver allows (the launch timed out): the GPU also serves a display, or "
     "hangs",
     "nvidia-smi: is a display attached; dmesg | grep -i xid; the same on another GPU tells whether it is this one"),
    (r"inline_container\.cc.{0,80}unexpected pos|unexpected pos \d+ vs \d+",
     "a checkpoint (or file) could not be written to its end: the disk or a quota is full, or a network mount failed, "
     "and what was written is broken",
     "df -h and quota of the output folder; write to a local disk; keep fewer checkpoints; resume from the last whole "
     "one"),
    (r"Failed to connect to GCS within|gcs_rpc_client.{0,80}Check failed",
     "a node lost the head of the Ray cluster (its GCS) and ended itself: the head's node or process died, or the "
     "network to it broke",
     "gcs_server.out and dmesg on the head node at that time (memory, preemption); then ray start anew on every node"),
    (r"Unhandled mesh failure|MeshFailure\(",
     "an actor of the mesh (Monarch) failed and nobody handled it: what it raised stands inside the line",
     "read the innermost error in that line, and the actor's own log"),
    (r"[Ee]phemeral[- ](?:local )?storage usage exceeds|kubelet.{0,80}[Ee]phemeral",
     "Kubernetes evicted the pod: it wrote more to its own disk (ephemeral storage: checkpoints, caches, /tmp) than "
     "its limit",
     "write checkpoints and HF_HOME to a volume; raise resources.limits.ephemeral-storage; kubectl describe pod"),
    (r"srun: error: Node failure on|imminent node shutdown",
     "a node is gone or shut down: hardware, a preemption, or the cluster that drains it; the job was ended from "
     "outside",
     "sinfo -R (kubectl get events, kubectl describe node) says why; resume from the last checkpoint"),
    (r"[Ee]xceeded .{0,20}memory limit",
     "the job used more host memory than Slurm gives it (--mem), and was killed: weights and optimizer states that are "
     "offloaded, data workers, Ray's object store",
     "a larger --mem (or --mem=0 for the whole node); fewer data workers; sacct -j JOB -o MaxRSS shows what it took"),
    (r"Raylet is terminated\. Termination is unexpected|raylet exited immediately because",
     "Ray's daemon on a node (its raylet) is gone, and every worker there with it: the host's memory ran out "
     "(SIGKILL), its agent could not start or keep up (a port, too many processes), or the disk below /tmp/ray is full",
     "dmesg | grep -i oom; raylet.out, raylet.err and dashboard_agent.log in /tmp/ray/session_latest/logs; df -h /tmp"),
    (r"Mismatched NCCL version",
     "ranks were started with other versions of NCCL: another image or environment on one of the nodes",
     "python -c 'import torch; print(torch.cuda.nccl.version())' on every node; the same image for all"),
    (r"NCCL WARN Cuda failure 401|transport/nvls",
     "NCCL's way through the NVSwitch (NVLS multicast) fails: the fabric manager does not run or was restarted, the "
     "container lacks its devices (IMEX), or another job holds all of its groups",
     "NCCL_NVLS_ENABLE=0 tells whether it is this; systemctl status nvidia-fabricmanager on the node"),
    (r"Failed to initialize NVML: Driver/library version mismatch|nvml error: driver/library version mismatch",
     "the NVIDIA driver was updated under a running system: the kernel's module and the libraries are of two versions",
     "reboot the node, or reload the module; pin the driver's version"),
    (r"Failed to initialize NVML",
     "the container has lost its GPUs, or never had them: a reload of the host's services (systemd) takes their "
     "devices away from a running container",
     "nvidia-smi on the host; start the container again with --device /dev/nvidia0 (and nvidiactl, nvidia-uvm), or "
     "with cgroupfs as docker's cgroup driver"),
    (r"GPU is lost|device handle for GPU",
     "a GPU is gone from the bus: hardware, power or driver",
     "dmesg | grep -i xid; drain the node, reset or replace it"),
    (r"srun: error: Prolog hung on",
     "a node's prolog hangs, so that the job's step never starts there", "sinfo -R; exclude that node (--exclude)"),
    (r"\bNodeNotReady\b",
     "the node is not ready any more: its kubelet, network or hardware failed",
     "kubectl describe node; start elsewhere"),
    (r"srun: error: task \d+ launch failed|slurmstepd: error: pyxis|OCI runtime create failed|srun: fatal: SLURM_",
     "the job's step did not begin: Slurm, its container plugin or the container's runtime refuses, as the line says "
     "(an image that cannot be imported, a device or network of the node, options that exclude each other)",
     "run the line's command alone on that node; sinfo -R; another node tells whether it is this one"),
    (r"\bFailedMount\b|MountVolume\.SetUp failed",
     "a volume cannot be mounted: the pod waits for it, and never begins",
     "kubectl describe pod and pvc; the storage's address from that node; another node"),
    (r"\bTaintManagerEviction\b|\bPreempted by pod\b",
     "the pod was taken away from its node (preempted by another job, or the node was tainted): ended from outside",
     "kubectl get events; a priority class; resume from the last checkpoint"),
    (r"(?:Liveness|Startup) probe failed",
     "Kubernetes ends the container, as its health check was not answered in time: a step, a load of weights or a "
     "checkpoint keeps the server busy for longer than the probe waits",
     "raise timeoutSeconds and failureThreshold, or take the probe out of a training pod"),
    (r"Error from server \(NotFound\): pods|Error: No such container",
     "the pod or container whose log this is was deleted: ended from outside, or by its job's clean-up",
     "kubectl get events; docker events; the job's own state"),
    (r"Directory not empty|Errno 39\b",
     "a folder is deleted while another process still writes into it (or a network mount keeps files that are open): "
     "every rank prunes the same folder of checkpoints, or two runs share one",
     "let rank 0 alone delete old checkpoints (behind a barrier); an output folder for each run"),
    (r"longer than specified deadline",
     "the job's time is over (activeDeadlineSeconds of Kubernetes)",
     "raise activeDeadlineSeconds, or save often enough to go on: resume from the last checkpoint"),
    (r"\bFailedScheduling\b|\d{1,6}/\d{1,6} nodes are available",
     "the pod waits: no node has free what it asks for (GPUs, memory, a label or taint), as the line says",
     "kubectl describe nodes | grep -A8 Allocated; ask for fewer GPUs per pod, or wait for what holds them"),
    (r"\bImagePullBackOff\b|\bErrImagePull\b|Failed to pull image",
     "the container's image cannot be pulled: its name or tag, the registry's login or rate limit, or a node whose "
     "disk is full",
     "kubectl describe pod shows the registry's words; crictl pull IMAGE on the node; df -h there"),
    (r"Job supervisor actor (?:could not be|failed)",
     "the Ray job never began: its supervisor could not be placed on the node that it was meant for (the head left, or "
     "has no free CPU)",
     "ray status; submit again to the cluster that runs now; entrypoint_num_cpus=0"),
)  # fmt: skip

#: What services say of a request, which more particular texts go before.
SERVICES: tuple[tuple[str, str, str], ...] = (
    (r"(?:[Ee]rror code|[Ss]tatus(?: code)?):? 4(?:00|22)\b|\b4(?:00 (?:Client Error|Bad Request)|22 Unprocessable)",
     "the server refuses the request itself (400, 422): what is asked for is none it can do, and asking again "
     "does not help; its own words, behind the code, say what",
     "send one such request by hand; compare its fields with the version of the server; samples of these requests "
     "are missing from what is trained on"),
    (r"(?:[Ee]rror|[Ss]tatus)(?: code)?:? 40[13]\b|AuthenticationError|AuthError\b|[Ii]ncorrect API key|"
     r"invalid_api_key|NoCredentialsError|[Uu]nable to locate credentials|[Ii]nvalid API key",
     "a remote service refuses the key: it is missing in this process's environment, mistyped, or has no right to "
     "what is asked",
     "set the service's key in every worker's environment (Ray workers do not inherit it); call it once by hand"),
    (r"(?:[Ee]rror|[Ss]tatus)(?: code)?:? 404\b.{0,200}model|[Tt]he model `[^`]{1,120}` does not exist|"
     r"model_not_found",
     "the server does not know the model that is asked of it: another name than it serves (--served-model-name, "
     "an adapter that was not loaded)",
     "curl HOST:PORT/v1/models lists what it serves"),
    (r"(?:[Ee]rror|[Ss]tatus)(?: code)?:? 5\d\d\b|APIStatusError|InternalServerError",
     "a remote service answers with an error of its own (5xx): it is overloaded, restarts, or fails on this "
     "request",
     "its own log at that time; send it the request by hand; go on from the last checkpoint"),
    (r"RateLimit(?:Error|Exception)",
     "a server limits the rate of requests: every rank downloads, or a judge is called too often",
     "download once and share the cache; fewer calls at once, with retries"),
    (r"FileExistsError|IsADirectoryError",
     "a path that is to be made is there already: another rank made it, or a run of before",
     "exist_ok=True, or an output folder for each run"),
    (r"openai\.",
     "the reward failed: a judge, verifier or sandbox that does not answer in time or raises on a response",
     "call it by hand on the response it names; catch it, count it, and do not score it 0 in silence"),
)  # fmt: skip
