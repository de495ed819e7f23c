"""Failure texts of what stands around a trainer: Ray's daemons, compilers of kernels, storage, verifiers of answers.

Rows of the table of `failure_texts.py`: (pattern, cause, next step). Texts were read in the sources and public issues
of Ray, bitsandbytes, transformers, torch, cuDNN, botocore, Google's and Hugging Face's clients, math_verify and antlr.
"""

from __future__ import annotations

#: Texts that say why.
TOOLING: tuple[tuple[str, str, str], ...] = (
    (r"Exec format error|Errno 8\b",
     "a program cannot be run on this machine: it is made for another processor or system, or is no program (a page of "
     "an error that was downloaded in its place, a script without its first line)",
     "file PROGRAM beside uname -m; install the build for this machine, or give the path of one that runs"),
    (r"Stale file handle|Errno 116\b|error reading input file",
     "a file on a network mount was replaced or deleted while it was open: the job's own script, code or data that "
     "was changed or synchronised while the job ran",
     "do not change what a running job reads (submit a copy of the script); start again what stands behind that "
     "point of the script"),
    (r"Could not infer dtype of (?!NoneType)\w+|can't convert (?:np\.ndarray of type numpy\.object_|\S*Image)",
     "objects are put into a tensor that are no numbers: images (PIL) or texts that no processor has turned into "
     "numbers, or that are handed over a second time raw",
     "print the types of what the frame puts into torch.tensor; pass images through the processor, and its output on"),
    (r"\bBdbQuit\b",
     "a debugger's breakpoint (breakpoint(), pdb.set_trace()) is in the code, and the run has no terminal to "
     "answer it: it is left, and the run with it", "take the breakpoint out (last frame of the run's own code), or "
     "PYTHONBREAKPOINT=0"),
    (r"Text file busy", "a program or script is being written while it is to be run", "wait for the copy to end"),
    (r"CUDA Setup failed despite|bitsandbytes.{0,80}(?:compiled without|CUDA Setup|not (?:compiled|available))"
     r"|libbitsandbytes_\w+\.so",
     "bitsandbytes finds no library of its own for this CUDA: another version than torch's, or none in "
     "LD_LIBRARY_PATH", "python -m bitsandbytes tells what it looks for; pip install -U bitsandbytes; load_in_4bit and "
     "8-bit optimizers off"),
    (r"[Uu]lysses.{0,80}divi|sequence[ _]parallel.{0,80}divi|divi\w+.{0,60}sequence[ _]parallel",
     "the sequence parallel size does not divide the model's attention heads",
     "a size that divides num_attention_heads (and num_key_value_heads), or 1"),
    (r"(?:[Ff]ailed|[Uu]nable) to register worker|[Ff]ailed to connect to socket .{0,80}(?:raylet|plasma)",
     "a worker of Ray does not reach its raylet: the node's daemon is gone (memory, a full disk, /tmp that was "
     "cleaned), or too many processes start at once",
     "raylet.out and raylet.err in /tmp/ray/session_latest/logs; ulimit -u and -n; ray stop --force, then start anew"),
    (r"Ray is trying to start at .{0,80}already running|[Cc]alling ray\.init\(\) again",
     "Ray already runs at that address: a cluster of the last run that was not stopped, or ray.init() twice",
     "ray stop --force; or ray.init(address='auto') to join it"),
    (r"No execution plans? supports? the graph|cudnn_frontend|cuDNN Frontend",
     "cuDNN has no kernel for this attention: its version does not know the head dimension, mask or GPU",
     "TORCH_CUDNN_SDPA_ENABLED=0 (torch.backends.cuda.enable_cudnn_sdp(False)), or another cuDNN"),
    (r"unable to mmap .{0,80}/torch_|max_map_count",
     "shared memory cannot be mapped: too many shared tensors (vm.max_map_count), or /dev/shm is full",
     "torch.multiprocessing.set_sharing_strategy('file_system'); df -h /dev/shm; fewer data workers"),
    (r"trust_remote_code",
     "the model brings code of its own, and nothing allows it to run",
     "trust_remote_code=True in the trainer, the tokenizer and the engine alike, if you trust the repository"),
    (r"An error occurred \((?:403|AccessDenied)\)|AccessDenied|SignatureDoesNotMatch|ExpiredToken",
     "the object store refuses: the credentials of this process are missing, expired, or have no right to the bucket",
     "aws sts get-caller-identity (gcloud auth list) in the worker's environment; renew the token"),
    (r"ResourceExhausted: 429|Quota exceeded|quota (?:is )?exceeded|RESOURCE_EXHAUSTED: .{0,40}[Qq]uota",
     "a remote service's quota is used up: requests for a judge, or storage",
     "fewer calls at once with retries; raise the quota"),
    (r"SSLCertVerificationError|CERTIFICATE_VERIFY_FAILED|SSLError",
     "a certificate cannot be checked: a proxy between, or certificates that this container lacks",
     "REQUESTS_CA_BUNDLE and SSL_CERT_FILE of the proxy's certificate; download beforehand, HF_HUB_OFFLINE=1"),
    (r"latex2sympy|ParsingException|Could not deserialize ATN|antlr4? .{0,40}version",
     "the verifier of answers cannot parse, or its parser's runtime (antlr4) is of another version than it was made "
     "for", "pip install the antlr4-python3-runtime that math_verify (latex2sympy2) pins; catch what it raises on an "
     "answer, and count it"),
    (r"more than INT_MAX elements|input tensor is too large|integer (?:is )?out of range.{0,40}(?:numel|elements)",
     "one tensor has more elements than the operation counts to (2^31): logits of a whole batch over the vocabulary",
     "fewer tokens per micro-batch; log-probabilities in chunks"),
    (r"training requires a train_dataset|train_dataset is (?:None|empty)",
     "no training data reaches the trainer: the argument is missing, or the split has another name",
     "print the splits of the data set; train_dataset=dataset['train']"),
    (r"on meta tensors", "the model is made without data (device 'meta') and used before its weights are there",
     "no device_map or low_cpu_mem_usage beside ZeRO-3 or FSDP; to_empty() and a load"),
    (r"[Uu]nrecognized model identifier", "the installed version does not know the model's architecture",
     "update transformers and the engine together to the version that the model's page names"),
    (r"DeepSpeed backend not set|init_process_group\(\)",
     "process groups are used before they are made: the script is started without its launcher",
     "start by torchrun, deepspeed or accelerate launch"),
    (r"[Ss]leep mode is not enabled",
     "the engine is told to sleep or wake, and was started without it",
     "enable_sleep_mode=True where the engine is made (rollout.free_cache_engine off tells whether it is this)"),
)  # fmt: skip

#: Texts that say how it failed, and not why.
EMPTY: tuple[tuple[str, str, str], ...] = (
    (r"argument '?\w+'? \(position \d+\) must be (?:\w+ )*\w+, not \w+",
     "a value of another type reaches a function of torch than it takes (a list where a tensor is expected, most "
     "often): "
     "what is gathered is not stacked, or the function it comes from returns another form in this version",
     "print the type of what the frame hands over, and where it was made; compare the versions that the trainer pins"),
    (r"(?:is|are) required (?:in|for|by) .{1,80} (?:when|if|with) .{1,80}",
     "a setting asks for a field that did not arrive: the side that makes it (an engine, a rollout function of one's "
     "own, "
     "the data set) was not told to return it, its version cannot, or it is dropped on the way",
     "print the keys that arrive at the frame; switch the field on where it is made, or the setting off"),
    (r"(?i)\b(?:when|if)\b .{1,80}\b(?:must|should|has to) (?:not )?be\b|\b(?:cannot|can't|can not) be (?:used|set"
    r"|combined"
     r"|enabled)\b .{0,20}\b(?:with|when|if|together|both)\b|\b(?:not supported|incompatible|unsupported) "
     r"(?:with|when|if|for|together)\b|mutually exclusive|\bonly (?:supports?|works?|supported) (?:with|when|if|for)\b",
     "settings that exclude each other, or of which one needs the other: the line names them",
     "change the one that the line names; the installed version's documentation says what goes together"),
    (r"(?i)\b(?:did not|didn't|failed to|never|not) (?:become|come up|get|be) ?(?:healthy|ready|up|available)\b"
     r"|server launch failed|Launch local server timeouted|(?:server|service)s? (?:failed to (?:start|launch)"
     r"|did(?: not|n't) start)|health[ -]?check\w*[^\n]{0,40}\b(?:failed|timed out)|Waiting \w+ servers? timeout",
     "a service that the run starts and needs did not come up in time: its process died as it started, still loads a "
     "model or compiles, or listens at another address or port than is asked",
     "look into that service's own log for its first error; start it by hand and curl its health address; raise the "
     "time limit only where it is still loading"),
    (r"expected a non-empty (?:list|TensorList)|arg is an empty sequence|[Tt]ensor with no values|empty iterable"
     r"|need at least one array|cannot take a larger sample|reduction dim .{0,60}(?:numel\(\) == 0|no elements)",
     "something is empty that is to be put together: a batch, a group or a list of responses of which a filter left "
     "nothing, or none was finished in time", "print how many samples there are at the frame, and what took them away"),
    (r"math (?:domain|range) error|Numerical result out of range",
     "a logarithm, root or exponential of a number that it is not made for: a reward, a length or a probability that "
     "is 0, negative or far too large", "print it at the frame; bound it before"),
    (r"view size is not compatible", "a tensor is not laid out as .view() needs: it was transposed or sliced",
     ".reshape() or .contiguous() at the frame"),
)  # fmt: skip
