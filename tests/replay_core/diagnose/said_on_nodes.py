# ruff: noqa: E501 - they are the programs' own lines
"""What nodes, drivers, shared stores, schedulers and kernels between GPUs say as they end a run or keep it from its
start: each with words that the headline has to have.
"""

from __future__ import annotations

#: (text, regular expression that is found in the claim or cause of the first finding)
ON_NODES: tuple[tuple[str, str], ...] = (
    ("Failed to initialize NVML: Unknown Error\nRuntimeError: No CUDA GPUs are available\n", r"container has lost its GPUs"),
    ("Failed to initialize NVML: Driver/library version mismatch\nRuntimeError: No CUDA GPUs are available\n", r"driver was updated"),
    ("Unable to determine the device handle for GPU0000:4E:00.0: GPU is lost.  Reboot the system to recover this GPU\n", r"gone from the bus"),
    ("[412345.1] NVRM: Xid (PCI:0000:4e:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 07 (0x00000004 0x00000000)\n", r"NVLink"),
    ("[412345.1] NVRM: Xid (PCI:0000:4e:00): 137, pid=81234, name=python3, NVLink: fatal\n", r"NVLink"),
    ("(raylet) Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user or system OOM killer\n", r"raylet"),
    ("(raylet) [2026-03-02 10:35:40,492 C 273 339] (raylet) agent_manager.cc:86: The raylet exited immediately because one Ray agent failed, agent_name = dashboard_agent/9221.\n", r"raylet"),
    ("OSError: AF_UNIX path length cannot exceed 107 bytes: '/very/long/sockets/plasma_store'\n", r"too long for a socket"),
    ("gpu-a12:311:811 [0] init.cc:1060 NCCL WARN Mismatched NCCL version detected : rank 8 version 2.21.5 rank 0 version 2.27.3\n"
     "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, internal error\n", r"other versions of NCCL"),
    ("gpu-a12:311:811 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Qx8dUv to 9637892 bytes\n"
     "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error\n", r"/dev/shm"),
    ("gpu-a12:311:811 [0] transport/nvls.cc:156 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'\n", r"NVLS"),
    ("OSError: [Errno 121] Remote I/O error: '/mnt/nfs/out'\n", r"file system fails"),
    ("OSError: [Errno 108] Cannot send after transport endpoint shutdown\n", r"file system fails"),
    ("OSError: [Errno 61] No data available\n", r"file system fails"),
    ("OSError: [Errno 37] No locks available\n", r"no locks"),
    ("OSError: [Errno 36] File name too long: '/cache/very'\n", r"name is longer"),
    ("OSError: [Errno 39] Directory not empty: '/out/checkpoint-100'\n", r"still writes into it"),
    ("OSError: [Errno 16] Device or resource busy: '.nfs000000012345'\n", r"still has it open"),
    ("OSError: [Errno 18] Invalid cross-device link: '/tmp/x' -> '/mnt/out/x'\n", r"renamed from one file system"),
    ("OSError: [Errno 27] File too large\n", r"become that large"),
    ("OSError: [Errno 95] Operation not supported\n", r"lacks what is asked"),
    ("slurmstepd: error: Exceeded job memory limit\n", r"host memory"),
    ("slurmstepd: error: StepId=481516.0 exceeded memory limit (532311 > 524288), being killed\n", r"host memory"),
    ("srun: error: task 0 launch failed: Error configuring interconnect\n", r"did not begin"),
    ("srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive.\n", r"exclude each other"),
    ("srun: error: Prolog hung on node gpu-a12\n", r"prolog"),
    ("slurmstepd: error: pyxis: failed to import docker image\n", r"image"),
    ("  Warning  FailedMount  kubelet  MountVolume.SetUp failed for volume \"data\" : mount failed: exit status 32\n", r"cannot be mounted"),
    ("  Warning  Failed  kubelet  Error: OCI runtime create failed: nvidia-container-cli: initialization error: nvml error: driver/library version mismatch\n", r"driver was updated"),
    ("  Warning  BackOff  kubelet  Back-off restarting failed container trainer in pod train-0\n", r"again and again"),
    ("  Warning  NodeNotReady  node-controller  Node is not ready\n", r"not ready"),
    ("  Normal   TaintManagerEviction  taint-eviction-controller  Marking for deletion Pod default/train-0\n", r"taken away from its node"),
    ("  Normal   Preempted  default-scheduler  Preempted by pod 1f2a on node gpu-a12\n", r"taken away from its node"),
    ("  Warning  Unhealthy  kubelet  Liveness probe failed: Get \"http://10.0.0.4:8265/healthz\": context deadline exceeded\n", r"health check"),
    ("Error from server (NotFound): pods \"train-0\" not found\n", r"was deleted"),
    ("ValueError: Following weights were not initialized from checkpoint: {'model.layers.0.mlp.gate_up_proj.weight'}\n", r"does not hold weights"),
    ("ValueError: Detected errors during sampling! NaN in the logits.\n", r"logits are NaN"),
    ("RuntimeError: DeepEP error: timeout (dispatch CPU)\n", r"expert parallelism"),
    ("RuntimeError: Failed: Assertion error /DeepEP/csrc/kernels/runtime.cu:61 'cudaErrorInitializationError'\n", r"NVSHMEM"),
    ("ValueError: At most 1 image(s) may be provided in one prompt.\n", r"more images"),
    ("deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 11.8 does not match the version torch was compiled with 12.4\n", r"another CUDA"),
    ("RuntimeError: Could not find optimizer shard for param_state (checkpoint saved with fully_sharded_bucket_space)\n", r"optimizer's state does not fit"),
    ("RuntimeError: Data processing error: CAS service error : Reqwest Error, domain: https://cas-server.xethub.hf.co/reconstructions/1f2a\n", r"Xet"),
    ("filelock._error.Timeout: The file lock '/root/.cache/huggingface/hub/.locks/x.lock' could not be acquired.\n", r"holds the lock"),
    ("ValueError: The features can't be aligned because the key answer of features {'answer': Value(dtype='string')} has unexpected type\n", r"other types in one column"),
    ("RuntimeError: One of the subprocesses has abruptly died during map operation.\n", r"map was killed"),
    ("RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at \"../c10/cuda/CUDACachingAllocator.cpp\":995, please report a bug to PyTorch.\n", r"GPU memory ran out"),
    ("torch.AcceleratorError: CUDA error: peer mapping resources exhausted\n", r"8 others"),
    ("RuntimeError: 10 consecutive empty train batches, aborting\n", r"every episode of many batches"),
    ('Traceback (most recent call last):\n  File "/x/torch/utils/data/dataloader.py", line 1, in _try_get_data\n    data = self._data_queue.get(timeout=timeout)\n_queue.Empty\n', r"came out of a queue"),
    ("AssertionError: No inf checks were recorded for this optimizer.\n", r"found no gradient"),
    ("RuntimeError: Output 0 of ViewBackward0 is a view and its base or another view of its base has been modified inplace.\n", r"changed in place"),
    ("RuntimeError: Rollout thread is not alive\n", r"thread of the run is gone"),
    ("10:44:12 ERROR Background trainer process died\n", r"process of the run is gone"),
    ("20260402-11:10:20.112 VLLMServer ERROR: One or more vLLM servers died, cleaning up all servers\n", r"process of the run is gone"),
    ("[AsyncTrajectoryCollector] FATAL: failure count 9 exceeds threshold 8; trainer will be notified on the next check_health() call.\n", r"process of the run is gone"),
    ("exiting program after receiving SIGTERM.\n", r"ended from outside"),
    ("[412345.1] nfs: server 10.0.0.3 not responding, still trying\n", r"mount does not answer"),
    ("Timeout (0:30:00)!\nThread 0x00007f8c (most recent call first):\n", r"writes down where a process stands"),
)  # fmt: skip

#: What healthy runs print of the same: at their start, or in the middle, and go on.
GONE_ON: tuple[str, ...] = (
    "[412345.1] nfs: server 10.0.0.3 not responding, still trying\n[412346.1] nfs: server 10.0.0.3 OK\n",
    "Timeout (0:30:00)!\nThread 0x00007f8c (most recent call first):\n",
    "[W302 10:00:11.220 socket.cpp:752] [c10d] The client socket has failed to connect to [head]:29500 (errno: 111 - Connection refused).\n" * 3,
    "(raylet) Raylet is terminated. Termination is graceful.\n",
    "gpu-a12:311:811 [0] NCCL INFO NCCL version 2.27.5+cuda12.9\n",
    "  Warning  Unhealthy  kubelet  Readiness probe failed: Get \"http://10.0.0.4:8265/healthz\": dial tcp: connection refused\n",
    "(raylet) Task run_reward failed. There are infinite retries remaining, so the task will be retried.\n",
    "10:44:12 WARNING Caught APITimeoutError in get_model_response. Retrying in 2s (retry 1/10)\n",
)  # fmt: skip
#: What healthy runs print before their first step.
BEFORE: tuple[str, ...] = (
    "Failed to initialize NVML: Driver/library version mismatch\n",
    "  Warning  BackOff  kubelet  Back-off restarting failed container trainer in pod train-0\n",
)
