"""Failure texts of what refuses on a node: file systems, shared stores, drivers, kernels between GPUs, the hub.

Rows of the table of `failure_texts.py`: (pattern, cause, next step). Broader rows would take them for something else.
"""

from __future__ import annotations

#: Texts that say why.
REFUSALS: tuple[tuple[str, str, str], ...] = (
    (r"AF_UNIX path length cannot exceed",
     "the path of Ray's temporary folder is too long for a socket (107 bytes)",
     "ray start --temp-dir=/tmp/ray, or ray.init(_temp_dir='/tmp/ray'); a shorter TMPDIR"),
    (r"No locks available|Errno 37\b",
     "the file system gives no locks (a network mount without its lock service): caches and downloads need them",
     "HF_HOME, TRITON_CACHE_DIR and the like on a local disk; the mount's lock service (rpc.statd, -o flock)"),
    (r"File name too long|Errno 36\b",
     "a name is longer than the file system takes (255 bytes): it is made of a configuration's values, most often",
     "a name of one's own for the run (experiment_name, run_name, output_dir)"),
    (r"(?:resource busy|Errno 16\b).{0,80}\.nfs",
     "a file was deleted on a network mount while a process still has it open: it lives on as .nfs..., and its folder "
     "cannot be removed", "let one process delete checkpoints, when all have closed them; ignore_errors=True there"),
    (r"Invalid cross-device link|Errno 18\b",
     "a file is renamed from one file system to another (a temporary folder on the local disk, the output on a mount)",
     "shutil.move in place of os.rename, or TMPDIR on the disk that the output lies on"),
    (r"File too large|Errno 27\b",
     "a file may not become that large: a limit of this shell (ulimit -f), or of the file system",
     "ulimit -f unlimited; smaller shards (max_shard_size='5GB')"),
    (r"Operation not supported|Errno 95\b",
     "the file system lacks what is asked of it (locks, links, mapping of files), as mounts of object stores do",
     "write to a local disk and copy from there"),
    (r"[Ww]eights were not initiali[sz]ed from checkpoint",
     "the checkpoint does not hold weights that the engine's model has: names of another version or wrapper, an "
     "adapter alone, or a save that was not whole",
     "compare the names and shapes: rldbg show CHECKPOINT beside rldbg show MODEL"),
    (r"errors during sampling! NaN in the logits",
     "the engine's logits are NaN: the policy's weights (or its copy) are not finite since an update with a NaN "
     "gradient or a broken weight update, or its forward overflows",
     "the first step whose grad_norm, KL or loss is not finite; rldbg weights compares both sides"),
    (r"DeepEP (?:error: timeout|timeout check failed)",
     "ranks of expert parallelism wait for one that does not come: it stalled or died, or the network between nodes "
     "(RDMA) broke", "the first error of any other rank; ibstat; without DeepEP (the all-to-all of NCCL) tells"),
    (r"nvshmemi?\w* .{0,60}(?:failed|error)|DeepEP/csrc\S*runtime\.cu",
     "NVSHMEM, which DeepEP stands on, cannot start: no InfiniBand with GPU access (IBGDA, gdrcopy), a container "
     "without the devices, or another version than it was built for",
     "NVSHMEM_DEBUG=INFO names the call; nvidia-smi topo -m; the all-to-all of NCCL in its place"),
    (r"At most \d+ \w+\(s\) may be provided in one prompt",
     "a prompt has more images (videos) than the engine was started for",
     "limit_mm_per_prompt={'image': N} of the largest number in the data, or leave such prompts out"),
    (r"CUDAMismatchException|Installed CUDA version \S+ does not match",
     "a kernel is to be compiled by another CUDA than torch was made with",
     "CUDA_HOME of torch.version.cuda's toolkit, or a torch of the installed one; DS_SKIP_CUDA_CHECK=1 where only the "
     "minor version differs"),
    (r"[Oo]bject shard \S+ not found in checkpoint|CheckpointingException: .{0,200}not found",
     "the checkpoint lacks a part that this model asks for: it was saved with other modules (attention's extra state "
     "of another Transformer Engine or precision, fp8), layers or parallel sizes",
     "--dist-ckpt-strictness log_all (ignore_all) passes over _extra_state; else the versions it was saved with"),
    (r"[Cc]ould not find optimizer shard|fully_sharded_(?:bucket|model)_space",
     "the distributed optimizer's state does not fit how the run is split now: another number of ranks, or another "
     "format of sharding than it was saved in",
     "resume with the parallel sizes it was saved with, or a format that can be split anew (fully_reshardable); "
     "--no-load-optim loads the weights alone"),
    (r"CAS service error|xethub\.hf\.co|\bxet_get\b",
     "the hub's storage (Xet) did not deliver: a network or proxy that it does not get through, a broken local cache",
     "HF_HUB_DISABLE_XET=1; rm -r $HF_HOME/xet; download beforehand"),
    (r"file lock .{0,300}could not be acquired",
     "another process holds the lock of a cached file (a download that hangs, a rank that died), or the network mount "
     "gives no locks", "end the orphan; rm the .lock file when nobody downloads; HF_HOME on a local disk"),
    (r"features can't be aligned|of features .{0,200}has unexpected type",
     "files or splits of the data set have other types in one column (a number here, a text there, nothing but None)",
     "cast the column to one type before they are put together: dataset.cast_column(NAME, Value('string'))"),
    (r"subprocesses has abruptly died during map",
     "a worker of the data set's map was killed: out of host memory, or native code crashed",
     "num_proc=1 shows its own error; dmesg | grep -i oom; a smaller writer_batch_size"),
    (r"failed to extend /dev/shm",
     "shared memory (/dev/shm) is full: NCCL puts its buffers there, and a container has 64 MB of it unless it is told "
     "otherwise", "docker run --shm-size=16g (--ipc=host); df -h /dev/shm: files of a run that was killed"),
    (r"NVML_SUCCESS == r",
     "GPU memory ran out, and torch cannot ask the driver (NVML) how much is left: most often a plain out of memory, "
     "else a GPU that the container has lost",
     "nvidia-smi there: if it works, a smaller micro-batch or cache; else start the container again"),
    (r"peer mapping resources exhausted",
     "a GPU can map the memory of 8 others at most: more of them talk to each other directly (P2P, CUDA IPC)",
     "fewer GPUs per process that shares memory; NCCL_P2P_DISABLE=1 tells whether it is this"),
    (r"\d+ consecutive empty (?:train(?:ing)? )?batch",
     "every episode of many batches in a row failed or was filtered away: an environment, tool or reward that is down, "
     "or prompts whose answers all earn the same",
     "look at the rewards and errors of one batch by hand; the first warning of an empty batch above"),
    (r"[Ii]nference server was not reached after",
     "the inference server did not come up in time, or listens elsewhere: it died as it started, still loads the "
     "model, or the client's base_url is another",
     "its own log for its first error; curl http://HOST:PORT/health from that node; the time limit, where it loads"),
    (r"OS call failed or operation not supported on this OS",
     "the operating system refuses memory to the driver: pinned memory beyond what the host or the container may lock "
     "(ulimit -l, a cgroup's limit), or memory that is shared between processes where that is not possible (WSL)",
     "ulimit -l unlimited; free -g; pin_memory=False (offloading without pinned memory) tells whether it is this"),
    (r"Ninja build failed|ninja: build stopped",
     "a kernel cannot be compiled when it is first used: no nvcc or another CUDA than torch's, no memory for so many "
     "compilers at once",
     "the lines above name the first error of the compiler; nvcc --version against torch.version.cuda; MAX_JOBS=4; a "
     "wheel with compiled kernels (flashinfer-cubin, -jit-cache)"),
    (r"set_version\(\d+\) failed on|Failed to set version on",
     "the engines could not be told of new weights: they hang, died or are busy, and samples would count as of old "
     "weights", "the engines' own logs at that time; stop the run where a weight update is not confirmed"),
    (r"NIXL_ERR_|nixl\w*Error",
     "the transfer of keys and values between engines (NIXL: prefill to decode) broke: the other engine is gone or was "
     "restarted, or the network between them (UCX, RDMA) failed",
     "the other engine's own log at that time; UCX_TLS=tcp tells whether it is RDMA; one engine that does both"),
    (r"[Rr]ollout failed permanently",
     "a rollout failed in all of its attempts: its environment, tool or reward raises on this task, or does not answer",
     "its first error above; run that task alone; leave such tasks out instead of ending the run"),
    (r"Undefined dataset \S+ in dataset_info",
     "the data set is not described in dataset_info.json, which is read from dataset_dir",
     "add its name there, or mend the name; --dataset_dir of the folder that holds that file"),
    (r"HIP error: invalid device function|HSA_OVERRIDE_GFX",
     "the binary was not built for this GPU's architecture (AMD gfx)",
     "rocminfo | grep gfx against torch.cuda.get_arch_list(); a build for it, or HSA_OVERRIDE_GFX_VERSION of a near "
     "one"),
    (r"ACL stream synchronize failed|error code(?: is)?:? ?507\d{3}|aclrt\w+ failed",
     "a kernel of the Ascend device failed (507xxx): an operator that read or wrote beyond its tensors, or a device "
     "that is not well; operators run later than the line that names them",
     "ASCEND_LAUNCH_BLOCKING=1 names the true line; the plog (~/ascend/log) names the operator; npu-smi info"),
    (r"FunctionTimeoutError|hit its timeout of \d+",
     "the platform ended the function at its time limit",
     "raise its timeout, or save often enough to go on: resume from the last checkpoint"),
    (r"PanicException|called `Result::unwrap\(\)` on an `Err` value",
     "native code of a tokenizer or file reader (Rust) refuses what it is given: a file that is cut or broken "
     "(tokenizer.json, a Git LFS pointer), or one of a newer version",
     "head -c 200 of the file it reads; download it again; update tokenizers (safetensors)"),
    (r"^_?queue\.Empty\b",
     "nothing came out of a queue in time: the worker that fills it (data, rollouts) died or hangs",
     "num_workers=0 shows a data worker's own error; the first error of the process that fills it"),
)  # fmt: skip
