"""What a log tells beside its numbers: out of memory, how a run died, recompiles, graph breaks.

Every event keeps its own words; what the words mean is for the reader of the run to say.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from replay_core.dumps import told_lines
from replay_core.dumps.log_lines import TrainerLine
from replay_core.regexes import regex

#: Events of one kind that are kept word by word; the rest are counted.
KEPT = 200
#: Lines of a traceback that are kept: the first frame and its code, and the last of the rest.
_FRAMES = 40
_LONGEST = 2000

#: What a script says of its own run at its end, on a line that says nothing else.
_NOT_LEARNT = (
    r"(?:(?:is |was |has |did |does )?not? (?:been )?(?:learn(?:ing|t|ed)?|improv(?:e|ed|ing|ement))\b|failed to "
    r"(?:learn|improve|converge)|(?:has |is )?(?:collapsed|diverged|degrad(?:ed|ing)|trend(?:ed|ing) down\w*))"
)
VERDICT = (
    r"^\W{0,12}(?:(?:final|overall|learning|training) ){0,2}"
    r"(?:verdict|conclusion|result|outcome|diagnosis|assessment|status)\s{0,3}[:=]\W{0,8}"
    r"(?:the )?(?:\w+ ){0,2}"
    + _NOT_LEARNT
    + r"|^\W{0,12}(?:the )?(?:mean |average )?(?:model|policy|agent|reward|rewards|training|learning)\s"
    + _NOT_LEARNT
    + r"[^\w]{0,6}$|^\W{0,12}no (?:learning|improvement)(?: (?:was )?(?:detected|observed|found|seen"
    r"|in (?:the )?rewards?)){0,2}[^\w]{0,6}$"
)
#: A trainer of one's own that draws again where a group teaches nothing.
THROWN_AWAY = (
    r"(?i:\b(?:skip(?:ped|ping)?|resampl\w+|discard\w*|drop(?:ped|ping)?|filter(?:ed|ing)?(?: out)?)\b.{0,80}"
    r"\b(?:all[ _-](?:wrong|correct|right|zero|same|equal|incorrect|fail\w*|solved)|(?:zero|no|same|equal"
    r"|identical)[ _-]"
    r"(?:advantages?|variance|std|spread|signal|rewards?))\b)"
)
#: A weight update of the engine that did not come to its end.
UPDATE_FAILED = (
    r"(?i:failed to update (?:parameter|weights?)\b|update[ _]weights?(?:_\w+)? failed"
    r"|(?:weights?|parameters?)[ _](?:update|sync\w*|transfer|broadcast)\b.{0,40}\bfailed"
    r"|failed to (?:sync\w*|receive|broadcast|transfer)(?: the)?(?: \w+)? weights?\b"
    r"|error (?:in|during|while) [\w. ]{0,60}update[d_ ]{1,3}weights?|\brefit failed)"
)
#: Compiled when a line asks for them (`re` keeps them): listing a dump of tensors never does.
_PATTERNS: tuple[tuple[str, str], ...] = (
    # torch's CUDA allocator, torch's CPU allocator, Ray's memory monitor, the kernel.
    (
        "oom",
        r"(?:CUDA|HIP|NPU|XPU|MPS)(?: (?:driver )?[Ee]rror)?:? out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|Triton Error \[CUDA\]: out of memory|MPS backend out of memory"
        r"|torch(?:\.cuda)?\.OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|[Cc]uda (?:failure|error) 2 .?out of memory"
        r"|RayTaskError\(OutOfMemoryError\)|RESOURCE_EXHAUSTED: Out of memory",
    ),
    (
        "oom_host",
        r"can't allocate memory: you tried to allocate|ray\.exceptions\.OutOfMemoryError|OOMKilled"
        r"|oom[-_]kill(?:er)?:|oom[-_]kill event|node running low on memory|killed due to memory pressure"
        r"|slurmstepd: error: .{0,80}[Ee]xceeded .{0,20}memory limit"
        r"|^MemoryError\b|[Oo]ut of memory: Killed process|crashed after using all available RAM"
        # What a network card or an engine of transfers cannot register is a limit of locked memory.
        r"|^(?!.*(?:ibv_|[Rr]egister(?:ed|ing)? memory|[Mm]emory registration|reg_mr|[Rr][Dd][Mm][Aa]|mlx5))"
        r".*(?:Cannot allocate memory|std::bad_alloc)",
    ),
    # A collective that a rank waited for in vain: torch's watchdog, NCCL's own results.
    (
        "nccl",
        r"Watchdog caught collective operation timeout|[Ww]atchdog (?:thread terminated|got stuck)"
        r"|Heartbeat monitor timed out|Some NCCL operations have failed or timed out|NCCL error[: ]"
        r"|^\s+(?:all_\w+|broadcast\w*|barrier|reduce\w*|recv|send|gather|scatter) "
        r"\(\S*(?:torch/distributed|c10d|nccl)\S*:\d+\)$"
        r"|^\s+(?:\w*update_named_param\w*|\w*update_weights?\w*|\w*sync_weights?\w*|\w*_to_vllm|\w*_to_sglang) "
        r"\(\S+:\d+\)$"
        r"|collective timeout from (?:local )?rank \d+"
        r"|Timeout at NCCL work|[Tt]imed out waiting \d+ ?ms for (?:recv|send|\w+ operation)|failed to pass "
        r"monitoredBarrier"
        r"|nccl(?:UnhandledCuda|System|Internal|Remote)Error|detected by watchdog at work",
    ),
    (
        "cuda_error",
        r"(?:CUDA|HIP|NPU|XPU|cuDNN|cuBLAS)(?: kernel)?(?: driver)? error: |CUBLAS_STATUS_(?!SUCCESS)[A-Z]"
        r"|[Dd]evice-side assert triggered|NVRM: Xid|CUDA error \d+|\.cu:\d+: .{0,200}Assertion .{1,200} failed",
    ),
    # torchrun's agent, the shell, Python's fault handler, C++, Slurm; a word in a sentence is none of them.
    (
        "killed",
        r"closing signal SIG[A-Z]+|Closing process \d+ via signal SIG|Received \d+ death signal"
        r"|Signal \d+ \(SIG[A-Z]+\) received by PID|got signal: \d+|failed \(exitcode: -?\d+\)"
        r"|^\s*exitcode\s+: -?\d+ \(pid|^\s*rank\s+: \d+ \(local_rank: \d+\)"
        r"|\b(?:[Rr]eceived|[Cc]aught|[Gg]ot|[Tt]erminated by|[Kk]illed by)(?: signal)?:? SIG[A-Z]{2,5}\b"
        r"|after receiving SIG[A-Z]{2,5}\b|^\W*SIG(?:TERM|KILL|SEGV|ABRT|BUS|INT|HUP|XCPU)\b|\bSIG[A-Z]{2,5} received\b"
        r"|^(?:\S+: line \d+:\s+\d+ )?\s*(?:Killed|Terminated|Aborted|Segmentation fault|Bus error)"
        r"(?: \(core dumped\)(?: .*)?)?(?:\s{2,}.*)?$"
        r"|^(?:double free or corruption|free\(\): |munmap_chunk\(\)|corrupted size vs|malloc\(\): |corrupted "
        r"double-linked)"
        r"|^\s*(?:Floating point exception|Illegal instruction)(?: \(core dumped\))?\s*$|[Tt]erminated by signal \d+"
        r"|exits with return code = -?[1-9]|(?:(?<!died, )[Ee]xit(?:ed with)? code:?"
        r"|finished with exit code) (?:-(?!1\b)\d+"
        r"|13[4-9]|143)\b|died, exit code: -(?!15\b)\d"
        r"|Fatal Python error: |terminate called (?:after throwing|without an active)"
        r"|Worker exit type: SYSTEM_ERROR"
        r"|DeadlineExceeded: |The node was low on resource|\bpod\b.{0,80}\b[Ee]victed"
        r"|slurmstepd: error: .*CANCELLED|srun: error: .*: (?:Killed|Terminated|Exited with exit code)",
    ),
    # Failures that are no exception's line: gloo's, Ray's, the engines', a command line's.
    (
        "failed",
        r"^(?:\S*/)?python[\d.]{0,6}: (?:No module named|can't open file|Error while finding)"
        r"|Gloo connectFullMesh failed|gloo/transport/tcp/\S+\] |client socket has (?:failed|timed out)"
        r"|cannot be scheduled right now|No available node types can fulfill|Could not override '|Duplicate GPU "
        r"detected"
        r"|Call to (?:connect|bind|accept|ibv_)\w* .{0,80}(?:failed|returned)|marked dead because|missed too many "
        r"heartbeats"
        r"|Watchdog timeout \(self\.watchdog_timeout|EngineCore encountered|Engine core initialization failed"
        r"|No available shared memory broadcast block|: error: (?:unrecognized arguments|the following "
        r"arguments|argument )"
        r"|found NaN in local|loss scale already at minimum|fallen off the bus|[Uu]ncorrectable ECC"
        r"|EADDRINUSE|[Ss]hared memory segment|No space left on device|DataLoader worker \(pid|: undefined symbol: "
        r"|Unhandled exception: N\S+ what\(\): |got completion (?:from peer )?with (?:error|status)|\bIBV_WC_[A-Z]"
        r"|Stale file handle|: error reading input file: |Exec format error"
        r"|^(?!df: )\S+(?:: line \d+)?: \S.{0,160}: (?:command not found|No such file or directory|Permission denied"
        r"|Text file busy)$"
        r"|srun: (?:error|fatal): (?:Unable|Invalid)|(?:sbatch|salloc): error: |Non-root FSDP instance"
        r"|^\s*(?:ERROR|Error|FATAL): .{0,80}(?:did not|failed to|never) (?:become|come up|get|start|launch)\b"
        r"|: command not found$|Error response from daemon: |No matching distribution found"
        r"|GLIBC\S* not found|shared memory limit|Request rejected: |exceeds the maximum allowed length"
        r"|^\s*size mismatch for \S+: copying a param|^\s*class_name: \w|^In '[^']{1,200}': Could not find '"
        r"|^(?!\S*(?:Error|Exception)\b).*(?:[Ff]ailed to register memory|pthread_create failed)"
        r"|\(raylet\) .{0,600}Too many open files"
        r"|Raylet is terminated\. Termination is unexpected|raylet exited immediately because"
        r"|Mismatched NCCL version|NCCL WARN (?:Cuda failure 401|Error: failed to extend)|Failed to initialize NVML: "
        r"|device handle for GPU\S+ GPU is lost|srun: error: task \d+ launch failed|slurmstepd: error: pyxis"
        r"|srun: fatal: SLURM_|OCI runtime create failed|\bFailedMount\b|MountVolume\.SetUp failed"
        r"|srun: error: Prolog hung on|(?:One or more|All) \w+ servers died|Background \w+ process died"
        r"|^failure count \d+ exceeds threshold"
        r"|Failed to connect to GCS within|Unhandled mesh failure|srun: error: Node failure on"
        # What Kubernetes, Ray and launchers say of a job that is over, or was never begun.
        r"|\bkubelet\b.{0,80}[Ee]phemeral|[Ee]phemeral[- ](?:local )?storage usage exceeds|imminent node shutdown"
        r"|Back-off restarting failed container|\bNodeNotReady\b|\bTaintManagerEviction\b|\bPreempted by pod\b"
        r"|(?:Liveness|Startup) probe failed: |^Error from server \(NotFound\): pods|Error: No such container: "
        r"|longer than specified deadline|\bFailedScheduling\b|\bImagePullBackOff\b|\bErrImagePull\b"
        r"|Failed to pull image|Job entrypoint command failed|Job supervisor actor (?:could not|failed)"
        # Not of what runs beside it: a board, a tracker.
        r"|^(?i:\w{0,12}(?:orchestrator|trainer|training|inference|worker|learner|actor|rollout|server|launcher"
        r"|process|job|main)\w{0,8}) failed with exit code [1-9]",
    ),
    (
        "traceback",
        r"^\s*(?:[\w.]+\.)?\w+Error(?:\(\w+\))?:(?: |$)|^\s*(?:[\w.]+\.)?\w*Exception(?:\(\w+\))?: "
        r"|^(?:\w+\.)+(?:(?:Read|Connect|Write|Pool)Timeout|TimeoutExpired): "
        r"|^(?:[a-z_]\w*\.)+[A-Z]\w*(?:Invalid|Timeout|NotFound|Exceeded|Unavailable|Failed|Failure|Refused|Denied|Dead|Died|"
        r"Mismatch|Conflict|Overflow|Full|Expired|Disconnected): "
        r"|^(?:\w+\.)*(?:exceptions?|_?errors?|exc)\.(?:\w+\.)*[A-Z]\w+(?:\(\w+\))?: "
        r"|^(?:[\w.]+\.)?(?:Assertion|NotImplemented|Recursion|Timeout|EOF)Error\s*$|^\W*EXC\b"
        r"|^Unhandled error .{0,80}ray::"
        r"|^\w[\w ]{0,40}? (?:failed|error): (?:[\w.]+\.)?\w+Error\b",
    ),
    # A bar of data that stands at 0 after 10 minutes and more: a worker that never began.
    (
        "stalled",
        r"^\s*(?:Map|Filter|Generating|Tokeniz|Loading|Preprocess|Process|Creating|Saving|Flattening|Running tokenizer|"
        r"Grouping|Extracting|Applying|Adding)[^|]{0,80}\b0%\|[^|]{0,200}\|\s*0/\d+ \[(?:\d+:\d\d|[1-5]\d):\d\d<\?"
        r"|^\s*Generating \w+ split: 0 examples \[(?:\d+:\d\d|[1-5]\d):\d\d, \?",
    ),
    # A bar of steps before its first one: where nothing follows, the run hangs there, or its log was cut.
    (
        "begins",
        r"(?<!Processed prompts:   )(?<!Adding requests:   )\b0%\|[^|]{0,200}\|\s*0/\d+ \[0?0:00<\?, \?(?:it|s)",
    ),
    # What is said once as a program is started: launchers, trackers, a shell that echoes its commands, a prompt.
    (
        "started",
        r"Started a local Ray instance|^nohup: ignoring input|were not passed to `accelerate launch`"
        r"|Setting OMP_NUM_THREADS environment variable for each process|wandb: Tracking run with wandb version"
        r"|\[launch\.py:\d+:main\] WORLD INFO DICT|\[runner\.py:\d+:main\] cmd = "
        r"|^(?:\+ |\S*[\w)\]~] ?[$#] )(?:\w+=\S* )*(?:nohup |srun |uv run "
        r")*(?:python3?|torchrun|accelerate|deepspeed|bash"
        r"|sh|ray|swift|llamafactory-cli|trl)\b",
    ),
    # What hydra says of a program's main function that has failed, before its traceback.
    ("main_failed", r"^Error executing job with overrides: "),
    # What a trainer says behind its last step.
    (
        "finished",
        r"['\"]train_runtime['\"]: |\] Process \d+ exits successfully"
        r"|^(?:\d{1,4}: )?\W*train metrics \*{3,}|Training completed\. Do not forget to share"
        r"|(?i:^(?!.{0,60}\b(?:epoch|step|phase|stage|iteration|batch)\b)\W{0,8}(?:[\w-]{1,20} ){0,2}"
        r"train(?:ing)? (?:is |has |was )?(?:been )?(?:complete[ds]?|finished|done)(?: successfully)?\b"
        r"(?!.{0,40}\bfailed))",
    ),
    # Ray's own word of a job that is over.
    ("succeeded", r"^Job '[^']{1,200}' succeeded\s*$"),
    # What goes on, and is worth knowing of.
    (
        "notice",
        r"(?i:\bloss (?:is|became|==?) ?(?:nan|inf)\b)|`lr_scheduler\.step\(\)` before|NCCL WARN NET/|is preempted "
        r"by PreemptionMode|Preempting request|Retract requests|pool is full\. Retract|sequence length is "
        r"longer than the specified maximum|right-padding was detected|None of the inputs have requires_grad"
        r"|(?i:(?:could not|couldn't|unable to|failed to|cannot|can't) (?:load|find|restore)(?: \w+){0,2} optimi[sz]er"
        r"|optimi[sz]er(?:[ _]states?)? (?:\w+ )?(?:not (?:loaded|found|restored)|missing|starts? from scratch))"
        r"|[Tt]okenization mismatch: \d|Cache not flushed because|waitForInput: .{0,200}timed out after \d"
        r"|Input prompt \(\d+ tokens\) is too long|_IncompatibleKeys\(missing_keys=\['"
        r"|^\w*loss is -?0(?:\.0+)?(?: |$)"
        r"|(?<!GET /health )(?<!GET /health_generate )HTTP/[12]\.\d\"? 5\d\d\b|!{40}"
        r"|Timeout during (?:comparison|parsing)|newly initialized|`do_sample` is "
        r"set to `False`|NaN or Inf found in input "
        r"tensor|OVERFLOW! (?:Rank|Skipping)"
        r"|" + UPDATE_FAILED + r"|partially updated"
        r"|allocator cache flushes|\bSpilled \d+ [MG]iB|over 95% full|trainable params: 0 |Already found a "
        r"`peft_config`"
        r"|(?i:" + VERDICT + r")"
        r"|"
        + THROWN_AWAY
        + r"|process just got forked, after parallelism|average ratio of batch|to instantiate a model of type"
        r"|but the current dype|but the current dtype|\b[Rr]equeu(?:ed|ing)\b|Can't pickle |zero_advantage=\d"
        r"|(?i:^(?!.*\b(?:done|terminated)['\"]?\s?[=:]\s?(?:true|false)\b).*"
        r"(?:reward|compute_score|sandbox|verif(?:y|ier)|judge|code execution)\b.{0,80}(?:timed[ "
        r"-]?out|time-?outs? (?:on|after|for|in|error)|failed(?! ?[:=]? ?0)|"
        r"unreachable|refused))(?<!\b0 failed)",
    ),
    # The rewards of a group, as home-made trainers print them.
    (
        "rewards",
        r"(?i)\brewards?\b[^\[\n=:]{0,20}[:=]\s{0,4}(?:(?:torch\.)?tensor\(|array\()?\[\s{0,4}-?\d[^\]\[a-z]{0,2000}\]",
    ),
    # Phases that slime times: what has begun and not ended is where it stands.
    ("phase", r"\bTimer \w+ (?:start|end)\b"),
    # What a logger marks as an error, and goes on after.
    ("error", r"(?:^|[\s\[|-])(?:ERROR|CRITICAL)[\s\]|:-]"),
    # What a trainer says of an engine, or of a worker of several, that it starts again by itself.
    (
        "engine_again",
        r"(?i)\b(?:engine|worker|server|replica|actor)[ #]?\d{1,4}\b.{0,60}"
        r"\b(?:restarting|restarted|is back|recovered|replaced|started again)\b"
        r"|\brecovered [1-9]\d{0,3} .{0,40}\b(?:engine|worker|server)s?\b",
    ),
    # Ray's table of what held the host's memory.
    ("memory_user", r"^\d{1,9}\s+\d{1,6}\.\d\d\s+(?:ray::|python)"),
    # An inference engine's own account of itself, every ten seconds.
    ("engine", r"Avg (?:prompt|generation) throughput: |Decode batch.{0,200}#running-req"),
    ("recompile_limit", r"torch\._dynamo hit config\.(?:\w*recompile_limit|\w*cache_size_limit)"),
    ("recompile", r"Recompiling function \S+ in "),
    ("graph_break", r"Graph break (?:in user code|from|due to|:)|Graph Break Reason"),
    # A debugger that waits for somebody: Ray's, a remote one, pdb's prompt.
    (
        "debugger",
        r"Ray debugger is listening|RemotePdb session open|[Ww]aiting for (?:a )?(?:debugger|client)(?: to attach)?\b"
        r"|[Dd]ebugger (?:is )?(?:waiting|listening|paused)|Use 'ray debug' to connect|Ray post-?mortem debug"
        r"|^\(Pdb\)|^ipdb>|^\(Rdb\)|paused at (?:a )?breakpoint|Breakpoint hit|Active breakpoints",
    ),
    # What a process says again and again while it waits for another.
    (
        "waiting",
        r"(?i)\b(?:still )?waiting (?:for|on|until)\b|\bno progress (?:for|in|since)\b|\bis not up yet\b"
        r"|\bblocked (?:on|for)\b|\bwaiting ?(?:\.{2,}|…)\s*$|\bbuffer has \d+ .{0,60}\brequires\b",
    ),
    ("negative_kl", r"KL divergence is starting to become negative: -?\d"),
    (
        "not_finite",
        r"(?i)grad_norm is not finite|Bad grad_norm detected|Gradient overflow|found (?:nan|inf) in",
    ),
)
#: What ends with a line of error is told of the whole log (`log_text`), not of one line.
LAST_ERROR = "last_error"
#: And how far it came (`log_progress`); and that an exception was only logged (its line is the event's text).
PROGRESS, GOES_ON = "progress", "goes_on"
KINDS = (*(kind for kind, _ in _PATTERNS), *told_lines.KINDS, LAST_ERROR, PROGRESS, GOES_ON)
#: What a line tells of what is trained on goes before every kind that is more general than a death.
_AFTER_DEATHS = "stalled"
#: Of these a run dies, and the frames that led there are kept.
DEATHS = ("oom", "oom_host", "nccl", "cuda_error", "killed", "failed", "traceback")
#: A cheap look before the patterns: most lines of a log hold none of these.
HINT = regex(
    r"[Oo]ut of memory|OutOfMemory|allocate memory|oom[-_]kill|OOMKilled|torch\._dynamo hit|Recompiling"
    r"|[Gg]raph [Bb]reak|not finite|Gradient overflow|found (?:[Nn]a[Nn]|[Ii]nf|NAN|INF)"
    r"|Error|Exception|EXC\b|Traceback|SIG[A-Z]|[Ss]ignal|[Ww]atchdog|Heartbeat|NCCL|nccl"
    r"|CUDA error|[A-Z] error: |CUBLAS|assert triggered|Xid|exitcode|core dumped|CANCELLED"
    r"|[Ww]aiting (?:for|on|until)|[Nn]o progress|[Bb]locked (?:on|for)|KL divergence is starting"
    r"|restart|is back|[Rr]ecovered|replaced|started again"
    r"|Killed|Terminated|Aborted|Segmentation|Bus error|Fatal Python|terminate called|srun: (?:error|fatal)|sbatch: e"
    r"|salloc: e|Non-root FSDP"
    r"|[Ll]oss (?:is|became|=)|lr_scheduler|Exceeded|low on "
    r"resource|[Ee]victed|Invalid|Unavailable|Disconnected|Denied|gloo|[Tt]imed? "
    r"?-?out|Timeout|Expired|EADDRINUSE|monitoredBarrier|scheduled right now|marked "
    r"dead|heartbeats|EngineCore"
    r"|Engine core|broadcast block|: error: |NaN in local|loss scale|fallen off|ECC|DataLoader worker|undefined symbol"
    r"|GLIBC|shared memory limit|running low on memory|memory pressure|OUT_OF_MEMORY|[Pp]reempt|Retract|longer than "
    r"the spec"
    r"|right-padding|requires_grad|newly init|`do_sample`|NaN or Inf|OVERFLOW|cache flushes|Spilled|95% full|params: 0 "
    r"|peft_config|average ratio of|to instantiate a model|the current dt?ype|[Rr]eward|[Ss]andbox|[Vv]erif|[Jj]udge"
    r"|compute_score|Unsupported|NotFound|can fulfill|Could not override|Duplicate "
    r"GPU|errors?\.|exc\.|exceptions?\.|c10d|No space left|memory segment|throughput: |Decode batch"
    r"|[Oo]ptimi[sz]er|[Ff]ailed to update|[Uu]pdate[ _][Ww]eights?|partially updated|[Rr]efit failed"
    r"|[Ff]ailed to (?:sync|receive|broadcast|transfer)"
    r"|(?:[Ww]eight|[Pp]arameter)s?[ _](?:[Uu]pdate|[Ss]ync|[Tt]ransfer|[Bb]roadcast)"
    r"|Request rejected|maximum allowed length|just got forked|:\d\d(?:<|, )\?|:\d{1,6}\)$|torch/dist"
    r"|local Ray|^nohup: |accelerate launch|OMP_NUM_THREADS env|Tracking run|WORLD INFO|main\] cmd|^\+ |[$#] \w|with "
    r"overrides"
    r"|exits successfully|[Dd]ebugger|[Pp]db\b|Rdb\)|reakpoint|ray debug|ython[\d.]*: "
    r"|Stale file|input file: |format error|No such file|Permission denied|Text file busy|train_runtime"
    r"|train metrics|[Tt]rain(?:ing)? .{0,10}(?:[Cc]omplete|[Ff]inished|[Dd]one)"
    r"|\.cu:\d|class_name: |size mismatch for |SYSTEM_ERROR|is not up yet|[Rr]equeu|zero_advantage"
    r"|Can't pickle|got completion |IBV_WC|HTTP/[12]\.\d\"? 5|ERROR|CRITICAL|Timer \w|!{40}|double free|free\(\): "
    r"|munmap_chunk|corrupted |malloc\(\)"
    r"|Floating point exc|Illegal instr|return code =|[Ee]xit(?:ed with)? code|exit code|terminated by sig"
    r"|okenization mismatch|Bad grad_norm|Cache not flushed|is too long|Could not find|' succeeded"
    r"|_IncompatibleKeys|exitcode"
    r"|(?i:verdict|not learning|trended|did not (?:learn|improve)|no (?:learning|improvement)|collapse)"
    r"|register memory|[Rr]aylet (?:is term|exited)|Mismatched|failure 401|to extend|NVML|GPU is lost|Prolog"
    r"|servers died|process died|launch failed|pyxis|fatal: SLURM|OCI runtime|Mount"
    r"|failure count|Back-off|NotReady|Eviction|by pod|probe failed|from server|such container|memory limit"
    r"|emory registration|pthread_create|Too many open|connect to GCS|mesh failure|ephemeral"
    r"|node shutdown|specified deadline|FailedScheduling|ImagePull|pull image|entrypoint command|supervisor actor"
    r"|using all available RAM|bad_alloc"
    r"|[Ww]aiting ?(?:\.\.|…)|[Bb]uffer has \d|^\d+\s+\d+\.\d\d\s+(?:ray::|python)"
    r"|^\s*rank\s+: \d|command not found|from daemon|matching dist|Unhandled e(?:rror|xception)"
)

#: What loggers put before a message: vLLM's, SGLang's, Python's own, glog's; times, levels and files in brackets.
_BEFORE = (
    r"(?:\[?\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?(?: [A-Z]{2}\d{1,4})*\]?"
    r"|\[?(?:\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?"
    r"|\[?(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|SUCC)\]?:?"
    r"|\[[\w./<>-]{1,60}:\d{1,6}\]|[\w./-]{1,60}\.py:\d{1,6}\]?:?|\[[\w.]{1,60}\]|\[rank\d{1,6}\]:?|stderr|stdout"
    r"|[EWIFC]\d{4}|\d{1,7}(?= "
    r"[\w./-]+\.py:)"
    r"|[-–|]{1,2})"
)
_LOGGER = regex(rf"^{_BEFORE}(?:[ \t]{{1,8}}{_BEFORE})*[ \t](?=\s*\S)")
_MARKED = regex(r"\b(?:ERROR|CRITICAL)\b")
#: A line that a program logs of its own insides is none of how it ends.
_INSIDE = regex(r"\bDEBUG\b")
#: How a program says of an exception that it has caught it: on the line before the traceback, or before its head.
_CAUGHT = regex(
    r"(?i)^\W{0,6}(?:\[?(?:error|warning|exception|warn)\]?\b(?!:? executing job)|failed\b|caught\b|could not\b"
    r"|skipping\b)|(?<!\.)\b(?:ERROR|WARNING|WARN)\b"
)
#: What is said as a program closes, or of how it failed: no sign that it goes on.
_IS_CLOSING = regex(
    r"(?i)shut|exit|clos|clean|destroy|terminat|abort|fail|error|exception|traceback|kill|wandb|stop|died|dead|leaked"
    r"|warn|signal|finish|end(?:ed|ing)\b|slurm|srun|HYDRA_FULL_ERROR|elastic|teardown|^\W*$"
)
_CLOCKED = regex(r"\d\d:\d\d:\d\d|\bINFO\b")
#: One of what cannot be read as Python names no function.
_FRAME = regex(r'^\s*File "[^"]+", line \d+(?:, in |\s*$)')
_BEGINS = "Traceback (most recent call last)"
#: How IPython heads a traceback: the exception's class stands before it, and its text behind all frames and their code.
_NOTEBOOK = regex(r"^\W{0,4}((?:\w+\.)*[A-Za-z_]\w*)\s+Traceback \(most recent call last\)\s*$")
#: Its frames: File path:line, in function(...); Cell In[3], line 7; path in function(...).
_NOTEBOOK_FRAME = regex(
    r"^(?:File (?P<file>[^\s:][^:]{0,300}):(?P<at>\d+)(?:, in (?P<in>[^(]{1,200}))?"
    r"|(?P<cell>(?:Cell In|Input In) ?\[\d+\]|<ipython-input-[^>]{1,80}>)"
    r"(?:, line (?P<line>\d+)| in (?P<inside>[^(]{1,200}))?"
    r"|(?P<old>[~/][^\s:]{1,300}) in (?P<func>[^(]{1,200}))"
)
_ARROW = regex(r"^-{1,6}> ?(\d+) (.*)$")
#: pydantic's account of a configuration: a field on a line of its own, and what is wrong with it behind blanks.
_VALIDATES = regex(r"\b\d+ validation errors? for ")
_BARE = regex(r"validation errors? for \S+$")
_FIELD, _COMPLAINT = regex(r"^[A-Za-z_][\w.\[\]-]{0,120}$"), regex(r"^\s+(\S.*?)(?: \[type=.*)?$")
_MOST_SAID = 400
#: Lines that a notebook's traceback may go on for.
_LONG_TRACE = 5000
#: The exception behind a frame, where a paste has lost its newlines.
_ON_ONE_LINE = regex(r"\s((?:[\w.]+\.)?\w+(?:Error|Exception): .*)")
#: How Python joins the exceptions of one chain: in its words, which stand before the frames of the later one.
HANDLING = "During handling of the above exception, another exception occurred:"
CAUSED = "The above exception was the direct cause of the following exception:"
#: An exception as Python ends a traceback with it: its class, and a message or none.
_RAISED = regex(
    r"^(?:(?:[A-Za-z_]\w*\.)+\w+|[A-Z]\w*)(?:\([\w.]*\))?: ?"
    r"|^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Iteration|Timeout|Unsupported)\s*$"
    r"|^(?:[a-z_]\w*\.)+[A-Z]\w*\s*$"
)
#: An exception of a class of one's own, without a message, on the line behind its frames and their code.
_NAME = regex(r"^[A-Z]\w*\s*$")
#: Lines of other processes and of print() that may stand inside a traceback.
_BETWEEN = 60
#: What stands in the place of an exception that a log does not hold.
UNTOLD = "a traceback whose exception is not in the log"
#: Lines of work behind an exception that was logged, in a console without streams.
_WORKS = 2
#: Characters of a line that are looked at whole; of longer ones its beginning and its end.
_FULL, _BEGINNING, _ENDING = 6000, 3000, 1500
#: Kinds whose lines keep what stands before them: the clock tells for how long.
_BY_CLOCK = ("waiting", "engine")
#: What Python says of an exception that ends nothing.
_HARMLESS = "Exception ignored in"
#: What wandb's threads raise as the program closes, and AReaL's launcher as its trainer has ended by itself.
_CLOSES = regex(r"(?:MessageRouterClosed|SockClientClosed)Error\b|\bJobException: .*JobState\.COMPLETED\b")
#: What a launcher or a script's clean-up says before it ends what it has started, and for how many lines it speaks of
#: that: a shell's word that such a process was killed tells of no kernel that ran out of memory.
_STOPS = regex(
    r"(?i)\b(?:stopping|killing|terminating|shutting down|cleaning up|tearing down)\b.{0,60}"
    r"\b(?:process\w*|servers?|services?|workers?|pids?|engines?|ray|vllm|sglang)\b|\bsend(?:ing)? SIGKILL\b"
)
_STOPPED, _SHELL_SAYS = 6, regex(r"^(?:\S+: line \d+:\s+\d+ )?\s*(?:Killed|Terminated)\b")


@lru_cache(maxsize=256)
def _kind(text: str) -> str | None:
    """The kind of event that a line is of; None of most. A library says one thing thousands of times over."""
    for kind, pattern in _PATTERNS:
        if kind == _AFTER_DEATHS and (told := told_lines.kind_of(text)) is not None:
            return told
        if re.search(pattern, text):
            return kind
    return None


#: Lines this short come again and again in a console.
_SHORT = 160


@lru_cache(maxsize=4096)
def _hints(text: str) -> bool:
    return _may_tell(text)


def _may_tell(text: str) -> bool:
    return HINT.search(text) is not None or told_lines.may_tell(text)


class Event(Struct):
    """One thing the log tells: its kind, its words, and the frames of the traceback that led to it."""

    kind: str
    text: str
    line: int
    rank: int | None
    frames: tuple[str, ...] = ()


class Watch:
    """Looks at every line; hands out what is an event."""

    def __init__(self) -> None:
        self._frames: dict[str, deque[str]] = {}
        self._code_follows: set[str] = set()
        #: Streams that are inside a traceback, and whether its exception ends nothing.
        self._inside: dict[str, bool] = {}
        self._harmless: set[str] = set()
        self._last_frame: dict[str, TrainerLine] = {}
        #: Streams whose last line says that a configuration does not validate: which of its fields stands below.
        self._validates: dict[str, Event] = {}
        #: Streams that are inside a traceback of a notebook: the class of its exception, and where it began.
        self._named: dict[str, tuple[str, int]] = {}
        #: Streams in which another exception of the chain follows, and how they are joined.
        self._joins: dict[str, str] = {}
        #: The first frame of a stream's traceback and its code: where the try stands that caught it, or the program.
        self._outermost: dict[str, list[str]] = {}
        #: Streams whose last exception says on the next line what is wrong.
        self._goes_on: dict[str, Event] = {}
        #: The last line of a stream that says an exception was caught; streams inside a traceback that is logged so;
        #: and those that have come to its end, with how many lines of work follow.
        self._said_caught: dict[str, int] = {}
        self._logs: set[str] = set()
        self._after: dict[str, tuple[Event, int]] = {}
        #: The last line on which something says that it stops what it has started.
        self._stops = -_STOPPED
        #: Exceptions that were only logged: the stream went on with its work.
        self.went_on: list[Event] = []

    def untold(self, after: int) -> Iterator[Event]:
        """Tracebacks behind that line (the last of metrics) whose exception the log does not hold: it was cut, or lost
        in a paste. Stacks that a program prints by the way have no such head.
        """
        for stream, frames in self._frames.items():
            if stream in self._named:
                continue
            last = self._last_frame[stream]
            if last.number > after and (self._inside.get(stream) is False or last.number <= 2 * len(frames)):
                yield Event("traceback", UNTOLD, last.number, last.rank, tuple(frames))
        for stream, (name, began) in self._named.items():
            if began > after:
                frames = self._frames.get(stream, deque())
                yield Event("traceback", f"{name} (its text is not in the log)", began, None, tuple(frames))

    def _in_notebook(self, line: TrainerLine) -> tuple[bool, Event | None]:
        """Whether a line is one of a notebook's traceback, and the event where it is its exception."""
        name, began = self._named[line.stream]
        text = line.text.strip()
        if line.number - began > _LONG_TRACE:
            del self._named[line.stream]
            return False, None
        short = name.rpartition(".")[2]
        if re.match(rf"(?:[\w.]+\.)?{re.escape(short)}(?::|\s*$)", text):
            del self._named[line.stream]
            frames = tuple(self._frames.pop(line.stream, ()))
            kind = _kind(text)
            # A class that is no error by its name (KeyboardInterrupt, OutOfResources) ends the cell all the same.
            return True, Event(
                kind if kind in DEATHS else "traceback", text.rstrip(": ")[:_LONGEST], line.number, line.rank, frames
            )
        if frame := _NOTEBOOK_FRAME.match(text):
            where = frame["file"] or frame["cell"] or frame["old"]
            inside = frame["in"] or frame["inside"] or frame["func"] or "<module>"
            at = frame["at"] or frame["line"] or "?"
            kept = self._frames.setdefault(line.stream, deque(maxlen=_FRAMES))
            kept.append(f'File "{where}", line {at}, in {inside.strip()}'[:200])
        elif (arrow := _ARROW.match(text)) and (known := self._frames.get(line.stream)):
            kept = known
            kept.append(arrow[2].strip()[:200])
        return True, None

    def event(self, line: TrainerLine) -> Event | None:
        """The line as an event, if it is one."""
        if len(line.text) > _FULL:
            # An answer or a tensor in one line: what a program says stands at its beginning, an exception at its end.
            line = replace(line, text=f"{line.text[:_BEGINNING]} ... {line.text[-_ENDING:]}")
        self._watch_for_work(line)
        if line.text[:1] not in " \t" and _STOPS.search(line.text[:400]):
            self._stops = line.number
        if line.number - self._stops <= _STOPPED and _SHELL_SAYS.match(line.text):
            return None
        if head := _NOTEBOOK.match(line.text):
            self._named[line.stream] = head[1], line.number
            self._frames.pop(line.stream, None)
            return None
        if line.stream in self._named:
            is_of_it, found = self._in_notebook(line)
            if is_of_it:
                return found
        # An engine logs each line of a traceback behind its own clock and file.
        prefix = _LOGGER.match(line.text)
        if prefix is None:
            found = self._kept(line, self._event(line))
            if found is not None and found.kind in _BY_CLOCK and line.stamp:
                found = replace(found, text=f"{line.stamp} {found.text}"[:_LONGEST])
            return found
        found = self._kept(line, self._event(replace(line, text=line.text[prefix.end() :])))
        if found is not None and found.kind in ("killed", "failed") and _INSIDE.search(prefix[0]):
            return None
        if found is None and _MARKED.search(prefix[0]) and not self._is_told(line.stream):
            found = Event("error", line.text[prefix.end() :].strip()[:_LONGEST], line.number, line.rank)
        # How long it waits is told by the clock.
        whole = f"{line.stamp} {line.text.strip()}" if line.stamp else line.text.strip()
        return replace(found, text=whole[:_LONGEST]) if found and found.kind in _BY_CLOCK else found

    def _watch_for_work(self, line: TrainerLine) -> None:
        """Whether a stream goes on with its work behind an exception that it has logged."""
        text = line.text
        if _BEGINS in text:
            before = text[: text.index(_BEGINS)]
            is_logged = _CAUGHT.search(before) is not None or line.number - self._said_caught.get(line.stream, -9) <= 2
            (self._logs.add if is_logged else self._logs.discard)(line.stream)
            self._after.pop(line.stream, None)
        elif (known := self._after.get(line.stream)) is not None:
            event, lines = known
            if not text[:1].isspace() and not _IS_CLOSING.search(text) and (line.stream or _CLOCKED.search(text)):
                lines += 1
            # A console without streams is shared: of it more is asked.
            if lines >= (1 if line.stream else _WORKS):
                self.went_on.append(Event(GOES_ON, str(event.line), line.number, line.rank))
                del self._after[line.stream]
            else:
                self._after[line.stream] = event, lines
        elif text and text[0] not in " \t" and len(text) < _FULL and _CAUGHT.search(text[:200]):
            self._said_caught[line.stream] = line.number

    def _kept(self, line: TrainerLine, found: Event | None) -> Event | None:
        """The event; where it is the end of a traceback that was logged, what follows is looked at."""
        if found is not None and found.kind == "traceback" and line.stream in self._logs:
            self._logs.discard(line.stream)
            self._after[line.stream] = found, 0
        return found

    def _is_told(self, stream: str) -> bool:
        """Whether a line is one of a traceback, whose exception is told."""
        return stream in self._inside or stream in self._code_follows or bool(self._frames.get(stream))

    def _takes_field(self, line: TrainerLine) -> bool:
        """Whether a line goes on with the account of a configuration that does not validate, which then holds it."""
        told = self._validates[line.stream]
        field, complaint = _FIELD.match(line.text.rstrip()), _COMPLAINT.match(line.text)
        if (field is None and complaint is None) or len(told.text) > _MOST_SAID:
            del self._validates[line.stream]
            return False
        if field is not None:
            told.text += f"{':' if _BARE.search(told.text) else ';'} {field[0]}"
        elif complaint is not None and not complaint[1].startswith("For further information"):
            told.text += f" ({complaint[1]})"
        return True

    def _ends_with(self, line: TrainerLine) -> bool:
        """Whether a line behind a traceback's head is its exception: what is printed in between, by this process or by
        another that writes into the same file, is none.
        """
        last = self._last_frame.get(line.stream)
        if not self._frames.get(line.stream) or last is None:
            return _RAISED.match(line.text) is not None and _kind(line.text) in DEATHS
        if line.number - last.number > _BETWEEN:
            self._inside.pop(line.stream)
            return False
        follows = line.number - last.number <= 2 and _NAME.match(line.text) is not None
        return follows or _RAISED.match(line.text) is not None

    def _says_below(self, line: TrainerLine) -> bool:
        """Whether a line is what an exception, whose own line ends in a colon, has to say; it then holds it."""
        told = self._goes_on.pop(line.stream)
        words = line.text.strip()
        if (
            not any(map(str.isalnum, words))
            or _FRAME.match(line.text)
            or _BEGINS in words
            or "above exception" in words
        ):
            return False
        told.text = f"{told.text} {words}"[:_LONGEST]
        return True

    def _took(self, stream: str) -> tuple[str, ...]:
        """The frames of the stream's traceback, which is over: outermost first, behind what joins it to the last."""
        kept, first = self._frames.pop(stream, deque()), self._outermost.pop(stream, [])
        joined = self._joins.pop(stream, None)
        frames = [*first, *(each for each in kept if len(kept) == _FRAMES or each not in first)] if first else [*kept]
        return (*([joined] if joined else ()), *frames)

    def _event(self, line: TrainerLine) -> Event | None:
        if line.stream in self._goes_on and self._says_below(line):
            return None
        if line.stream in self._validates and self._takes_field(line):
            return None
        if "above exception" in line.text and (joins := line.text.strip()) in (HANDLING, CAUSED):
            self._joins[line.stream] = joins
            return None
        is_frame, is_indented = _FRAME.match(line.text), line.text[:1].isspace()
        if is_frame or (is_indented and line.stream in self._code_follows):
            kept = self._frames.setdefault(line.stream, deque(maxlen=_FRAMES))
            kept.append(line.text.strip()[:200])
            outermost = self._outermost.setdefault(line.stream, [])
            if len(kept) <= 2 and len(outermost) < 2:
                outermost.append(kept[-1])
            self._last_frame[line.stream] = line
            if is_frame and (found := _ON_ONE_LINE.search(line.text)):
                return self._event(replace(line, text=found[1]))
            (self._code_follows.add if is_frame else self._code_follows.discard)(line.stream)
            return None
        self._code_follows.discard(line.stream)
        is_exception = line.stream in self._inside and not is_indented and self._ends_with(line)
        if not is_exception and not (_hints if len(line.text) < _SHORT else _may_tell)(line.text):
            return None
        if _BEGINS in line.text:
            self._inside[line.stream] = line.stream in self._harmless
            self._harmless.discard(line.stream)
            self._frames.pop(line.stream, None)
            self._outermost.pop(line.stream, None)
            return None
        if line.text.lstrip().startswith(_HARMLESS):
            self._harmless.add(line.stream)
            return None
        if is_exception and self._inside.pop(line.stream):
            return None
        kind = _kind(line.text)
        if is_exception and (kind is None or kind in told_lines.KINDS):
            kind = "traceback"
        if kind is None:
            return None
        if kind == "traceback" and _CLOSES.search(line.text):
            self._took(line.stream)
            return None
        # Ray says once what several workers say, and leaves the head of what was ignored out.
        if kind == "traceback" and line.stream in self._harmless and line.stream not in self._inside:
            self._harmless.discard(line.stream)
            self._took(line.stream)
            return None
        frames = self._took(line.stream) if kind in DEATHS else ()
        event = Event(kind, line.text.strip()[:_LONGEST], line.number, line.rank, frames)
        if kind in ("traceback", "error") and event.text.endswith(":"):
            self._goes_on[line.stream] = event
        if _VALIDATES.search(line.text):
            self._validates[line.stream] = event
        return event
